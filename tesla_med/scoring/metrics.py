"""Overlap, surface distance and volume of masks: pure functions of arrays and voxel sizes.

The headline is the Dice of one class of one case, over the whole volume on the native grid.
Anything else says so in its name (``pooled_dice``, ``per_slice_dice``).

Where both masks are empty there is nothing to score: the result is None ("n/a"), to be left out
of means and counted. Where only one is empty, Dice is 0 and stays in the mean; surface distances
do not exist then and are None.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import LabelClass
from tesla_med.errors import DataError
from tesla_med.types import BoolArray, ClassScore, IntArray

MICROLITRES_PER_ML = 1000.0
COMPARED = ("dice", "dice_source", "hd95_mm", "assd_mm")
"""Figures of a class that comparisons of methods take from a run."""
Empty = Literal["skip", "one"]
"""What counts where both masks are empty: nothing, or a Dice of 1."""


def dice(reference: npt.NDArray[Any], prediction: npt.NDArray[Any], empty: Empty = "skip") -> float | None:
    """Return 2 |R and P| / (|R| + |P|).

    Args:
        reference: mask of any shape, non-zero inside.
        prediction: mask of the same shape.
        empty: what is returned where both masks are empty: None ("skip"), or 1 ("one").

    Returns:
        A number in [0, 1]; 0 where exactly one mask is empty; None where both are, unless ``empty`` says 1.

    Raises:
        DataError: the shapes differ.
    """
    first, second = _pair(reference, prediction)
    total = int(np.count_nonzero(first)) + int(np.count_nonzero(second))
    if not total:
        return 1.0 if empty == "one" else None
    return 2.0 * int(np.count_nonzero(first & second)) / total


def pooled_dice(pairs: Iterable[tuple[npt.NDArray[Any], npt.NDArray[Any]]]) -> float | None:
    """Return the Dice of all (reference, prediction) pairs taken as one large volume.

    Large structures weigh more than small ones, so this is not the mean Dice per case.
    None where every mask of every pair is empty.

    Raises:
        DataError: the shapes within a pair differ.
    """
    common = total = 0
    for reference, prediction in pairs:
        first, second = _pair(reference, prediction)
        common += int(np.count_nonzero(first & second))
        total += int(np.count_nonzero(first)) + int(np.count_nonzero(second))
    return 2.0 * common / total if total else None


def per_slice_dice(
    reference: npt.NDArray[Any],
    prediction: npt.NDArray[Any],
    slice_axis: int = 2,
    empty: Empty = "skip",
) -> float | None:
    """Return the mean over slices of the Dice of each slice.

    Args:
        reference: (I, J, K) mask, non-zero inside.
        prediction: (I, J, K) mask.
        slice_axis: the axis that runs from slice to slice.
        empty: what a slice counts for where both masks are empty: nothing ("skip"), or 1 ("one").

    Returns:
        A number in [0, 1], or None where no slice counts.

    Raises:
        DataError: the shapes differ.
    """
    first, second = _pair(reference, prediction)
    planes = zip(np.moveaxis(first, slice_axis, 0), np.moveaxis(second, slice_axis, 0), strict=True)
    scores = [dice(plane, other, empty) for plane, other in planes]
    known = [score for score in scores if score is not None]
    return float(np.mean(known)) if known else None


def surface_distances(
    reference: npt.NDArray[Any],
    prediction: npt.NDArray[Any],
    spacing: Sequence[float],
) -> tuple[float, float] | None:
    """Return the 95 % Hausdorff distance and the average symmetric surface distance.

    A surface is the set of mask voxels with a face neighbour outside the mask (or outside the
    grid). HD95 is the larger of the two 95th percentiles, reference to prediction and back; ASSD
    is the mean of all distances of both directions.

    Args:
        reference: (I, J, K) mask, non-zero inside.
        prediction: (I, J, K) mask.
        spacing: voxel size along each axis in mm.

    Returns:
        (HD95, ASSD) in mm, both >= 0, or None where either mask is empty.

    Raises:
        DataError: the shapes differ, or ``spacing`` is not one positive number an axis.
    """
    from monai.metrics.utils import get_edge_surface_distance
    from torch import from_numpy

    first, second = _pair(reference, prediction)
    sizes = _checked_spacing(spacing, first.ndim)
    if not first.any() or not second.any():
        return None
    box = bounding_box(first | second)
    cropped = [from_numpy(np.pad(mask[box], 1)) for mask in (second, first)]
    with warnings.catch_warnings():  # about an argument that MONAI passes to itself
        warnings.simplefilter("ignore", FutureWarning)
        _, distances, _ = get_edge_surface_distance(*cropped, spacing=sizes, symmetric=True)
    there, back = (item.numpy().astype(np.float64) for item in distances)
    hd95 = max(float(np.percentile(there, 95)), float(np.percentile(back, 95)))
    return hd95, float(np.concatenate([there, back]).mean())


def field_diagonal(shape: Sequence[int], spacing: Sequence[float]) -> float:
    """Return the length in mm of the diagonal of a grid: no surface distance can be larger.

    Raises:
        DataError: ``spacing`` is not one positive number an axis.
    """
    return float(np.linalg.norm(np.multiply(shape, _checked_spacing(spacing, len(shape)))))


def volume_ml(mask: npt.NDArray[Any], spacing: Sequence[float]) -> float:
    """Return the volume of the non-zero voxels in ml.

    Args:
        mask: (I, J, K), non-zero inside.
        spacing: voxel size along each axis in mm.

    Raises:
        DataError: ``spacing`` is not one positive number an axis.
    """
    voxel = float(np.prod(_checked_spacing(spacing, mask.ndim)))
    return int(np.count_nonzero(mask)) * voxel / MICROLITRES_PER_ML


def score_case(
    mask: IntArray,
    source_mask: IntArray,
    reference: IntArray | None,
    classes: Sequence[LabelClass],
    spacing: Sequence[float],
    nominal: bool = False,
) -> tuple[ClassScore, ...]:
    """Score every foreground class of one case on its native grid.

    Args:
        mask: (I, J, K) label values of the method.
        source_mask: (I, J, K) label values of the unadapted model.
        reference: (I, J, K) label values, or None: then only volumes are given.
        classes: the classes; the one with value 0 is the background and left out.
        spacing: voxel size along each axis in mm.
        nominal: the voxel size is not a physical one; figures in mm and ml are then None.

    Raises:
        DataError: the shapes differ, or the reference holds a label that is no class.
    """
    if reference is not None:
        check_labels(reference, [item.value for item in classes], "the reference")
    return tuple(
        _score_class(item, mask, source_mask, reference, spacing, nominal)
        for item in classes
        if item.value != 0
    )


def check_labels(mask: IntArray, known: Sequence[int], what: str) -> None:
    """Check that ``mask`` holds no label but those ``known`` and 0.

    Raises:
        DataError: it does; the message names the labels.
    """
    unknown = sorted({int(value) for value in np.unique(mask)} - {0, *known})
    if unknown:
        raise DataError(
            f"{what} holds label {', '.join(map(str, unknown))}, expected only"
            f" {', '.join(map(str, sorted({0, *known})))}; map its values or correct the class list"
        )


def bounding_box(mask: npt.NDArray[Any]) -> tuple[slice, ...]:
    """Return the smallest box around the non-zero voxels; empty slices where there are none."""
    box = []
    for axis in range(mask.ndim):
        found = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)))
        box.append(slice(int(found[0]), int(found[-1]) + 1) if found.size else slice(0, 0))
    return tuple(box)


def _score_class(
    item: LabelClass,
    mask: IntArray,
    source_mask: IntArray,
    reference: IntArray | None,
    spacing: Sequence[float],
    nominal: bool,
) -> ClassScore:
    ours, source = _pair(mask == item.value, source_mask == item.value)
    truth = None if reference is None else reference == item.value
    distances = None if truth is None or nominal else surface_distances(truth, ours, spacing)
    return ClassScore(
        label=item.value,
        name=item.name,
        dice=None if truth is None else dice(truth, ours),
        dice_source=None if truth is None else dice(truth, source),
        hd95_mm=distances[0] if distances else None,
        assd_mm=distances[1] if distances else None,
        volume_ml=None if nominal else volume_ml(ours, spacing),
        volume_ml_source=None if nominal else volume_ml(source, spacing),
        voxels=int(np.count_nonzero(ours)),
        voxels_source=int(np.count_nonzero(source)),
        voxels_reference=None if truth is None else int(np.count_nonzero(truth)),
    )


def _pair(reference: npt.NDArray[Any], prediction: npt.NDArray[Any]) -> tuple[BoolArray, BoolArray]:
    if reference.shape != prediction.shape:
        raise DataError(f"masks to compare must have one shape, got {reference.shape} and {prediction.shape}")
    return reference.astype(bool, copy=False), prediction.astype(bool, copy=False)


def _checked_spacing(spacing: Sequence[float], axes: int) -> tuple[float, ...]:
    sizes = tuple(float(step) for step in spacing)
    if len(sizes) != axes or not all(np.isfinite(step) and step > 0 for step in sizes):
        raise DataError(f"voxel size must be {axes} positive numbers in mm, got {list(spacing)}")
    return sizes
