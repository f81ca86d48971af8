"""The 2x3 warp, its inverse and its resampling, through which all geometry of views goes.

Volumes (N, C, D, H, W) are warped within their slices, all slices of one alike, by the theta of a slice, or
in any of their planes by a theta (N, 3, 4) of the volume.

A theta is (N, 2, 3) float32 and maps output positions to input positions in units of half the field ([-1, 1],
half-pixel centres, ``align_corners=False``), as in ``torch.nn.functional.affine_grid``.

There is a single padding rule: whatever makes a *view*, be it an image or pseudo-labels, reflects at the
border; whatever comes *back* to the original frame is zero where the view did not look. Class probabilities
of tiles, (N, L), have nowhere to move and stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def identity(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return ``count`` identity thetas, (count, 2, 3)."""
    return torch.eye(2, 3, device=device).expand(count, 2, 3)


PLANES = ((0, 1), (0, 2), (1, 2))
"""Axes of the planes of a volume, as ``grid_sample`` counts them: columns, rows, slices."""


def drawn_planes(shape: Sequence[int], generator: torch.Generator) -> Tensor | None:
    """Return a plane at random for every volume of (N, C, D, H, W), (N,) positions in ``PLANES``.

    None for slices, which have no other plane.
    """
    return None if len(shape) != 5 else torch.randint(len(PLANES), (shape[0],), generator=generator)


def in_planes(theta: Tensor, planes: Tensor) -> Tensor:
    """Return the thetas (N, 3, 4) that do in a plane of a volume what a theta does in a slice.

    Args:
        theta: (N, 2, 3), composed of all that is to be done.
        planes: (N,) positions in ``PLANES``; 0 is the plane of the slices.
    """
    planes = planes.to(theta.device, non_blocking=True)
    whole = torch.eye(3, 4, device=theta.device).expand(len(theta), 3, 4)
    result = whole
    for number, axes in enumerate(PLANES):
        here = whole.clone()
        for row, axis in enumerate(axes):
            for column, place in enumerate((*axes, 3)):
                here[:, axis, place] = theta[:, row, column]
        result = torch.where((planes == number)[:, None, None], here, result)
    return result


def compose(first: Tensor, second: Tensor) -> Tensor:
    """Return the theta of warping by ``first`` and then by ``second``, all (N, 2, 3)."""
    return first[:, :, :2] @ second + functional.pad(first[:, :, 2:], (2, 0))


def invert(theta: Tensor) -> Tensor:
    """Return the theta that undoes ``theta``, (N, 2, 3) or (N, 3, 4), in closed form.

    Raises:
        torch.linalg.LinAlgError: never, as a singular theta gives infinities.
    """
    if theta.shape[1] == 3:
        first, second, third = theta[:, :, :3].unbind(dim=1)
        columns = [second.cross(third, dim=1), third.cross(first, dim=1), first.cross(second, dim=1)]
        determinant = (first * columns[0]).sum(dim=1)[:, None, None]
        undone = torch.stack(columns, dim=2) / determinant
        return torch.cat([undone, -undone @ theta[:, :, 3:]], dim=2)
    a, b, tx = theta[:, 0, 0], theta[:, 0, 1], theta[:, 0, 2]
    c, d, ty = theta[:, 1, 0], theta[:, 1, 1], theta[:, 1, 2]
    scale = 1.0 / (a * d - b * c)
    inverse = torch.stack([d, -b, b * ty - d * tx, -c, a, c * tx - a * ty], dim=1) * scale[:, None]
    return inverse.view(-1, 2, 3)


def to_view(images: Tensor, theta: Tensor) -> Tensor:
    """Resample (N, C, H, W) bilinearly into the frame of ``theta``, reflecting at the border."""
    return _resample(images, theta, "reflection")


def from_view(maps: Tensor, theta: Tensor) -> Tensor:
    """Resample (N, C, H, W) back from the frame of ``theta``, with zeros where the view did not look."""
    return _resample(maps, invert(theta), "zeros")


def _resample(images: Tensor, theta: Tensor, padding: str) -> Tensor:
    if images.dim() == 2:  # one distribution a tile: the same in every frame
        return images
    if theta.shape[1] == 3 and images.dim() > 5:  # classes and answers are axes of their own
        return _resample(images.flatten(1, -4), theta, padding).view(images.shape)
    if theta.shape[1] == 3:
        size = [len(images), 1, *images.shape[-3:]]
        grid = functional.affine_grid(theta.to(images.device), size, align_corners=False)
        return functional.grid_sample(
            images.float(), grid, mode="bilinear", padding_mode=padding, align_corners=False
        )
    if images.dim() > 4:
        each = theta.repeat_interleave(math.prod(images.shape[2:-2]), dim=0)
        return as_volumes(_resample(as_slices(images), each, padding), images.shape[2:-2])
    grid = sampling_grid(theta.to(images.device), images.shape[-2], images.shape[-1])
    return functional.grid_sample(
        images.float(), grid, mode="bilinear", padding_mode=padding, align_corners=False
    )


def sampling_grid(theta: Tensor, height: int, width: int) -> Tensor:
    """Return the grid (N, height, width, 2) of ``affine_grid``, without its slow matrix product."""
    x = (torch.arange(width, device=theta.device) * 2 + 1) / width - 1
    y = (torch.arange(height, device=theta.device) * 2 + 1) / height - 1
    matrix = theta[:, :, :, None, None]
    return (
        matrix[:, :, 0] * x[None, None, None, :] + matrix[:, :, 1] * y[None, None, :, None] + matrix[:, :, 2]
    ).permute(0, 2, 3, 1)


def as_slices(volumes: Tensor) -> Tensor:
    """Return the slices (N * D, C, H, W) of volumes (N, C, D, H, W), in order; D may be several axes."""
    return volumes.movedim(1, -3).flatten(0, -4)


def as_volumes(slices: Tensor, depth: Sequence[int]) -> Tensor:
    """Return the volumes (N, C, *depth, H, W) of which :func:`as_slices` gave the slices."""
    return slices.reshape(-1, *depth, *slices.shape[1:]).movedim(-3, 1)


def normalise(probs: Tensor) -> Tensor:
    """Return (N, L, *spatial) rescaled to sum to 1 over L; uniform where nothing is left; NaN stays NaN."""
    total = probs.sum(dim=1, keepdim=True)
    uniform = torch.full_like(probs, 1.0 / probs.shape[1])
    return torch.where(total <= 1e-6, uniform, probs / total.clamp_min(1e-6))
