"""Masks on a grid with a voxel size: surfaces, boxes, and the checks that two masks can be compared."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError
from tesla_med.types import BoolArray

Doubles = npt.NDArray[np.float64]


def surface_distances(
    reference: npt.NDArray[Any],
    prediction: npt.NDArray[Any],
    spacing: Sequence[float],
) -> tuple[Doubles, Doubles] | None:
    """Return the distances from each surface to the nearest point of the other.

    A surface is the set of mask voxels with a face neighbour outside the mask (or outside the
    grid). Axes of a single voxel do not count: the surface of one slice is the outline in it.

    Args:
        reference: (I, J, K) mask, non-zero inside.
        prediction: (I, J, K) mask.
        spacing: voxel size along each axis in mm.

    Returns:
        From prediction to reference, one number a surface voxel, and back; in mm, all >= 0. None where
        either mask is empty.

    Raises:
        DataError: the shapes differ, or ``spacing`` is not one positive number an axis.
    """
    from monai.metrics.utils import get_edge_surface_distance
    from torch import from_numpy

    first, second = paired(reference, prediction)
    sizes = checked_spacing(spacing, first.ndim)
    if not first.any() or not second.any():
        return None
    if 1 in first.shape and max(first.shape) > 1:
        kept = [axis for axis, side in enumerate(first.shape) if side > 1]
        return surface_distances(first.squeeze(), second.squeeze(), [sizes[axis] for axis in kept])
    box = bounding_box(first | second)
    cropped = [from_numpy(np.pad(mask[box], 1)) for mask in (second, first)]
    with warnings.catch_warnings():  # about an argument that MONAI passes to itself
        warnings.simplefilter("ignore", FutureWarning)
        _, distances, _ = get_edge_surface_distance(*cropped, spacing=sizes, symmetric=True)
    there, back = (item.numpy().astype(np.float64) for item in distances)
    return there, back


def field_diagonal(shape: Sequence[int], spacing: Sequence[float]) -> float:
    """Return the length in mm of the diagonal of a grid: no surface distance can be larger.

    Raises:
        DataError: ``spacing`` is not one positive number an axis.
    """
    return float(np.linalg.norm(np.multiply(shape, checked_spacing(spacing, len(shape)))))


def bounding_box(mask: npt.NDArray[Any]) -> tuple[slice, ...]:
    """Return the smallest box around the non-zero voxels; empty slices where there are none."""
    box = []
    for axis in range(mask.ndim):
        found = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)))
        box.append(slice(int(found[0]), int(found[-1]) + 1) if found.size else slice(0, 0))
    return tuple(box)


def paired(reference: npt.NDArray[Any], prediction: npt.NDArray[Any]) -> tuple[BoolArray, BoolArray]:
    """Return two masks as bool.

    Raises:
        DataError: the shapes differ.
    """
    if reference.shape != prediction.shape:
        raise DataError(f"masks to compare must have one shape, got {reference.shape} and {prediction.shape}")
    return reference.astype(bool, copy=False), prediction.astype(bool, copy=False)


def checked_spacing(spacing: Sequence[float], axes: int) -> tuple[float, ...]:
    """Return a voxel size along each axis in mm.

    Raises:
        DataError: it is not one positive number an axis.
    """
    sizes = tuple(float(step) for step in spacing)
    if len(sizes) != axes or not all(np.isfinite(step) and step > 0 for step in sizes):
        raise DataError(f"voxel size must be {axes} positive numbers in mm, got {list(spacing)}")
    return sizes
