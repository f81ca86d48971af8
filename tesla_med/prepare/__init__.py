"""From what was read to what a network takes, and back."""
