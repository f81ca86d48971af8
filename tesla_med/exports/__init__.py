"""Formats in which finished masks leave a run, one module each."""
