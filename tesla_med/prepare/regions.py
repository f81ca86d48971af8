"""Where the in-plane region of interest lies, and the transforms that cut it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import Region
from tesla_med.errors import GeometryError
from tesla_med.io.nifti import axis_affine
from tesla_med.types import Volume


def crop_starts(
    region: Region, image: Any, region_mask: Any | None, volume: Volume
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return first voxel and size of the region along the two in-plane axes, or None for all.

    The region may stick out of the image: starts may be negative.

    Args:
        region: what the site says.
        image: (C, H, W, D) MetaTensor, reoriented.
        region_mask: (1, H, W, D) MetaTensor on the same grid, for kind ``mask``.
        volume: the volume on its native grid.

    Raises:
        GeometryError: the region is smaller than one voxel, or its point outside the image.
    """
    if region.kind == "whole" or region.size_mm is None:
        return None
    steps = np.linalg.norm(np.asarray(image.affine)[:3, :2], axis=0)
    sizes = [round(region.size_mm / float(step)) for step in steps]
    if min(sizes) < 1:
        raise GeometryError(
            f"{volume.path}: a region of {region.size_mm:g} mm is smaller than a voxel "
            f"({steps[0]:g} x {steps[1]:g} mm); raise site.region.size_mm or check the header's units"
        )
    field = tuple(int(size) for size in image.shape[1:3])
    if region.kind == "square":
        starts = [(whole - size) // 2 for whole, size in zip(field, sizes, strict=True)]
    else:
        centre = _mask_centre(region_mask) if region.kind == "mask" else _point(region, image, volume)
        starts = [round(float(position)) - size // 2 for position, size in zip(centre, sizes, strict=True)]
    return (starts[0], starts[1]), (sizes[0], sizes[1])


def crop_transforms(
    keys: Sequence[str], starts: tuple[int, int], sizes: tuple[int, int], shape: Sequence[int]
) -> list[Any]:
    """Return MONAI transforms that cut the region, padding with 0 where it sticks out.

    Zero is the smallest intensity of a scaled volume, and background in labels.

    Args:
        keys: what to cut.
        starts: first voxel along the two in-plane axes, may be negative.
        sizes: voxels along them.
        shape: (H, W, D) before the cut.
    """
    from monai.transforms import BorderPadd, SpatialCropd

    before = [max(0, -start) for start in starts]
    after = [
        max(0, start + size - whole) for start, size, whole in zip(starts, sizes, shape[:2], strict=True)
    ]
    steps: list[Any] = []
    if any(before) or any(after):
        border = (before[0], after[0], before[1], after[1], 0, 0)
        steps.append(BorderPadd(keys, spatial_border=border, allow_missing_keys=True))
    first = [start + pad for start, pad in zip(starts, before, strict=True)]
    steps.append(
        SpatialCropd(
            keys,
            roi_start=(*first, 0),
            roi_end=(*(start + size for start, size in zip(first, sizes, strict=True)), int(shape[2])),
            allow_missing_keys=True,
        )
    )
    return steps


def _mask_centre(region_mask: Any) -> npt.NDArray[np.float64]:
    seen = np.asarray(region_mask.as_tensor()[0] > 0).any(axis=-1)
    return np.asarray(np.argwhere(seen).mean(axis=0), np.float64)


def _point(region: Region, image: Any, volume: Volume) -> npt.NDArray[np.float64]:
    """Return the region's point as voxel of the reoriented image, in-plane."""
    voxel = np.linalg.solve(volume.affine, [*(region.point_mm or ()), 1.0])
    if not all(-0.5 <= position <= size - 0.5 for position, size in zip(voxel, volume.shape, strict=False)):
        raise GeometryError(
            f"{volume.path}: the region's point {region.point_mm} mm (RAS+) lies outside the image, at voxel "
            f"({', '.join(f'{position:.1f}' for position in voxel[:3])}) of {volume.shape}; "
            "correct site.region.point_mm"
        )
    turned = np.linalg.solve(np.asarray(image.affine), axis_affine(volume.affine) @ voxel)
    return np.asarray(turned[:2], np.float64)
