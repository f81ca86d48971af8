"""Augmentation operations: pure, batched, (image, magnitude) -> (image, theta).

An op maps a magnitude in [0, 1] to its stated physical range. Geometric ops leave the image alone and return
the theta to resample with: the policy composes the thetas of a sub-policy and resamples once. Intensity ops
change the image and return the identity. Nothing here draws random numbers; signs and noise are drawn by the
policy and handed in.

To add an op, register a function below with its range (helpers: ``ranges.py``) and the sets that it joins;
policies, the command line, the documentation and the contract tests pick it up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from tesla_med.augment import intensity, ranges, stain
from tesla_med.augment.op import Function, Shape
from tesla_med.augment.op import Op as Op
from tesla_med.augment.op_sets import OP_SETS as OP_SETS
from tesla_med.registry import Registry

OPS: Registry[Op] = Registry("augmentation op")


def _geometric(
    name: str,
    unit: str,
    function: Function,
    *,
    identity: float,
    start: float = 0.5,
    sets: Sequence[str] = (),
) -> None:
    _register(Op(name, "geometric", unit, identity, True, "exact", None, function, start), sets)


def _intensity(
    name: str,
    unit: str,
    function: Function,
    *,
    identity: float | None,
    signed: bool = False,
    gradient: Literal["exact", "straight-through"] = "exact",
    noise: Callable[[Shape], Shape] | None = None,
    in_plane: bool = False,
    sets: Sequence[str] = (),
) -> None:
    op = Op(name, "intensity", unit, identity, signed, gradient, noise, function, in_plane=in_plane)
    _register(op, sets)


def _register(op: Op, sets: Sequence[str]) -> None:
    """Store an op and put it at the end of the sets that it joins."""
    OPS.register(op.name)(op)
    for key in sets:
        OP_SETS[key] = (*OP_SETS[key], op.name)


# ------------------------------------------------------------ geometric, with a sign that the policy draws

_geometric("ShearX", "shear, -0.3 to 0.3", ranges.entry(0, 1, -0.3, 0.3), identity=0.5)
_geometric("ShearY", "shear, -0.3 to 0.3", ranges.entry(1, 0, -0.3, 0.3), identity=0.5)
_geometric(
    "TranslateX", "shift along W, -0.225 to 0.225 of the field", ranges.entry(0, 2, -0.45, 0.45), identity=0.5
)
_geometric(
    "TranslateY", "shift along H, -0.225 to 0.225 of the field", ranges.entry(1, 2, -0.45, 0.45), identity=0.5
)
_geometric(
    "Rotate",
    "rotation, -30 to 30 degrees",
    ranges.rotation(-math.pi / 6, math.pi / 6),
    identity=0.5,
    start=0.98,  # the release always turns by 30 degrees, either way; from there it can be learned
)
_geometric("MildRotate", "rotation, 0 to 10 degrees", ranges.rotation(0, math.pi / 18), identity=0.0)
_geometric("MildShift", "shift along W, 0 to 5 % of the field", ranges.entry(0, 2, 0, 0.1), identity=0.0)
_geometric("MildShear", "shear, 0 to 0.1", ranges.entry(0, 1, 0, 0.1), identity=0.0)
_geometric("MildScale", "field of view times 1/1.15 to 1.15", ranges.scaling(0.15), identity=0.0)

# ------------------------------------------------------------ intensity: in the paper

_intensity(
    "Contrast", "contrast factor, 0.1 to 1.9", ranges.factor(intensity.contrast, 0.1, 1.9), identity=0.5
)
_intensity(
    "Brightness", "intensity factor, 0.1 to 1.9", ranges.factor(intensity.brightness, 0.1, 1.9), identity=0.5
)
_intensity(
    "Sharpness",
    "sharpness factor, 0.1 to 1.9",
    ranges.factor(intensity.sharpness, 0.1, 1.9),
    identity=0.5,
    in_plane=True,
)
_intensity(
    "Color", "saturation factor, 0.1 to 1.9", ranges.factor(intensity.saturation, 0.1, 1.9), identity=0.5
)
_intensity(
    "AutoContrast",
    "image stretched to [0, 1]; the magnitude has no effect",
    lambda images, magnitude, _: intensity.straight_through(intensity.autocontrast(images), magnitude),
    identity=None,
    gradient="straight-through",
)
_intensity(
    "Equalize",
    "histogram made flat; the magnitude has no effect",
    lambda images, magnitude, _: intensity.straight_through(intensity.equalize(images), magnitude, images),
    identity=None,
    gradient="straight-through",
)
_intensity(
    "Posterize",
    "bits kept, 4 to 8",
    lambda images, magnitude, _: intensity.straight_through(
        intensity.posterize(images, magnitude), magnitude, images
    ),
    identity=None,
    gradient="straight-through",
)
_intensity(
    "Solarize",
    "threshold above which the image is inverted, 0 to 1",
    lambda images, magnitude, _: intensity.straight_through(
        intensity.solarize(images, magnitude), magnitude, images
    ),
    identity=1.0,
    gradient="straight-through",
)
_intensity(
    "Invert",
    "image inverted; the magnitude has no effect",
    lambda images, magnitude, _: intensity.straight_through(1.0 - images, magnitude, images),
    identity=None,
    gradient="straight-through",
)

# ------------------------------------------------------------ intensity: what scanners change

_intensity(
    "Gamma",
    "exponent, 1 to 2 or 1 to 1/2",
    ranges.signed_power(intensity.gamma, 1.0),
    identity=0.0,
    signed=True,
)
_intensity(
    "Gain",
    "intensity factor, 1 to 1.41 or 1 to 0.71",
    ranges.signed_power(intensity.brightness, 0.5),
    identity=0.0,
    signed=True,
)
_intensity(
    "TissueContrast",
    "contrast factor, 1 to 2 or 1 to 1/2",
    ranges.signed_power(intensity.contrast, 1.0),
    identity=0.0,
    signed=True,
)
_intensity(
    "BiasField",
    "log amplitude of a smooth multiplicative field (cubic polynomial), 0 to 0.6",
    lambda images, magnitude, draw: intensity.bias_field(images, 0.6 * magnitude, draw),
    identity=0.0,
    noise=lambda shape: (shape[0], intensity.BIAS_TERMS),
    in_plane=True,
)
_intensity(
    "GaussianBlur",
    "standard deviation, 0 to 2 pixels",
    lambda images, magnitude, _: intensity.gaussian_blur(images, 2.0 * magnitude),
    identity=0.0,
    in_plane=True,
)
_intensity(
    "RicianNoise",
    "standard deviation of the complex noise, 0 to 0.1",
    lambda images, magnitude, draw: intensity.rician_noise(images, 0.1 * magnitude, draw),
    identity=0.0,
    noise=lambda shape: (shape[0], 2, *shape[1:]),
)
_intensity(
    "Ghosting",
    "relative strength of a half-field ghost along H, 0 to 0.3",
    lambda images, magnitude, _: intensity.ghosting(images, 0.3 * magnitude),
    identity=0.0,
    in_plane=True,
    sets=("intensity_artefacts",),
)
_intensity(
    "Spike",
    "amplitude of a k-space spike's wave, 0 to 0.15",
    lambda images, magnitude, draw: intensity.spike(images, 0.15 * magnitude, draw),
    identity=0.0,
    noise=lambda shape: (shape[0], 3),
    in_plane=True,
    sets=("intensity_artefacts",),
)

# ------------------------------------------------------------ intensity: what staining changes

_intensity(
    "Haematoxylin",
    "factor of the concentration of haematoxylin, 1 to 2 or 1 to 1/2; grey unchanged",
    ranges.signed_power(lambda images, factor: stain.scale_stain(images, factor, 0), 1.0),
    identity=0.0,
    signed=True,
    sets=("stain",),
)
_intensity(
    "Eosin",
    "factor of the concentration of eosin, 1 to 2 or 1 to 1/2; grey unchanged",
    ranges.signed_power(lambda images, factor: stain.scale_stain(images, factor, 1), 1.0),
    identity=0.0,
    signed=True,
    sets=("stain",),
)
