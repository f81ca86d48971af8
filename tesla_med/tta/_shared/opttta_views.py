"""Operations, views and norm statistics of OptTTA.

For every view, the strength of each operation is drawn uniformly up to the learned magnitude, and so is its
sign. A magnitude is thus the largest strength, and no two views are alike. Drawing is separate from applying.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tesla_med.augment import warp
from tesla_med.augment.ops import OPS
from tesla_med.augment.policy import View
from tesla_med.augment.static import magnitude_of
from tesla_med.models.base import norm_layers

OPERATIONS = ("gamma", "blur", "contrast", "brightness", "identity", "crop", "flip_rotate")
"""Names in the order of the magnitudes. Geometric operations form one warp, before the intensity ones."""

INTENSITY = {"gamma": "Gamma", "blur": "GaussianBlur", "contrast": "TissueContrast", "brightness": "Gain"}
"""The registered op behind each intensity operation."""

ROTATION = "Rotate"
SMALLEST_CROP = 0.5
"""Side of the smallest random resized crop, as a share of the field."""


@dataclass(frozen=True)
class Draw:
    """Everything random about one batch of views, on the device of the images.

    Attributes:
        shares: (n, 7) in [0, 1], the share of the learned magnitude of each operation.
        signs: (n, 7) of +1 and -1.
        flips: (n, 2) of +1 and -1, along W and along H.
        shifts: (n, 2) in [-1, 1], where a crop lies between the borders, along W and along H.
    """

    shares: Tensor
    signs: Tensor
    flips: Tensor
    shifts: Tensor


def draw_views(count: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Draw:
    """Draw one view per image for ``count`` images, from a generator on the CPU."""
    width = len(OPERATIONS)
    table = torch.rand(count, 2 * width + 4, generator=generator).to(device, non_blocking=True)
    shares, signs, flips, shifts = torch.split(table, [width, width, 2, 2], dim=1)
    return Draw(shares, _sign(signs), _sign(flips), 2.0 * shifts - 1.0)


def apply_draw(images: Tensor, members: tuple[str, ...], magnitudes: Tensor, draw: Draw) -> View:
    """Make one view per image by the operations of a sub-policy, differentiable in the magnitudes.

    Args:
        images: (n, C, H, W) in [0, 1].
        members: names of the sub-policy's operations.
        magnitudes: (7,) in [0, 1], one per operation.
        draw: what :func:`draw_views` returned.
    """
    strengths = dict(zip(OPERATIONS, (draw.shares * magnitudes).unbind(dim=1), strict=True))
    signs = dict(zip(OPERATIONS, draw.signs.unbind(dim=1), strict=True))
    theta = warp.identity(images.shape[0], images.device)
    if "crop" in members:
        theta = warp.compose(theta, _crop(strengths["crop"], draw.shifts))
    if "flip_rotate" in members:
        op, sign = OPS.get(ROTATION), signs["flip_rotate"]
        turn = op.theta(images, magnitude_of(op, strengths["flip_rotate"], sign), sign)
        theta = warp.compose(warp.compose(theta, _flip(draw.flips)), turn)
    moved = "crop" in members or "flip_rotate" in members
    view = warp.to_view(images.clamp(0, 1), theta).clamp(0, 1) if moved else images.clamp(0, 1)
    for name, registered in INTENSITY.items():
        if name in members:
            op = OPS.get(registered)
            magnitude = magnitude_of(op, strengths[name], signs[name])
            view = op.intensities(view, magnitude, signs[name])
    return View(view, theta)


def _sign(uniform: Tensor) -> Tensor:
    return 2.0 * (uniform < 0.5).float() - 1.0


def _crop(strength: Tensor, shifts: Tensor) -> Tensor:
    """Return the thetas of crops inside the field, with a side of 1 (strength 0) to ``SMALLEST_CROP``."""
    side = 1.0 - (1.0 - SMALLEST_CROP) * strength
    moves = shifts * (1.0 - side)[:, None]
    zero = torch.zeros_like(side)
    return torch.stack([side, zero, moves[:, 0], zero, side, moves[:, 1]], dim=1).view(-1, 2, 3)


def _flip(flips: Tensor) -> Tensor:
    zero = torch.zeros_like(flips[:, 0])
    return torch.stack([flips[:, 0], zero, zero, zero, flips[:, 1], zero], dim=1).view(-1, 2, 3)


@contextmanager
def norm_distance(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect at every batch norm how far its inputs are from the statistics that it remembers.

    Each layer gives a scalar: the squared difference of the means plus that of the variances, over batch and
    space, averaged over channels. The model must be in eval mode, and gradients must be enabled: without them
    the U-Net folds biases away, so that the inputs of its norms are not what they normalise.
    """
    distances: list[Tensor] = []

    def keep(layer: Any, inputs: tuple[Any, ...]) -> None:
        features = inputs[0].float()
        axes = [axis for axis in range(features.dim()) if axis != 1]
        variance, mean = torch.var_mean(features, dim=axes, correction=0)
        distance = (mean - layer.running_mean).square() + (variance - layer.running_var).square()
        distances.append(distance.mean())

    layers = [layer for layer in norm_layers(model) if layer.running_mean is not None]
    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        yield distances
    finally:
        for handle in handles:
            handle.remove()
