"""Configuration: models, files and tables. Nothing here imports torch."""
