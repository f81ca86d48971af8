"""Whole images through a network that sees patches: overlapping tiles, weighted by a Gaussian, and mirrored.

The tiles are those of nnU-Net v2 (Isensee et al., Nature Methods 2021): as few as overlap by half at least,
spread evenly, weighted by a Gaussian whose sigma is an eighth of the patch. MONAI's sliding window places
them otherwise, which changes masks. Everything here is for prediction and keeps no gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

OVERLAP = 0.5
SIGMA = 1 / 8
LARGE = 2 * 2**30
"""Bytes of logits from which on they are collected in half precision, on the CPU."""


def starts(size: int, patch: int) -> list[int]:
    """Return where tiles begin along an axis, from 0 to ``size - patch``; ``size`` is at least ``patch``."""
    count = math.ceil((size - patch) / (patch * OVERLAP)) + 1
    step = (size - patch) / (count - 1) if count > 1 else 0.0
    return [int(np.round(step * index)) for index in range(count)]


@lru_cache(maxsize=4)
def importance(patch: tuple[int, ...]) -> Tensor:
    """Return the weight of each position of a tile, largest 10, never 0."""
    from scipy.ndimage import gaussian_filter

    peak = np.zeros(patch)
    peak[tuple(side // 2 for side in patch)] = 1
    weight = gaussian_filter(peak, [side * SIGMA for side in patch], mode="constant")
    found = torch.from_numpy((10 * weight / weight.max()).astype(np.float32))
    return found.clamp_min(float(found[found > 0].min()))


@torch.no_grad()
def tiled(
    network: Callable[[Tensor], Tensor], images: Tensor, patch: Sequence[int], mirror: Sequence[int]
) -> Tensor:
    """Return the logits (N, L, *spatial) of whole images.

    Args:
        network: maps patches (N, C, *patch) to logits (N, L, *patch).
        images: (N, C, *spatial); where they are smaller than the patch they are padded with zeros, evenly on
            both sides.
        patch: size of a tile, an entry for each spatial axis.
        mirror: spatial axes, from 0, over which tiles are mirrored too; logits are the mean over all
            combinations.
    """
    shape = images.shape[2:]
    missing = [max(side - size, 0) for side, size in zip(patch, shape, strict=True)]
    before = [total // 2 for total in missing]
    pads = [item for total, low in zip(missing, before, strict=True) for item in (total - low, low)]
    padded = functional.pad(images, pads[::-1]) if any(missing) else images
    found = _stitched(network, padded, tuple(patch), mirror)
    inside: Any = (..., *(slice(low, low + size) for low, size in zip(before, shape, strict=True)))
    return found[inside]


def _stitched(
    network: Callable[[Tensor], Tensor], images: Tensor, patch: tuple[int, ...], mirror: Sequence[int]
) -> Tensor:
    axes = [starts(size, side) for size, side in zip(images.shape[2:], patch, strict=True)]
    places = list(itertools.product(*axes))
    if len(places) == 1:
        return mirrored(network, images, mirror)
    weight = importance(patch)
    sums = torch.zeros(images.shape[2:])
    for place in places:
        sums[_spot(place, patch)] += weight
    total = None
    for place in places:
        spot = _spot(place, patch)
        where = (slice(None), slice(None), *spot)
        logits = mirrored(network, images[where].contiguous(), mirror).float()
        if total is None:
            shape = (images.shape[0], logits.shape[1], *images.shape[2:])
            large = 4 * math.prod(shape) > LARGE
            device = torch.device("cpu") if large else logits.device
            total = torch.zeros(shape, dtype=torch.float16 if large else torch.float32, device=device)
        share = (weight / sums[spot]).to(total.device)  # of 0 to 1, so that half precision loses no tile
        total[where] += (logits.to(total.device) * share).to(total.dtype)
    assert total is not None  # noqa: S101 - there are places
    return total.to(images.device)


def _spot(place: Sequence[int], patch: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(low, low + side) for low, side in zip(place, patch, strict=True))


def mirrored(network: Callable[[Tensor], Tensor], images: Tensor, mirror: Sequence[int]) -> Tensor:
    """Return the mean logits over mirrored images, mirrored back.

    Args:
        network: maps images to logits of the same size.
        images: (N, C, *spatial).
        mirror: spatial axes, from 0; every combination counts, the images themselves too.
    """
    total = network(images)
    combinations = [
        [axis + 2 for axis in some]
        for count in range(1, len(mirror) + 1)
        for some in itertools.combinations(mirror, count)
    ]
    if not combinations:
        return total
    total = total.clone()
    for some in combinations:
        total += network(images.flip(some)).flip(some)
    return total / (len(combinations) + 1)


def tiles(shape: Sequence[int], patch: Sequence[int]) -> int:
    """Return how many tiles an image of a shape has."""
    return math.prod(len(starts(max(size, side), side)) for size, side in zip(shape, patch, strict=True))
