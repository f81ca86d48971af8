"""Pictures for the tests of tiles."""

from __future__ import annotations

import numpy as np
import torch


def smooth(size=64, seed=0):
    """Return a smooth 8-bit RGB picture (H, W, 3)."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    return (255 * fine[0].permute(1, 2, 0)).round().numpy().astype(np.uint8)


def channels(array):
    """Return (3, H, W) in [0, 1] of an 8-bit picture."""
    return array.transpose(2, 0, 1) / 255
