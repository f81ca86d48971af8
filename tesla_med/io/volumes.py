"""Read images and masks of any supported format, and write results on an image's grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import SiteConfig
from tesla_med.errors import DataError, GeometryError, OutputError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.files import write_bytes
from tesla_med.io.geometry import Affine, Grid, RawImage, grid_difference, placed, spacing_of
from tesla_med.io.nifti import encode_nifti, grid_header, read_nifti
from tesla_med.types import Case, IntArray, Volume

VOLUME_SUFFIXES = (".nii.gz", ".nii", ".mha", ".mhd", ".nrrd", ".nhdr")
PARTIAL_SUFFIXES = (".seg.nrrd", ".seg.nhdr")
"""Of segmentations of 3D Slicer, which hold the part of the grid that is segmented."""
LEAST_STEPS = 256
"""Steps of float32 that the intensities of an image must span; else the smallest is subtracted first."""
MOST_NOISE = 4096
"""Steps of float64 that are no more than the rounding of a constant image."""
Spacing = Literal["header", "nominal", "nominal_if_unit"]


def volume_suffix(name: str) -> str:
    """Return the ending of a file name that marks a readable volume, or ``""``; case is ignored."""
    lower = name.lower()
    return next((name[-len(end) :] for end in VOLUME_SUFFIXES if lower.endswith(end)), "")


def stem(path: Path | str) -> str:
    """Return a file's name without its volume extension, in whatever case that is written."""
    name = Path(path).name
    return name[: len(name) - len(volume_suffix(name))]


def read_volume(
    path: Path, *, spacing: Spacing = "header", index: int | None = None, series: str | None = None
) -> Volume:
    """Read one image whole and repair what can be repaired, with a note for each repair.

    The affine is the sform if its code is above 0, else the qform if its code is, else voxel
    sizes alone. Voxels that are not finite take the smallest finite value. Where values lie so close together
    and so far from 0 that float32 would lose their differences, the smallest is subtracted from all.

    Args:
        path: NIfTI-1/2, MetaImage or NRRD file, or a folder of the DICOM slices of one series.
        spacing: whether the header's voxel size is a physical one, as the site says.
        index: which image of a series to take, from 0; None refuses a series.
        series: of a DICOM folder, a glob for the description or protocol name of the series to read.

    Returns:
        The volume, array (1, I, J, K) float32 in file order.

    Raises:
        DataError: missing, truncated or corrupt; not one real-valued 3-D image; nothing finite, or a value
            too large for float32.
        GeometryError: the affine is degenerate or not finite.
    """
    path = Path(path)
    raw = _read(path, index, series)
    notes = list(raw.notes)
    array = _single(raw.array, path, notes)
    steps = spacing_of(raw.affine)
    nominal = spacing == "nominal"
    if spacing == "nominal_if_unit" and np.allclose(steps, 1.0, rtol=0, atol=1e-6):
        nominal = True
        notes.append("voxel size of exactly 1 x 1 x 1 mm taken as nominal: no mm or ml figures")
    return Volume(
        array=array[None],
        affine=raw.affine,
        spacing=steps,
        stated=_stated(raw, steps),
        header=raw.header,
        path=path,
        nominal_spacing=nominal,
        blank=bool(array.min() == array.max()),
        notes=notes,
    )


def _stated(raw: RawImage, steps: tuple[float, float, float]) -> tuple[float, float, float]:
    """Return the voxel size that the header states, that of the affine where they contradict each other."""
    if raw.sizes is None or not np.allclose(raw.sizes, steps, rtol=1e-4, atol=0):
        return steps
    return (raw.sizes[0], raw.sizes[1], raw.sizes[2])


def read_case(case: Case, site: SiteConfig) -> Volume:
    """Read the image of a case, all its channels on the grid of the first.

    Returns:
        The volume, array (C, I, J, K) float32 in file order; header, affine and path are the first channel's.

    Raises:
        DataError: as for :func:`read_volume`, or a channel has no file, or the image cannot be told.
        GeometryError: as for :func:`read_volume`, or a channel on another grid than the first.
    """
    if case.problem:
        raise DataError(case.problem)
    for number, path in enumerate(case.channels, 2):
        if path is None:
            pattern = site.files.image[number - 1]
            text = f"channel {number} has no file: nothing beside {case.image} matches {pattern}"
            raise DataError(f"case {case.name}: {text}")
    first, *others = (
        read_volume(path, spacing=site.spacing, index=site.files.series_image, series=site.files.series)
        for path in case.files
    )
    if not others:
        return first
    for number, other in enumerate(others, 2):
        check_same_grid(other.shape, other.affine, first, f"case {case.name}: channel {number}, {other.path}")
    volumes = (first, *others)
    constant = [str(number) for number, item in enumerate(volumes, 1) if item.blank]
    notes = [f"channel {number}: {text}" for number, item in enumerate(volumes, 1) for text in item.notes]
    if constant and len(constant) < len(volumes):
        notes.append(f"channel {', '.join(constant)} is constant")
    return replace(
        first,
        array=np.concatenate([item.array for item in volumes]),
        blank=len(constant) == len(volumes),
        notes=notes,
    )


