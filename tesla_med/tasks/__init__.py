"""Tasks: what the items of a site are, and what is done with a result."""
