"""Watch a folder: adapt to every case that comes, once, and see whether a site drifts away."""
