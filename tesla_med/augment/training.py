"""How images are varied while a source model is trained: as scanners, laboratories and patients differ."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def vary_slices(images: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Vary a batch as scanners and patients do, with MONAI's random transforms, each slice its own way.

    Left-right flip (p 0.5), rotation within 10 degrees, zoom 0.9 to 1.1, shift within 5 % of the
    field; gamma 0.8 to 1.25, contrast within 15 %, brightness within 0.08, Gaussian blur up to 0.8 pixels
    (p 0.3), noise up to 0.03.

    Args:
        images: (N, C, H, W) float32 in [0, 1]; the first spatial axis runs left-right.
        labels: (N, H, W) int64.
        generator: on the CPU; one number of it seeds the transforms for the batch.

    Returns:
        Images in [0, 1] and labels of the same shapes.
    """
    transform = _augmentation(int(images.shape[2]), int(images.shape[3]))
    transform.set_random_state(seed=int(torch.randint(2**31, (1,), generator=generator)))
    varied = [
        transform({"image": image, "label": label[None].float()})
        for image, label in zip(images, labels, strict=True)
    ]
    moved = torch.stack([item["image"] for item in varied])
    targets = torch.stack([item["label"][0] for item in varied])
    return moved.clamp(0, 1), targets.round().long()


@lru_cache(maxsize=4)
def _augmentation(height: int, width: int) -> Any:
    """Return the random transforms for slices of this size; shifts are given in pixels there."""
    from monai import transforms as mt

    both = ("image", "label")
    return mt.Compose(
        [
            mt.RandFlipd(both, prob=0.5, spatial_axis=0),
            mt.RandAffined(
                both,
                prob=1.0,
                rotate_range=math.pi / 18,
                scale_range=(0.1, 0.1),
                translate_range=(0.05 * height, 0.05 * width),
                mode=("bilinear", "nearest"),
                padding_mode="border",
                cache_grid=True,
                spatial_size=(height, width),
            ),
            mt.RandAdjustContrastd("image", prob=1.0, gamma=(0.8, 1.25)),
            mt.RandScaleIntensityFixedMeand("image", prob=1.0, factors=0.15),
            mt.RandShiftIntensityd("image", prob=1.0, offsets=0.08),
            mt.RandGaussianSmoothd("image", prob=0.3, sigma_x=(0.3, 0.8), sigma_y=(0.3, 0.8)),
            mt.RandGaussianNoised("image", prob=1.0, std=0.03, sample_std=True),
            mt.ToTensord(both, track_meta=False),
        ]
    )


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
