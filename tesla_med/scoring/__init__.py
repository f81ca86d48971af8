"""Metrics and calibration of finished results."""
