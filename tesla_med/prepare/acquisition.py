"""Voxel size and field of view that a model was trained on, and whether an image is far from them."""

from __future__ import annotations

from collections.abc import Sequence

from tesla_med.config.models import Region
from tesla_med.io.nifti import model_axes
from tesla_med.types import Record, Volume

FAR = 1.5
"""An image is far when it lies outside the training range by more than this factor."""

Pair = tuple[float, float]


class Acquisition(Record):
    """Ranges over training images, (smallest, largest) in mm.

    Attributes:
        spacing_mm: voxel size along the model's first, second and slice axis.
        field_mm: extent along its first and second axis, of the part that the model sees.
    """

    spacing_mm: tuple[Pair, Pair, Pair]
    field_mm: tuple[Pair, Pair]


def acquisition_of(volume: Volume, region: Region, orientation: str) -> Acquisition | None:
    """Return the acquisition of one image, or None where its voxel size is nominal."""
    if volume.nominal_spacing:
        return None
    axes = model_axes(volume.affine, orientation)
    spacing = [volume.spacing[axis] for axis in axes]
    extent = [volume.spacing[axis] * volume.shape[axis] for axis in axes[:2]]
    if region.size_mm is not None and region.kind != "whole":
        extent = [region.size_mm] * 2
    first, second, third = ((step, step) for step in spacing)
    return Acquisition(spacing_mm=(first, second, third), field_mm=((extent[0],) * 2, (extent[1],) * 2))


def united(items: Sequence[Acquisition]) -> Acquisition | None:
    """Return the ranges over several images, or None without any."""
    if not items:
        return None

    def span(pairs: Sequence[Pair]) -> Pair:
        return (min(low for low, _ in pairs), max(high for _, high in pairs))

    first, second, third = (span([item.spacing_mm[axis] for item in items]) for axis in range(3))
    rows, columns = (span([item.field_mm[axis] for item in items]) for axis in range(2))
    return Acquisition(spacing_mm=(first, second, third), field_mm=(rows, columns))


def differences(seen: Acquisition | None, trained: Acquisition | None) -> list[str]:
    """Return one sentence for each quantity of ``seen`` that is far from the training range."""
    if seen is None or trained is None:
        return []
    names = ("first in-plane axis", "second in-plane axis", "slice axis")
    checks = [
        (f"voxel size along the {name}", now, before)
        for name, now, before in zip(names, seen.spacing_mm, trained.spacing_mm, strict=True)
    ]
    checks += [
        (f"field of view along the {name}", now, before)
        for name, now, before in zip(names, seen.field_mm, trained.field_mm, strict=False)
    ]
    return [
        f"{what} is {now[0]:.3g} mm, far from the {before[0]:.3g} to {before[1]:.3g} mm "
        "that the weights were trained on"
        for what, now, before in checks
        if now[0] * FAR < before[0] or now[1] > before[1] * FAR
    ]
