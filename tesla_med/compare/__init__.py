"""Grids of methods, protocols, sites and seeds, and what is written of them."""
