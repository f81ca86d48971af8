"""How units go through a network: driver, predictor, guard, memory."""
