"""The areas of a volume that calibration is counted in: the region about the structures, their boundary, all.

The region is what matters in segmentation: background far from the structure is easy, and there are so many
such voxels that they hide a badly calibrated structure. The boundary is the band about the edges of the
reference alone, so it is the same for every method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError
from tesla_med.scoring.calibration import (
    AREAS,
    MODELS,
    CalibrationCounts,
    check_probabilities,
    count_flat,
    count_predicted,
)
from tesla_med.scoring.grids import bounding_box
from tesla_med.types import BoolArray, IntArray

SLAB_VOXELS = 1 << 22
"""Voxels that are counted at once."""
BOUNDARY_WIDTH = 3
"""Voxels on each side of an edge of the reference that belong to its boundary."""


def count_case(
    probs_source: npt.NDArray[np.float32],
    probs: npt.NDArray[np.float32],
    reference: IntArray,
    region: BoolArray,
    values: Sequence[int],
    bins: int = 15,
    boundary: BoolArray | None = None,
) -> dict[str, Any]:
    """Count one case for both models, every area, every class and all classes.

    Args:
        probs_source: (L, I, J, K) float32 in [0, 1], the unadapted model.
        probs: (L, I, J, K) float32 in [0, 1], the method.
        reference: (I, J, K) class *indices* 0 to L - 1.
        region: (I, J, K) bool, see :func:`calibration_region`.
        values: label value of each class, L of them; they are the keys of the result.
        bins: number of bins.
        boundary: (I, J, K) bool, see :func:`boundary_band`; None leaves this area out.

    Returns:
        Plain numbers, lists and dicts, to be given to :func:`merge`.

    Raises:
        DataError: a probability outside [0, 1] or not finite, shapes that differ, or an index
            that is not a class.
    """
    _check_case(probs_source, probs, reference, {"region": region, "boundary": boundary}, len(values))
    result: dict[str, Any] = {"cases": 1, "bins": bins, "values": [int(value) for value in values]}
    for model, array in zip(MODELS, (probs_source, probs), strict=True):
        areas: dict[str, dict[str, CalibrationCounts]] = {}
        for part in _slabs(reference.shape):
            every_class: tuple[slice, ...] = (slice(None), *part)
            near, truth, probabilities = region[part], reference[part], array[every_class]
            inside = count_flat(probabilities[:, near], truth[near], values, bins)
            outside = count_flat(probabilities[:, ~near], truth[~near], values, bins)
            found = {"region": inside, "all": {key: item + outside[key] for key, item in inside.items()}}
            if boundary is not None:
                edge = boundary[part]
                found["boundary"] = count_flat(probabilities[:, edge], truth[edge], values, bins)
            for area, counts in found.items():
                before = areas.get(area)
                areas[area] = (
                    counts if before is None else {key: before[key] + item for key, item in counts.items()}
                )
        result[model] = {
            area: {key: item.to_json() for key, item in areas[area].items()}
            for area in AREAS
            if area in areas
        }
    return result


def count_region(
    probs: npt.NDArray[np.float32], reference: IntArray, region: BoolArray, bins: int = 15
) -> CalibrationCounts:
    """Count the predicted class of one model inside a region alone; see :func:`count_case`.

    Args:
        probs: (L, I, J, K) float32 in [0, 1].
        reference: (I, J, K) class *indices* 0 to L - 1.
        region: (I, J, K) bool, see :func:`calibration_region`.
        bins: number of bins.

    Raises:
        DataError: as :func:`count_case` does.
    """
    _check_case(probs, probs, reference, {"region": region}, len(probs))
    inside, truth = probs[:, region], reference[region]
    check_probabilities(inside)
    return count_predicted(inside, truth, bins)


def _slabs(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield slabs of the last axis of at most ``SLAB_VOXELS``, or one plane: sums then need little memory."""
    plane = max(1, int(np.prod(shape[:-1])))
    thick = max(1, SLAB_VOXELS // plane)
    for start in range(0, max(shape[-1], 1), thick):
        yield (*(slice(None) for _ in shape[:-1]), slice(start, start + thick))


def calibration_region(
    reference: IntArray, *masks: IntArray, dilation: int = 3, slice_axis: int = 2
) -> BoolArray:
    """Return the voxels near any structure: all foregrounds united, then dilated within slices.

    Args:
        reference: (I, J, K) label values, 0 outside.
        *masks: further (I, J, K) masks, such as those of the unadapted and the adapted model.
        dilation: radius in voxels of the disc that dilates, 0 for none.
        slice_axis: the axis that runs from slice to slice, along which nothing is dilated.

    Raises:
        DataError: the shapes differ.
    """
    union: BoolArray = reference != 0
    for mask in masks:
        if mask.shape != reference.shape:
            raise DataError(f"masks must have one shape, got {reference.shape} and {mask.shape}")
        union = union | (mask != 0)
    if dilation <= 0 or not union.any():
        return union
    box, disc = _surroundings(union, dilation, slice_axis)
    region = np.zeros_like(union)
    region[box] = _dilate(union[box], disc)
    return region


def boundary_band(reference: IntArray, width: int = BOUNDARY_WIDTH, slice_axis: int = 2) -> BoolArray:
    """Return the voxels near an edge of the reference: the bands of all foreground classes united.

    The band of a class holds the voxels of the class with a voxel of something else within
    ``width``, and those of something else with a voxel of the class within ``width``, both within
    slices. The rim of the grid is not an edge.

    Args:
        reference: (I, J, K) label values or class indices, 0 outside.
        width: voxels on each side of the edge, the radius of a disc, at least 0; 0 gives an empty band.
        slice_axis: the axis that runs from slice to slice.

    Returns:
        (I, J, K) bool; nowhere true where the reference has no foreground.
    """
    band = np.zeros(reference.shape, dtype=np.bool_)
    if width <= 0:
        return band
    for label in np.unique(reference[reference != 0]):
        inside: BoolArray = reference == label
        box, disc = _surroundings(inside, width, slice_axis)
        band[box] |= _dilate(inside[box], disc) & _dilate(~inside[box], disc)
    return band


def _surroundings(
    mask: BoolArray, radius: int, slice_axis: int
) -> tuple[tuple[slice, ...], npt.NDArray[np.bool_]]:
    """Return the box of all voxels within ``radius`` in-plane of the mask, and a disc of that radius."""
    axis = slice_axis % mask.ndim
    radii = [0 if item == axis else radius for item in range(mask.ndim)]
    grids = np.ogrid[tuple(slice(-item, item + 1) for item in radii)]
    disc = np.asarray(sum(np.square(grid) for grid in grids) <= radius**2)
    box = tuple(
        slice(max(0, part.start - item), part.stop + item)
        for part, item in zip(bounding_box(mask), radii, strict=True)
    )
    return box, disc


def _dilate(mask: BoolArray, structure: BoolArray) -> BoolArray:
    from scipy.ndimage import binary_dilation

    grown: BoolArray = binary_dilation(mask, structure=structure)
    return grown


def _check_case(
    probs_source: npt.NDArray[np.float32],
    probs: npt.NDArray[np.float32],
    reference: IntArray,
    areas: Mapping[str, BoolArray | None],
    classes: int,
) -> None:
    for what, array in (("source", probs_source), ("adapted", probs)):
        if array.shape != (classes, *reference.shape):
            raise DataError(
                f"{what} probabilities must be ({classes} classes, *{reference.shape}), got {array.shape}"
            )
    for name, area in areas.items():
        if area is not None and area.shape != reference.shape:
            raise DataError(f"reference {reference.shape} and {name} {area.shape} differ in shape")
    if reference.size and not 0 <= int(reference.min()) <= int(reference.max()) < classes:
        raise DataError(
            f"reference must hold class indices 0 to {classes - 1}, got"
            f" {int(reference.min())} to {int(reference.max())}"
        )
