"""From a magnitude in [0, 1] to a physical range: a transform and its range make the function of an op."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from tesla_med.augment import warp
from tesla_med.augment.op import Function

# ------------------------------------------------------------ geometric: thetas (n, 2, 3)


def entry(row: int, column: int, low: float, high: float) -> Function:
    """Return a function that adds ``low`` to ``high``, times the sign, to one entry of the identity theta."""

    def function(images: Tensor, magnitude: Tensor, sign: Tensor | None) -> Tensor:
        value = _linear(magnitude, low, high) * (1.0 if sign is None else sign)
        before = 3 * row + column
        step = functional.pad(value[:, None], (before, 5 - before)).view(-1, 2, 3)
        return warp.identity(images.shape[0], images.device) + step

    return function


def rotation(low: float, high: float) -> Function:
    """Return a function that rotates by ``low`` to ``high`` radians, times the sign."""

    def function(images: Tensor, magnitude: Tensor, sign: Tensor | None) -> Tensor:
        angle = _linear(magnitude, low, high) * (1.0 if sign is None else sign)
        cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        height, width = images.shape[-2:]  # positions are in halves of the field
        ratio = height / width
        return torch.stack([cos, sin * ratio, zero, -sin / ratio, cos, zero], dim=1).view(-1, 2, 3)

    return function


def scaling(strength: float) -> Function:
    """Return a function that scales the field of view by up to 1 + ``strength``, or its inverse."""

    def function(images: Tensor, magnitude: Tensor, sign: Tensor | None) -> Tensor:
        exponent = magnitude * math.log1p(strength) * (1.0 if sign is None else sign)
        eye = warp.identity(images.shape[0], images.device)
        return eye * exponent.exp()[:, None, None]

    return function


# ------------------------------------------------------------ intensity: images


def factor(transform: Callable[[Tensor, Tensor], Tensor], low: float, high: float) -> Function:
    """Return a function that hands ``transform`` a factor of ``low`` to ``high`` (n, 1, 1, 1)."""

    def mapped(images: Tensor, magnitude: Tensor, _: Tensor | None) -> Tensor:
        return transform(images, _linear(magnitude, low, high).view(-1, 1, 1, 1))

    return mapped


def signed_power(transform: Callable[[Tensor, Tensor], Tensor], octaves: float) -> Function:
    """Return a function that hands ``transform`` the factor 2 ** (sign * magnitude * octaves) (n, 1, 1, 1).

    The factor is as likely to be above 1 as below, and is 1 at magnitude 0.
    """

    def mapped(images: Tensor, magnitude: Tensor, sign: Tensor | None) -> Tensor:
        exponent = octaves * magnitude * (1.0 if sign is None else sign)
        return transform(images, torch.exp2(exponent).view(-1, 1, 1, 1))

    return mapped


def _linear(magnitude: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * magnitude
