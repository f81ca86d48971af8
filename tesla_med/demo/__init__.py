"""Generated volumes and tiles, and the whole loop on them."""
