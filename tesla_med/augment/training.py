"""How tiles are varied while a source model is trained: as laboratories and microscopes differ.

Slices are varied by :mod:`tesla_med.augment.randomise`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tesla_med.augment import intensity
from tesla_med.augment.stain import scale_stain


def turned(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip each of (N, 3, H, W) left-right with p = 0.5 and, where it is square, turn it by quarters."""
    draws = torch.rand(2, len(images), 1, 1, 1, generator=generator).to(images.device)
    flipped = torch.where(draws[0] < 0.5, images.flip(-1), images)
    if images.shape[-1] != images.shape[-2]:
        return flipped
    quarters = (4 * draws[1]).long()
    for number in (1, 2, 3):
        flipped = torch.where(quarters == number, torch.rot90(flipped, number, (-2, -1)), flipped)
    return flipped


def vary_tiles(images: Tensor, generator: torch.Generator) -> Tensor:
    """Also change brightness and contrast of each of (N, 3, H, W) in [0, 1] a little."""
    changed = turned(images, generator)
    draws = torch.rand(2, len(images), 1, 1, 1, generator=generator).to(images.device)
    mean = changed.mean(dim=(1, 2, 3), keepdim=True)
    changed = (changed - mean) * (0.85 + 0.3 * draws[0]) + mean + 0.1 * (draws[1] - 0.5)
    return changed.clamp(0, 1)


def vary_tiles_widely(images: Tensor, generator: torch.Generator) -> Tensor:
    """Also change stains (factors 0.6 to 1.6), sharpness (blur to 1.2 pixels, p 0.3) and noise (to 0.05)."""
    changed = vary_tiles(images, generator)
    draws = torch.rand(5, len(images), 1, 1, 1, generator=generator).to(images.device)
    for stain in (0, 1):
        changed = scale_stain(changed, torch.exp((2 * draws[stain] - 1) * 0.47), stain).clamp(0, 1)
    sigma = 1.2 * draws[3].flatten()
    changed = torch.where(draws[2] < 0.3, intensity.gaussian_blur(changed, sigma), changed)
    noise = torch.randn(images.shape, device=images.device)
    return (changed + 0.05 * draws[4] * noise).clamp(0, 1)


TILE_FAMILIES = {"none": None, "mild": vary_tiles, "robust": vary_tiles_widely}
"""By the name of the family: (images (N, 3, H, W) in [0, 1], generator on the CPU) -> varied images."""
