"""tesla-med: adapt a segmentation model to a new site at test time, without labels."""

__version__ = "0.1.0"
