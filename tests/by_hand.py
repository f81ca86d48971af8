"""Figures by their definition, one step after the other."""

from __future__ import annotations

import numpy as np


def plain_ece(probability, truth, bins):
    """Return the calibration error by its definition, bin after bin."""
    edges = np.linspace(0, 1, bins + 1)
    total = 0.0
    for index in range(bins):
        inside = (probability > edges[index]) & (probability <= edges[index + 1])
        if index == 0:
            inside |= probability == 0
        if inside.any():
            total += inside.sum() * abs(truth[inside].mean() - probability[inside].mean())
    return total / len(probability)
