"""Affines: voxel sizes, checks, and how far apart two grids are. Arrays only, no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import GeometryError

GRID_TOLERANCE_MM = 0.1
"""Two grids are one if no corner is further off, or half a voxel where that is less."""
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


@dataclass(frozen=True)
class Grid:
    """A grid: shape (I, J, K) and affine (4, 4), voxel index to RAS+ world in mm."""

    shape: tuple[int, ...]
    affine: Affine

    def __str__(self) -> str:
        """Return shape, voxel size, origin and orientation in words."""
        return ", ".join(f"{name} {text}" for name, text in self.parts().items())

    def parts(self) -> dict[str, str]:
        """Return what places a grid in words, by name; directions of axes where they are oblique too."""
        from nibabel.orientations import aff2axcodes

        steps = np.array(spacing_of(self.affine))
        cosines = self.affine[:3, :3] / np.where(steps > 0, steps, 1)
        oblique = np.abs(cosines).max(axis=0).min() < 0.9999
        turned = f" (axes {'; '.join(_numbers(axis, 4) for axis in cosines.T)})" if oblique else ""
        return {
            "shape": " x ".join(map(str, self.shape)),
            "voxel size": f"{_numbers(steps)} mm",
            "origin": f"{_numbers(self.affine[:3, 3])} mm",
            "orientation": "".join(code or "?" for code in aff2axcodes(self.affine)) + turned,
        }


def grid_difference(name: str, first: Grid, other_name: str, second: Grid) -> str:
    """Return how two grids that must be the same differ, or "" where they do not.

    They are the same where the shapes are, and no outer corner is further off than ``GRID_TOLERANCE_MM``
    or half a voxel of the second.

    Args:
        name: what the first grid belongs to.
        first: one grid.
        other_name: what the second belongs to.
        second: the one that the first should be.

    Returns:
        Which of shape, voxel size, origin and orientation differ, and all four of both grids.
    """
    allowed = min(GRID_TOLERANCE_MM, min(spacing_of(second.affine)) / 2)
    apart = ""
    if first.shape == second.shape:
        distance = corner_displacement(first.affine, second.affine, first.shape)
        if distance <= allowed:
            return ""
        apart = f", {distance:.3g} mm apart at a corner where at most {allowed:.3g} mm is accepted"
    ours, theirs = first.parts(), second.parts()
    which = [key for key, text in ours.items() if text != theirs[key]] or ["affine"]
    return f"the grids differ in {' and '.join(which)}{apart}: {name} {first}; {other_name} {second}"


def is_orthogonal(affine: Affine) -> bool:
    """Return whether the axes of ``affine`` (4, 4) are perpendicular, as a qform needs."""
    unit = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    return bool(np.allclose(unit.T @ unit, np.eye(3), atol=1e-6))


def _numbers(values: npt.NDArray[np.float64], places: int = 6) -> str:
    return " x ".join(f"{round(float(value), places) + 0.0:g}" for value in values)
