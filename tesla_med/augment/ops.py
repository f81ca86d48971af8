"""Augmentation operations: pure, batched, (image, magnitude) -> (image, theta).

An op maps a magnitude in [0, 1] to its stated physical range. Geometric ops leave the image alone
and return the theta to be resampled with (the policy composes the thetas of a sub-policy and
resamples once); intensity ops change the image and return the identity. Nothing here draws random
numbers: signs and noise are drawn by the policy and handed in.

To add an op, register a function below with its range; policies and the contract tests pick it up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from tesla_med.augment import intensity, stain, warp
from tesla_med.registry import Registry

Function = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Op:
    """One augmentation operation.

    Attributes:
        name: its registered name.
        kind: ``geometric`` (the function returns a theta) or ``intensity`` (an image).
        unit: what the magnitude is mapped to, with its range, for people.
        identity: the magnitude at which nothing changes, or None if there is none.
        signed: the policy draws a sign, +1 or -1 an image, that multiplies the displacement.
        gradient: ``exact`` in the magnitude, or ``straight-through``: d(output)/d(magnitude) = 1
            for every pixel (Sec. 3.3 of the paper).
        noise: given the shape of the images, the shape of the standard normal draw it needs.
        start: the magnitude that learning starts from.
        function: (images (n, C, H, W), magnitude (n,), draw or sign) -> images or thetas.
    """

    name: str
    kind: Literal["geometric", "intensity"]
    unit: str
    identity: float | None
    signed: bool
    gradient: Literal["exact", "straight-through"]
    noise: Callable[[Shape], Shape] | None
    function: Function
    start: float = 0.5

    def theta(self, images: Tensor, magnitude: Tensor, sign: Tensor | None = None) -> Tensor:
        """Return the (n, 2, 3) theta of a geometric op, the identity of an intensity op."""
        if self.kind == "intensity":
            return warp.identity(images.shape[0], images.device)
        return self.function(images, magnitude, sign)

    def intensities(self, images: Tensor, magnitude: Tensor, draw: Tensor | None = None) -> Tensor:
        """Return the images of an intensity op, both in [0, 1]; a geometric op changes none."""
        if self.kind == "geometric":
            return images
        return intensity.unit_range(self.function(images, magnitude, draw))

    def __call__(
        self, images: Tensor, magnitude: Tensor, draw: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Apply the op alone.

        Args:
            images: (n, C, H, W) float32 in [0, 1].
            magnitude: (n,) in [0, 1].
            draw: signs (n,) for a signed op (default +1), standard normal noise of the shape
                ``noise(images.shape)`` for a random one (default zeros: no effect), else ignored.

        Returns:
            Images in [0, 1], resampled where the op is geometric, and the (n, 2, 3) theta.
        """
        theta = self.theta(images, magnitude, draw)
        if self.kind == "geometric":
            return warp.to_view(images.clamp(0, 1), theta).clamp(0, 1), theta
        return self.intensities(intensity.unit_range(images), magnitude, draw), theta


OPS: Registry[Op] = Registry("augmentation op")


def _register(
    name: str,
    kind: Literal["geometric", "intensity"],
    unit: str,
    function: Function,
    *,
    identity: float | None,
    signed: bool = False,
    gradient: Literal["exact", "straight-through"] = "exact",
    noise: Callable[[Shape], Shape] | None = None,
    start: float = 0.5,
) -> None:
    OPS.register(name)(Op(name, kind, unit, identity, signed, gradient, noise, function, start))


# ------------------------------------------------------------ geometric


