"""Images with what a scanner added taken out again: its noise, its receive field.

A corrected image is no better an image, as edges go with the noise and contrast with the field; but what a
network says of it depends less on the scanner. Mean and standard deviation stay as they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from tesla_med.augment.warp import as_slices, as_volumes

Correction = Literal["smooth", "field", "field_smooth"]
"""``smooth``: slices blurred by ``SIGMA``; ``field``: divided by their receive field; or both."""
SIGMA = 1.0
"""Standard deviation of the blur that takes noise out, in pixels."""
WIDTH = 3 / 32
"""Standard deviation of the blur that leaves the receive field, as a share of the side of a slice."""
FLOOR = 0.02
"""What is added to the field, as a share of the range of an image, so that air stays dark."""
_LEAST = 1e-6


def corrected(images: Tensor, correction: Correction) -> Tensor:
    """Return images after a correction, each channel with its mean and standard deviation as before.

    Args:
        images: (N, C, *spatial) in [0, 1], slices or volumes, whose last two axes are those of a slice.
        correction: what is done to every slice.

    Returns:
        The same shape, in [0, 1].
    """
    axes = tuple(range(2, images.dim()))
    found = images
    if "field" in correction:
        above = images - images.amin(axes, keepdim=True)
        field = _blurred(above, [WIDTH * side for side in images.shape[-2:]])
        found = above / (field + FLOOR * above.amax(axes, keepdim=True) + _LEAST)
    if "smooth" in correction:
        found = _blurred(found, [SIGMA, SIGMA])
    spread, middle = torch.std_mean(found, axes, keepdim=True, correction=0)
    before, centre = torch.std_mean(images, axes, keepdim=True, correction=0)
    return ((found - middle) * (before / spread.clamp_min(_LEAST)) + centre).clamp(0.0, 1.0)


def _blurred(images: Tensor, sigmas: Sequence[float]) -> Tensor:
    """Return every slice blurred, by so many pixels along its first and its second axis."""
    from torchvision.transforms.v2.functional import gaussian_blur

    size = [min(2 * round(3 * s) + 1, 2 * n - 1) for s, n in zip(sigmas, images.shape[-2:], strict=True)]
    slices = as_slices(images) if images.dim() > 4 else images
    blurred: Tensor = gaussian_blur(slices, size[::-1], [max(sigma, 0.1) for sigma in sigmas[::-1]])
    return as_volumes(blurred, images.shape[2:-2]) if images.dim() > 4 else blurred
