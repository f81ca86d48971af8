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
        sizes: voxel size along I, J, K in mm as the header states it by itself, or None.
    """

    array: npt.NDArray[Any]
    affine: Affine
    header: Any = None
    notes: list[str] = field(default_factory=list)
    sizes: tuple[float, ...] | None = None


def spacing_of(affine: Affine) -> tuple[float, float, float]:
    """Return the voxel size along I, J, K in mm: the column lengths of ``affine`` (4, 4)."""
    steps = np.linalg.norm(affine[:3, :3], axis=0)
    return (float(steps[0]), float(steps[1]), float(steps[2]))


def voxel_mm3(affine: Affine) -> float:
    """Return the volume of a voxel in cubic mm, by the determinant of ``affine`` (4, 4)."""
    return abs(float(np.linalg.det(np.asarray(affine, dtype=np.float64)[:3, :3])))


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


def turned_to(array: npt.NDArray[Any], affine: Affine, target: Affine) -> tuple[npt.NDArray[Any], Affine]:
    """Return an array with its axes in the order and the sense of those of another grid, and its affine.

    Voxels keep their place in the world. An array of which two axes lie nearest to one axis of the other grid
    stays as it is.

    Args:
        array: (I, J, K).
        affine: (4, 4) of the array, voxel to mm.
        target: (4, 4) of the other grid, voxel to mm.
    """
    units = [item[:3, :3] / np.linalg.norm(item[:3, :3], axis=0) for item in (target, affine)]
    along = np.linalg.solve(*units)  # of the other grid's axes, by those of the array
    axes = np.abs(along).argmax(axis=1)
    if len(set(axes.tolist())) < 3:
        return array, affine
    turn = np.zeros((4, 4))
    turn[3, 3] = 1
    flipped = []
    for index, axis in enumerate(axes):
        backwards = along[index, axis] < 0
        turn[axis, index] = -1 if backwards else 1
        turn[axis, 3] = array.shape[axis] - 1 if backwards else 0
        flipped += [index] if backwards else []
    return np.flip(array.transpose(axes), tuple(flipped)), affine @ turn


def lattice_offset(affine: Affine, target: Affine, shape: Sequence[int], where: object) -> tuple[int, ...]:
    """Return the voxel of the grid ``target`` on which the first voxel of a part of its lattice lies.

    Args:
        affine: (4, 4) voxel to mm of the other grid.
        target: (4, 4) voxel to mm.
        shape: (I, J, K) of the other grid.
        where: what the other grid belongs to, for the message.

    Raises:
        GeometryError: its voxels lie elsewhere than those of ``target``.
    """
    offset = np.linalg.solve(target, affine[:, 3])[:3]
    nearest = np.rint(offset)
    moved = target.copy()
    moved[:3, 3] = target[:3, :3] @ nearest + target[:3, 3]
    apart = corner_displacement(affine, moved, shape)
    allowed = min(GRID_TOLERANCE_MM, min(spacing_of(target)) / 2)
    if not apart <= allowed:
        sizes, own = (_numbers(np.array(spacing_of(item))) for item in (affine, target))
        raise GeometryError(
            f"{where}: cannot be placed by its own geometry: its voxels of {sizes} mm lie up to "
            f"{apart:.3g} mm from those of its image, of {own} mm; at most {allowed:.3g} mm is accepted; "
            "resample it to the image"
        )
    return tuple(int(step) for step in nearest)


def placed(
    labels: npt.NDArray[Any], affine: Affine, shape: Sequence[int], target: Affine, where: object
) -> npt.NDArray[Any]:
    """Return labels of a part of a grid on the whole of it, 0 elsewhere.

    Args:
        labels: (I, J, K) of the part.
        affine: (4, 4) voxel to mm of the part.
        shape: (I, J, K) of the whole.
        target: (4, 4) voxel to mm of the whole.
        where: what the part belongs to, for the message.

    Raises:
        GeometryError: the voxels lie elsewhere than those of the whole, or labels lie outside it.
    """
    offset = lattice_offset(affine, target, labels.shape, where)
    ends = [min(start + size, full) for start, size, full in zip(offset, labels.shape, shape, strict=True)]
    inner = tuple(slice(max(start, 0), max(end, 0)) for start, end in zip(offset, ends, strict=True))
    own = tuple(
        slice(part.start - start, part.stop - start) for part, start in zip(inner, offset, strict=True)
    )
    result = np.zeros(tuple(shape), labels.dtype)
    if all(part.stop > part.start for part in inner):
        result[inner] = labels[own]
    lost = np.count_nonzero(labels) - np.count_nonzero(result)
    if lost:
        raise GeometryError(
            f"{where}: {lost} labelled voxels lie outside its image, placed by its own geometry at voxel "
            f"{offset} with {labels.shape} of {tuple(shape)} voxels; is it of another image?"
        )
    return result


def united(
    shape: Sequence[int], affine: Affine, other: Sequence[int], other_affine: Affine, where: object
) -> tuple[tuple[int, ...], Affine]:
    """Return shape and affine of the smallest grid that holds two parts of one lattice.

    Args:
        shape: (I, J, K) of the first part.
        affine: (4, 4) of the first part, voxel to mm.
        other: (I, J, K) of the second.
        other_affine: (4, 4) of the second.
        where: what the second belongs to, for the message.

    Raises:
        GeometryError: the voxels of the second lie elsewhere than those of the first.
    """
    offset = np.array(lattice_offset(other_affine, affine, other, where))
    first = np.minimum(offset, 0)
    last = np.maximum(offset + np.array(other), np.array(shape))
    whole = affine.copy()
    whole[:3, 3] = affine[:3, :3] @ first + affine[:3, 3]
    return tuple(int(size) for size in last - first), whole


def is_orthogonal(affine: Affine) -> bool:
    """Return whether the axes of ``affine`` (4, 4) are perpendicular, as a qform needs."""
    unit = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    return bool(np.allclose(unit.T @ unit, np.eye(3), atol=1e-6))


def _numbers(values: npt.NDArray[np.float64], places: int = 6) -> str:
    return " x ".join(f"{round(float(value), places) + 0.0:g}" for value in values)