def _linear(magnitude: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * magnitude


def _entry(row: int, column: int, low: float, high: float) -> Function:
    def function(images: Tensor, magnitude: Tensor, sign: Tensor | None) -> Tensor:
        value = _linear(magnitude, low, high) * (1.0 if sign is None else sign)
        before = 3 * row + column
        step = functional.pad(value[:, None], (before, 5 - before)).view(-1, 2, 3)
        return warp.identity(images.shape[0], images.device) + step

    return function


def _rotation(low: float, high: float) -> Function:
    def function(images: Tensor, magnitude: Tensor, sign: Tensor | None) -> Tensor:
        angle = _linear(magnitude, low, high) * (1.0 if sign is None else sign)
        cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        return torch.stack([cos, sin, zero, -sin, cos, zero], dim=1).view(-1, 2, 3)

    return function


def _scaling(strength: float) -> Function:
    def function(images: Tensor, magnitude: Tensor, sign: Tensor | None) -> Tensor:
        exponent = magnitude * math.log1p(strength) * (1.0 if sign is None else sign)
        eye = warp.identity(images.shape[0], images.device)
        return eye * exponent.exp()[:, None, None]

    return function


_register("ShearX", "geometric", "shear, -0.3 to 0.3", _entry(0, 1, -0.3, 0.3), identity=0.5, signed=True)
_register("ShearY", "geometric", "shear, -0.3 to 0.3", _entry(1, 0, -0.3, 0.3), identity=0.5, signed=True)
_register(
    "TranslateX",
    "geometric",
    "shift along W, -0.225 to 0.225 of the field",
    _entry(0, 2, -0.45, 0.45),
    identity=0.5,
    signed=True,
)
_register(
    "TranslateY",
    "geometric",
    "shift along H, -0.225 to 0.225 of the field",
    _entry(1, 2, -0.45, 0.45),
    identity=0.5,
    signed=True,
)
_register(
    "Rotate",
    "geometric",
    "rotation, -30 to 30 degrees",
    _rotation(-math.pi / 6, math.pi / 6),
    identity=0.5,
    signed=True,
    start=0.98,  # the release always turns by 30 degrees, either way; from there it can be learned
)
_register(
    "MildRotate",
    "geometric",
    "rotation, 0 to 10 degrees",
    _rotation(0, math.pi / 18),
    identity=0.0,
    signed=True,
)
_register(
    "MildShift",
    "geometric",
    "shift along W, 0 to 5 % of the field",
    _entry(0, 2, 0, 0.1),
    identity=0.0,
    signed=True,
)
_register("MildShear", "geometric", "shear, 0 to 0.1", _entry(0, 1, 0, 0.1), identity=0.0, signed=True)
_register(
    "MildScale", "geometric", "field of view times 1/1.15 to 1.15", _scaling(0.15), identity=0.0, signed=True
)

# ------------------------------------------------------------ intensity, in the paper


def _factor(function: Callable[[Tensor, Tensor], Tensor], low: float, high: float) -> Function:
    def mapped(images: Tensor, magnitude: Tensor, _: Tensor | None) -> Tensor:
        return function(images, _linear(magnitude, low, high).view(-1, 1, 1, 1))

    return mapped


_register(
    "Contrast",
    "intensity",
    "contrast factor, 0.1 to 1.9",
    _factor(intensity.contrast, 0.1, 1.9),
    identity=0.5,
)
_register(
    "Brightness",
    "intensity",
    "intensity factor, 0.1 to 1.9",
    _factor(intensity.brightness, 0.1, 1.9),
    identity=0.5,
)
_register(
    "Sharpness",
    "intensity",
    "sharpness factor, 0.1 to 1.9",
    _factor(intensity.sharpness, 0.1, 1.9),
    identity=0.5,
)
_register(
    "Color",
    "intensity",
    "saturation factor, 0.1 to 1.9",
    _factor(intensity.saturation, 0.1, 1.9),
    identity=0.5,
)
_register(
    "AutoContrast",
    "intensity",
    "image stretched to [0, 1]; the magnitude has no effect",
    lambda images, magnitude, _: intensity.straight_through(intensity.autocontrast(images), magnitude),
    identity=None,
    gradient="straight-through",
)
_register(
    "Equalize",
    "intensity",
    "histogram made flat; the magnitude has no effect",
    lambda images, magnitude, _: intensity.straight_through(intensity.equalize(images), magnitude, images),
    identity=None,
    gradient="straight-through",
)
_register(
    "Posterize",
    "intensity",
    "bits kept, 4 to 8",
    lambda images, magnitude, _: intensity.straight_through(
        intensity.posterize(images, magnitude), magnitude, images
    ),
    identity=None,
    gradient="straight-through",
)
_register(
    "Solarize",
    "intensity",
    "threshold above which the image is inverted, 0 to 1",
    lambda images, magnitude, _: intensity.straight_through(
        intensity.solarize(images, magnitude), magnitude, images
    ),
    identity=1.0,
    gradient="straight-through",
)
_register(
    "Invert",
    "intensity",
    "image inverted; the magnitude has no effect",
    lambda images, magnitude, _: intensity.straight_through(1.0 - images, magnitude, images),
    identity=None,
    gradient="straight-through",
)

# ------------------------------------------------------------ intensity, what scanners change


def _signed_power(function: Callable[[Tensor, Tensor], Tensor], octaves: float) -> Function:
    """Hand ``function`` 2 ** (sign * magnitude * octaves): as likely up as down, the identity at 0."""

    def mapped(images: Tensor, magnitude: Tensor, sign: Tensor | None) -> Tensor:
        exponent = octaves * magnitude * (1.0 if sign is None else sign)
        return function(images, torch.exp2(exponent).view(-1, 1, 1, 1))

    return mapped


_register(
    "Gamma",
    "intensity",
    "exponent, 1 to 2 or 1 to 1/2",
    _signed_power(intensity.gamma, 1.0),
    identity=0.0,
    signed=True,
)
_register(
    "Gain",
    "intensity",
    "intensity factor, 1 to 1.41 or 1 to 0.71",
    _signed_power(intensity.brightness, 0.5),
    identity=0.0,
    signed=True,
)
_register(
    "TissueContrast",
    "intensity",
    "contrast factor, 1 to 2 or 1 to 1/2",
    _signed_power(intensity.contrast, 1.0),
    identity=0.0,
    signed=True,
)
_register(
    "BiasField",
    "intensity",
    "log amplitude of a smooth multiplicative field (cubic polynomial), 0 to 0.6",
    lambda images, magnitude, draw: intensity.bias_field(images, 0.6 * magnitude, draw),
    identity=0.0,
    noise=lambda shape: (shape[0], intensity.BIAS_TERMS),
)
_register(
    "GaussianBlur",
    "intensity",
    "standard deviation, 0 to 2 pixels",
    lambda images, magnitude, _: intensity.gaussian_blur(images, 2.0 * magnitude),
    identity=0.0,
)
_register(
    "RicianNoise",
    "intensity",
    "standard deviation of the complex noise, 0 to 0.1",
    lambda images, magnitude, draw: intensity.rician_noise(images, 0.1 * magnitude, draw),
    identity=0.0,
    noise=lambda shape: (shape[0], 2, *shape[1:]),
)
_register(
    "Ghosting",
    "intensity",
    "relative strength of a half-field ghost along H, 0 to 0.3",
    lambda images, magnitude, _: intensity.ghosting(images, 0.3 * magnitude),
    identity=0.0,
)
_register(
    "Spike",
    "intensity",
    "amplitude of a k-space spike's wave, 0 to 0.15",
    lambda images, magnitude, draw: intensity.spike(images, 0.15 * magnitude, draw),
    identity=0.0,
    noise=lambda shape: (shape[0], 3),
)

# ------------------------------------------------------------ intensity, what staining changes

_register(
    "Haematoxylin",
    "intensity",
    "factor of the concentration of haematoxylin, 1 to 2 or 1 to 1/2; grey unchanged",
    _signed_power(lambda images, factor: stain.scale_stain(images, factor, 0), 1.0),
    identity=0.0,
    signed=True,
)
_register(
    "Eosin",
    "intensity",
    "factor of the concentration of eosin, 1 to 2 or 1 to 1/2; grey unchanged",
    _signed_power(lambda images, factor: stain.scale_stain(images, factor, 1), 1.0),
    identity=0.0,
    signed=True,
)

OP_SETS: dict[str, tuple[str, ...]] = {
    "generic": (
        "AutoContrast",
        "Equalize",
        "Invert",
        "Solarize",
        "Posterize",
        "Contrast",
        "Brightness",
        "Color",
        "ShearX",
        "ShearY",
        "TranslateX",
        "TranslateY",
        "Rotate",
        "Sharpness",
    ),
    "released_mri": (
        "ShearX",
        "ShearY",
        "TranslateX",
        "TranslateY",
        "Contrast",
        "Brightness",
        "Sharpness",
        "Rotate",
        "AutoContrast",
        "Equalize",
        "Posterize",
    ),
    "intensity": (
        "MildRotate",
        "MildShift",
        "MildScale",
        "MildShear",
        "Gamma",
        "Gain",
        "TissueContrast",
        "BiasField",
        "GaussianBlur",
        "Sharpness",
        "RicianNoise",
        "Equalize",
    ),
    "mri": (
        "ShearX",
        "ShearY",
        "TranslateX",
        "TranslateY",
        "Rotate",
        "MildScale",
        "Gamma",
        "Gain",
        "TissueContrast",
        "BiasField",
        "GaussianBlur",
        "Sharpness",
        "RicianNoise",
        "AutoContrast",
        "Equalize",
        "Posterize",
    ),
    "intensity_artefacts": (
        "MildRotate",
        "MildShift",
        "MildScale",
        "MildShear",
        "Gamma",
        "Gain",
        "TissueContrast",
        "BiasField",
        "GaussianBlur",
        "Sharpness",
        "RicianNoise",
        "Equalize",
        "Ghosting",
        "Spike",
    ),
}
OP_SETS["stain"] = (*OP_SETS["generic"], "Haematoxylin", "Eosin")
"""Ordered op sets by name; sub-policies keep the order. They are described in docs/method."""