def read_mask(path: Path) -> tuple[IntArray, Affine]:
    """Read integer labels.

    Args:
        path: NIfTI-1/2, MetaImage or NRRD file.

    Returns:
        Labels (I, J, K) int32 in file order, and the affine (4, 4) voxel to RAS+ mm.

    Raises:
        DataError: as for images; or a value more than 0.01 from an integer, or below 0.
        GeometryError: the affine is degenerate or not finite.
    """
    path = Path(path)
    raw = _read(path)
    if raw.array.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(raw.array - np.rint(raw.array)) <= 0.01)
        if wrong.any():
            raise DataError(
                f"{path}: expected integer labels (to within 0.01), got {_examples(raw.array[wrong])} and "
                f"{int(wrong.sum())} such voxels in all; is this a probability map or an interpolated mask?"
            )
    low, high = (float(np.rint(float(value))) for value in (raw.array.min(), raw.array.max()))
    if low < 0 or high > np.iinfo(np.int32).max:
        raise DataError(f"{path}: expected labels of 0 and above, got values from {low:g} to {high:g}")
    labels = np.rint(raw.array) if raw.array.dtype.kind == "f" else raw.array
    return labels.astype(np.int32), raw.affine


def is_partial(path: Path) -> bool:
    """Return whether a file may hold a part of its grid: a segmentation of 3D Slicer, by name or header."""
    if path.name.lower().endswith(PARTIAL_SUFFIXES):
        return True
    if not path.name.lower().endswith((".nrrd", ".nhdr")):
        return False
    with path.open("rb") as stream:
        return b"\nSegment0_" in stream.read(1 << 16).partition(b"\n\n")[0]


def read_mask_of(path: Path, volume: Volume, name: str) -> IntArray:
    """Read integer labels on the grid of an image.

    Args:
        path: as for :func:`read_mask`; a segmentation of 3D Slicer is placed by its own geometry.
        volume: the image.
        name: of the case, for messages.

    Returns:
        Labels (I, J, K) int32 on the image's grid.

    Raises:
        DataError: as for :func:`read_mask`.
        GeometryError: as for :func:`read_mask`, or it lies on another grid.
    """
    mask, affine = read_mask(path)
    where = f"case {name}: {path}"
    if is_partial(path):
        return placed(mask, affine, volume.shape, volume.affine, where)
    check_same_grid(mask.shape, affine, volume, where)
    return mask


def check_same_grid(shape: Sequence[int], affine: Affine, volume: Volume, name: str) -> None:
    """Check that a grid is that of ``volume``.

    Args:
        shape: (I, J, K) of the other grid.
        affine: (4, 4) of the other grid, voxel to mm.
        volume: the image.
        name: what the other grid belongs to, for the message.

    Raises:
        GeometryError: another shape, or a corner further off than 0.1 mm or half a voxel.
    """
    ours, image = Grid(tuple(shape), affine), Grid(volume.shape, volume.affine)
    if differs := grid_difference("it has", ours, f"its image {volume.path} has", image):
        raise GeometryError(f"{name}: {differs}; resample it to the image or correct its header")


def write_mask(path: Path, mask: IntArray, volume: Volume) -> None:
    """Write labels on the grid of ``volume``, atomically, as ``.nii.gz``; see :func:`encode_mask`.

    Raises:
        DataError: values that are not integers or out of range.
        GeometryError: another shape.
        OutputError: the file cannot be written.
    """
    write_bytes(path, encode_mask(path, mask, volume))


def encode_mask(path: Path, mask: IntArray, volume: Volume) -> bytes:
    """Return the bytes of a file of labels on the grid of ``volume``.

    Args:
        path: the file they are for; must end in ``.nii.gz``.
        mask: (I, J, K) integers, 0 to 65535; stored as uint8, as uint16 where one is above 255.
        volume: the image whose header fields are repeated as they are.

    Raises:
        DataError: values that are not integers or out of range.
        GeometryError: another shape.
    """
    mask = np.asarray(mask)
    _check_result(path, mask.shape, volume)
    if mask.dtype.kind not in "iub":
        raise DataError(f"{path}: expected integer labels, got {mask.dtype}")
    low, high = int(mask.min()), int(mask.max())
    if low < 0 or high > 65535:
        raise DataError(f"{path}: expected labels from 0 to 65535, got {low} to {high}")
    return encode_nifti(mask.astype(np.uint8 if high <= 255 else np.uint16), _grid(volume))


