"""Correction of the receive field: the slow change of brightness that a coil leaves in an image."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

SMOOTHING = 3 / 32
"""Standard deviation of the blur that leaves the field, as a share of the side of a slice."""
FLOOR = 0.02
"""What is added to the field, as a share of the range of the volume, so that air stays dark."""
_SHRINK = 4


class BiasCorrection:
    """Step of a MONAI pipeline that corrects the image; positions stay, so that nothing is to be undone."""

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the data with ``image``, (C, I, J, K) with slices along K, corrected."""
        image = data["image"]
        values = image.as_tensor().float()
        low = values.amin(dim=(1, 2, 3), keepdim=True)
        changed = image.clone()
        changed[:] = divided(values - low)
        return {**data, "image": changed}


def divided(values: Tensor) -> Tensor:
    """Return (C, I, J, K) values of at least 0, every slice divided by its own blurred self."""
    from torchvision.transforms.v2.functional import gaussian_blur

    slices = values.permute(3, 0, 1, 2)
    sides = slices.shape[-2:]
    small = [max(side // _SHRINK, 1) for side in sides]
    coarse = functional.interpolate(slices, small, mode="area")
    sigma = [max(SMOOTHING * side, 0.1) for side in small]
    kernel = [min(2 * round(3 * width) + 1, 2 * side - 1) for width, side in zip(sigma, small, strict=True)]
    field = gaussian_blur(coarse, kernel[::-1], sigma[::-1])
    field = functional.interpolate(field, sides, mode="bilinear")
    floor = FLOOR * values.amax(dim=(1, 2, 3), keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return values / (field.permute(1, 2, 3, 0) + floor)
