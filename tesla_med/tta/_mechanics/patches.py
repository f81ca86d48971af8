"""Patches of images that are too large for a network to learn from as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

FOREGROUND = 2 / 3
"""Share of the patches that are drawn about the foreground."""


def drawn_patches(
    images: Tensor, patch: Sequence[int], count: int, spots: Tensor | None, generator: torch.Generator
) -> Tensor:
    """Return patches (count, C, *patch), two of three about the foreground where there is some.

    An axis that is shorter than the patch is taken whole.

    Args:
        images: (N, C, *spatial), slices or volumes.
        patch: size along each spatial axis.
        count: number of patches.
        spots: (P, 1 + axes) positions of the foreground, as ``nonzero`` gives them, on the CPU; or None.
        generator: generator on the CPU.
    """
    parts = []
    spots = torch.empty(0, images.dim() - 1) if spots is None else spots
    sizes = torch.tensor(images.shape[2:])
    sides = torch.minimum(torch.tensor(patch), sizes)
    for _ in range(count):
        shares = torch.rand(2 + len(sizes), generator=generator)
        picked = torch.randint(max(len(spots), 1), (1,), generator=generator)
        if len(spots) and float(shares[0]) < FOREGROUND:
            index, *centre = spots[picked][0].tolist()
            lows = torch.tensor(centre) - sides // 2
        else:
            index = int(shares[1] * len(images))
            lows = (shares[2:] * (sizes - sides + 1)).long()
        lows = torch.minimum(lows.clamp_min(0), sizes - sides)
        inside: Any = (index, slice(None), *(slice(a, a + b) for a, b in zip(lows, sides, strict=True)))
        parts.append(images[inside])
    return torch.stack(parts)
