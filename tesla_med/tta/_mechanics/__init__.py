"""Mechanics of a method that its file need not speak of: device, batches, state, graphs, parameters."""
