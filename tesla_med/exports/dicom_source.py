"""What lies under a mask: the slices of its series, in the order in which reading counts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError, GeometryError
from tesla_med.exports.base import Finished
from tesla_med.io.dicom import Slice, dicom_files, placed_slices
from tesla_med.io.geometry import Grid, grid_difference, turned_to
from tesla_med.io.masks import check_labels

NEEDED = ("SOPClassUID", "SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "FrameOfReferenceUID")
"""What a slice must say of itself, as nothing can be laid over it by anything else."""
SHARED = NEEDED[2:]
MAY_BE_EMPTY = (
    *("PatientName", "PatientID", "PatientBirthDate", "PatientSex", "AccessionNumber", "StudyID"),
    *("StudyDate", "StudyTime", "ReferringPhysicianName"),
)
"""What belongs into an object even where nothing is known (type 2); de-identification leaves some out."""
SEXES = ("M", "F", "O")
SPACING_TOLERANCE = 1e-3
"""Share by which two ways to read the size of a pixel may differ."""


def slices_under(item: Finished, folder: Path) -> tuple[list[Any], Grid]:
    """Return the headers of the slices that a mask belongs to, and the grid that their voxels are read on.

    Args:
        item: the mask; its ``pattern`` chooses where the folder holds several series.
        folder: of the series.

    Returns:
        A pydicom dataset without voxels for each slice, by position, and the grid (columns, rows, slices).

    Raises:
        DataError: reading would refuse the series, or its headers lack what an object must refer to.
        GeometryError: the affine of the series cannot be used.
    """
    import pydicom

    _check_single_frames(item, folder)
    try:
        placed, affine = placed_slices(folder, item.pattern)
    except (DataError, GeometryError) as error:
        raise type(error)(f"{item.name}: {error}") from error
    slices = [pydicom.dcmread(one.path, stop_before_pixels=True) for one in placed]
    for one, where in zip(slices, placed, strict=True):
        _check_header(item, one, where)
    for keyword in SHARED:
        if len({one.get(keyword) for one in slices}) > 1:
            raise DataError(
                f"{item.name}: the slices in {folder} have different {keyword}s; expected one for all; "
                "export the series again"
            )
    _complete(slices, _step(placed))
    return slices, Grid((*placed[0].size, len(placed)), affine)


def frames_on(item: Finished, grid: Grid) -> npt.NDArray[np.uint8]:
    """Return a mask as indices of its foreground classes (slices, rows, columns), on the grid of its series.

    Args:
        item: the mask.
        grid: of :func:`slices_under`.

    Raises:
        DataError: the mask holds a label that is no class.
        GeometryError: it does not lie on the grid, whatever the order and the sense of its axes.
    """
    values, affine = item.read()
    check_labels(values, [entry.value for entry in item.classes], f"{item.name}: the mask {item.mask}")
    values, affine = turned_to(values, affine, grid.affine)
    differs = grid_difference(
        "the mask has", Grid(values.shape, affine), f"the series {item.series} has", grid
    )
    if differs:
        raise GeometryError(
            f"{item.name}: the mask does not lie on the grid of {item.series}: {differs}; give the series "
            "that was adapted to, or that its image was made from"
        )
    indices = np.zeros(values.shape, np.uint8)
    for index, entry in enumerate(item.foreground, 1):
        indices[values == entry.value] = index
    return np.ascontiguousarray(indices.T)


def _check_single_frames(item: Finished, folder: Path) -> None:
    import pydicom

    paths = dicom_files(folder)
    if not paths:
        raise DataError(f"{item.name}: {folder} holds no DICOM image")
    for path in paths:
        header = pydicom.dcmread(path, stop_before_pixels=True, specific_tags=["NumberOfFrames"])
        if int(header.get("NumberOfFrames") or 1) > 1:
            raise DataError(
                f"{item.name}: {path} is a multi-frame image; expected one slice per file; split it first, "
                "with emf2sf of dcm4che for example"
            )


def _check_header(item: Finished, one: Any, where: Slice) -> None:
    if missing := [keyword for keyword in NEEDED if not one.get(keyword)]:
        raise DataError(
            f"{item.name}: {where.path} has no {' and no '.join(missing)}, without which nothing can be laid "
            "over it; export the series again"
        )
    said = one.get("PixelSpacing")
    sizes = [] if said is None else [float(size) for size in said][::-1]
    if len(sizes) != 2 or not np.allclose(sizes, where.spacing, rtol=SPACING_TOLERANCE):
        raise DataError(
            f"{item.name}: {where.path} gives PixelSpacing {said or 'nowhere'}, but is read with pixels of "
            f"{where.spacing[1]:g} x {where.spacing[0]:g} mm; export the series again"
        )


def _step(slices: list[Slice]) -> float:
    """Return the distance in mm from slice to slice along their normal that fits all positions best."""
    if len(slices) == 1:
        return slices[0].thickness
    along = [float(one.position @ slices[0].normal) for one in slices]
    return float(np.polyfit(np.arange(len(along)), along, 1)[0])


def _complete(slices: list[Any], step: float) -> None:
    """Give slices what an object over them must have: one orientation, one step in mm, no part missing."""
    for one in slices:
        for keyword in MAY_BE_EMPTY:
            if keyword not in one or not _is_valid(keyword, one[keyword]):
                setattr(one, keyword, "")
        one.ImageOrientationPatient = slices[0].ImageOrientationPatient
        one.SpacingBetweenSlices = float(f"{step:.9g}")
        if not float(one.get("SliceThickness") or 0) > 0:
            one.SliceThickness = one.SpacingBetweenSlices


def _is_valid(keyword: str, element: Any) -> bool:
    """Return whether a date, a time or a sex is one by the standard; de-identification puts words there."""
    from pydicom.valuerep import DA, TM

    try:
        if element.VR in ("DA", "TM"):
            (DA if element.VR == "DA" else TM)(element.value)
    except (TypeError, ValueError):
        return False
    return keyword != "PatientSex" or not element.value or element.value in SEXES
