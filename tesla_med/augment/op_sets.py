"""Ordered sets of augmentation ops by name, as described in docs/method; sub-policies keep their order.

Ops that name a set where they are registered stand at its end.
"""

from __future__ import annotations

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
}
OP_SETS["intensity_artefacts"] = OP_SETS["intensity"]
OP_SETS["stain"] = OP_SETS["generic"]
