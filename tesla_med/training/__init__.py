"""Training of source models, and what is measured on them."""
