"""What else can be done with a task: predict, evaluate, rollback, check, estimate."""