def encode_map(path: Path, array: npt.NDArray[np.floating[Any]], volume: Volume) -> bytes:
    """Return the bytes of a float32 file of real values on the grid of ``volume``.

    Args:
        path: the file they are for; must end in ``.nii.gz``.
        array: (I, J, K), or (C, I, J, K), which is stored as (I, J, K, C).
        volume: the image whose header fields are repeated as they are.

    Raises:
        GeometryError: another shape.
    """
    array = np.asarray(array)
    _check_result(path, array.shape[-3:], volume)
    stored = np.moveaxis(array, 0, -1) if array.ndim == 4 else array
    return encode_nifti(stored.astype(np.float32), _grid(volume), level=1)


def read_map(path: Path, channels: int) -> npt.NDArray[np.float32]:
    """Read real values that :func:`encode_map` stored as (I, J, K, C), as (C, I, J, K) float32.

    Raises:
        DataError: unreadable, or fewer than ``channels``.
    """
    return np.stack([_read(Path(path), index).array.astype(np.float32) for index in range(channels)])


def save_image(
    path: Path, array: npt.NDArray[Any], affine: Affine, dtype: npt.DTypeLike = np.float32
) -> None:
    """Write an image that has no header of its own, atomically, with sform and qform code 1.

    Args:
        path: the file; must end in ``.nii`` or ``.nii.gz``.
        array: (I, J, K).
        affine: (4, 4) voxel to RAS+ mm.
        dtype: type to store.

    Raises:
        OutputError: another extension, or the file cannot be written.
    """
    path = Path(path)
    if not path.name.lower().endswith((".nii", ".nii.gz")):
        raise OutputError(f"{path}: expected a name ending in .nii or .nii.gz")
    grid = grid_header(np.asarray(affine, np.float64))
    compressed = path.name.lower().endswith(".gz")
    write_bytes(path, encode_nifti(np.asarray(array).astype(dtype), grid, compressed=compressed))


def _read(path: Path, index: int | None = None, series: str | None = None) -> RawImage:
    check_fetched(path)
    suffix = volume_suffix(path.name).lower()
    if suffix.startswith(".nii"):
        return read_nifti(path, index)
    if suffix:
        from tesla_med.io.metaimage import read_metaimage

        return read_metaimage(path, index)
    if path.is_dir():
        from tesla_med.io.dicom import read_dicom

        return read_dicom(path, series)
    raise DataError(f"{path}: expected one of {', '.join(VOLUME_SUFFIXES)}; convert the image to NIfTI")


def _single(values: npt.NDArray[Any], path: Path, notes: list[str]) -> npt.NDArray[np.float32]:
    """Return voxels (I, J, K) as float32 in Fortran order, repaired, with a note for each repair.

    Raises:
        DataError: nothing is finite, or a finite value is too large for float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.array(values, dtype=np.float32, order="F")
    bad = ~np.isfinite(array)
    count = int(bad.sum())
    if count:
        original = values[bad]
        lost = original[np.isfinite(original)]
        if lost.size:
            raise DataError(
                f"{path}: {lost.size} voxels hold values too large for float32, such as {lost[0]:g}; "
                f"the largest is {np.finfo(np.float32).max:.3g}; scale the image down"
            )
        if count == array.size:
            raise DataError(f"{path}: none of its {count} voxels is a finite number; export the image again")
        array[bad] = array[~bad].min()
    low, high = float(array.min()), float(array.max())
    if high - low < LEAST_STEPS * np.spacing(np.float32(max(abs(low), abs(high)))):
        known = values[~bad] if count else values
        least, most = known.min(), known.max()
        noise = MOST_NOISE * np.spacing(max(abs(least), abs(most))) if known.dtype.kind == "f" else 0
        if most - least > noise and (known.astype(np.float32) != known).any():
            array = np.array(values - least, dtype=np.float32, order="F")
            array[bad] = 0
            notes.append(
                f"{least:.10g} subtracted from all voxels: float32 cannot hold the differences of such values"
            )
            low = float(least)
    if count:
        notes.append(f"{count} voxels that were not finite replaced by the smallest finite value {low:g}")
    return array


def _grid(volume: Volume) -> Any:
    return volume.header if volume.header is not None else grid_header(volume.affine)


def _check_result(path: Path, shape: tuple[int, ...], volume: Volume) -> None:
    if not path.name.lower().endswith(".nii.gz"):
        raise OutputError(f"{path}: results are written as .nii.gz")
    if tuple(shape) != volume.shape:
        raise GeometryError(
            f"{path}: result of shape {tuple(shape)} for {volume.path} of shape {volume.shape}"
        )


def _examples(values: npt.NDArray[Any]) -> str:
    return ", ".join(f"{value:g}" for value in values.ravel()[:3])
