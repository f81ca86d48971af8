"""Overlapping regions as classes that exclude each other, and back; or as a question each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def exclusive(outputs: Tensor) -> Tensor:
    """Return log-probabilities (N, 1 + R, *spatial) of classes from the outputs of R overlapping regions.

    nnU-Net paints region after region where its sigmoid is above a half, so that a voxel has the class of the
    last region that it is in. With regions taken as independent, the probability of that class is the
    region's times that of being in no later one; background is in none. They add up to 1, and
    :func:`overlapping` takes them back.

    Args:
        outputs: (N, R, *spatial), logits of the regions in the order in which they are painted.
    """
    import torch
    from torch.nn import functional

    inside, outside = functional.logsigmoid(outputs), functional.logsigmoid(-outputs)
    later = outside.flip(1).cumsum(1).flip(1)  # in none from here on
    after = torch.cat([later[:, 1:], torch.zeros_like(later[:, :1])], dim=1)
    return torch.cat([later[:, :1], inside + after], dim=1)


def overlapping(logs: Tensor) -> Tensor:
    """Return the outputs (N, R, *spatial) of regions from the log-probabilities (N, 1 + R, *spatial)."""
    import torch

    before = torch.logcumsumexp(logs, dim=1)[:, :-1]  # of all classes that are painted earlier
    return logs[:, 1:] - before


def binary(outputs: Tensor) -> Tensor:
    """Return logits (N, 2, R, *spatial) of being outside and inside each of R overlapping regions.

    Regions lie along an axis of their own, so that what sums over classes, the softmax first of all, asks of
    every region by itself whether a voxel is in it.

    Args:
        outputs: (N, R, *spatial), logits of the regions.
    """
    import torch

    return torch.stack([-0.5 * outputs, 0.5 * outputs], dim=1)
