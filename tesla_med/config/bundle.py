"""What of a MONAI bundle is used without running its code: names that are on lists, with plain arguments.

The lists hold what is known to do nothing but compute: networks that are built from numbers, and transforms
of one image that draw nothing at random. They are checked again wherever a configuration names one, so a card
or a pipeline can name no more than a bundle can.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator

from tesla_med.config.section import Section

NETWORKS = frozenset(
    (
        *("UNet", "Unet", "BasicUNet", "BasicUnet", "BasicUNetPlusPlus", "BasicUnetPlusPlus", "DynUNet"),
        *("DynUnet", "SegResNet", "SegResNetDS", "SegResNetVAE", "UNETR", "SwinUNETR", "VNet"),
        *("AttentionUnet", "HighResNet", "FlexibleUNet", "FlexUNet", "MedNeXt", "AHNet"),
    )
)
READING = frozenset(
    ("LoadImaged", "EnsureChannelFirstd", "AddChanneld", "AsChannelFirstd", "ToDeviced", "ToTensord")
) | frozenset(("Identityd", "SelectItemsd", "DeleteItemsd"))
"""Transforms that read an image or only hold it: done by our own reader, so never built."""
MOVING = frozenset(
    (
        *("Orientationd", "Spacingd", "CropForegroundd", "Resized", "ResizeWithPadOrCropd", "SpatialPadd"),
        *("BorderPadd", "DivisiblePadd", "CenterSpatialCropd", "CenterScaleCropd", "SpatialCropd", "Flipd"),
        *("Rotate90d", "Transposed", "Zoomd"),
    )
)
CHANGING = frozenset(
    (
        *("ScaleIntensityd", "ScaleIntensityRanged", "ScaleIntensityRangePercentilesd"),
        *("NormalizeIntensityd", "ClipIntensityPercentilesd", "ThresholdIntensityd", "AdjustContrastd"),
        *("ShiftIntensityd", "StdShiftIntensityd", "GaussianSmoothd", "GaussianSharpend", "MedianSmoothd"),
        *("HistogramNormalized", "CastToTyped", "EnsureTyped"),
    )
)
TRANSFORMS = MOVING | CHANGING
Z_RANGE = (-3.0, 5.0)
"""Where z-scores lie, mapped to [0, 1] for augmentation; nothing is clipped in predictions."""


class BundleStep(Section):
    """One transform of the image, with the arguments that MONAI's class of this name takes."""

    name: str
    arguments: dict[str, Any] = {}

    @field_validator("name")
    @classmethod
    def _on_the_list(cls, value: str) -> str:
        if value not in TRANSFORMS:
            raise ValueError(f"transform {value!r} is not one of {', '.join(sorted(TRANSFORMS))}")
        return value


class BundlePreprocessing(Section):
    """From a volume to what the network of a MONAI bundle sees.

    ``slices`` is the axis of the prepared image along which a two-dimensional network sees slices. With
    ``nearest`` the way back takes the nearest voxel in place of interpolating. With ``code`` the transforms
    are those that the bundle in this folder makes when its own code is run.
    """

    steps: tuple[BundleStep, ...] = ()
    slices: Annotated[int, Field(ge=0, le=2)] | None = None
    nearest: bool = False
    code: str | None = None
