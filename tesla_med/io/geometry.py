"""Affines: voxel sizes, checks, and how far apart two grids are. Arrays only, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import GeometryError

Affine = npt.NDArray[np.float64]


@dataclass
class RawImage:
    """One image as its file has it.

    Attributes:
        array: (I, J, K) real numbers in file order, scaled by slope and intercept.
        affine: (4, 4) voxel index to RAS+ world, mm.
        header: the NIfTI header, or None for other formats.
        notes: remarks for the report.
    """

    array: npt.NDArray[Any]
    affine: Affine
    header: Any = None
    notes: list[str] = field(default_factory=list)


def spacing_of(affine: Affine) -> tuple[float, float, float]:
    """Return the voxel size along I, J, K in mm: the column lengths of ``affine`` (4, 4)."""
    steps = np.linalg.norm(affine[:3, :3], axis=0)
    return (float(steps[0]), float(steps[1]), float(steps[2]))


def check_affine(affine: Affine, where: object) -> None:
    """Refuse an affine (4, 4) that does not describe a grid.

    Raises:
        GeometryError: it is not finite, a voxel size is 0, or two axes are parallel.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.linalg.norm(affine[:3, :3], axis=0)
    if not (np.isfinite(affine).all() and np.isfinite(steps).all()):
        raise GeometryError(
            f"{where}: the header's affine holds values that are not finite; repair the header"
        )
    if (steps <= 0).any() or abs(np.linalg.det(affine[:3, :3] / np.where(steps > 0, steps, 1))) < 1e-3:
        raise GeometryError(
            f"{where}: the header's affine is degenerate (voxel sizes {_numbers(steps)} mm, "
            "or axes in one plane); expected three independent axes; repair the header"
        )


def corner_displacement(first: Affine, second: Affine, shape: Sequence[int]) -> float:
    """Return the largest distance in mm between the outer corners of two grids of one shape.

    Args:
        first: (4, 4) voxel to mm.
        second: (4, 4) voxel to mm.
        shape: (I, J, K).
    """
    corners = np.array([(*corner, 1.0) for corner in product(*((-0.5, size - 0.5) for size in shape))])
    with np.errstate(over="ignore", invalid="ignore"):  # absurd headers: inf or NaN, never accepted
        return float(np.linalg.norm((corners @ (first - second).T)[:, :3], axis=1).max())


def is_orthogonal(affine: Affine) -> bool:
    """Return whether the axes of ``affine`` (4, 4) are perpendicular, as a qform needs."""
    unit = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    return bool(np.allclose(unit.T @ unit, np.eye(3), atol=1e-6))


def _numbers(values: npt.NDArray[np.float64]) -> str:
    return " x ".join(f"{value:g}" for value in values)
