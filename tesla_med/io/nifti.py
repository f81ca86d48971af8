"""Read and write NIfTI-1 and NIfTI-2 files without changing what their headers say."""

from __future__ import annotations

import gzip
import io
import math
import zlib
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
from nibabel.spatialimages import HeaderDataError

from tesla_med.errors import DataError, GeometryError
from tesla_med.io.geometry import Affine, RawImage, check_affine, corner_displacement, is_orthogonal

_MM = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}  # spatial unit code: unknown, metre, millimetre, micron
_GRID_FIELDS = (
    *("pixdim", "xyzt_units", "qform_code", "sform_code"),
    *("quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("srow_x", "srow_y", "srow_z"),
)


def read_nifti(path: Path, index: int | None = None) -> RawImage:
    """Read a NIfTI file whole, compressed or not, whatever its name says.

    Args:
        path: the file.
        index: which image of a series to take, from 0; None refuses a series.

    Raises:
        DataError: unreadable, truncated, corrupt, or not one real-valued 3-D image.
        GeometryError: the affine cannot be used.
    """
    raw, notes = _content(path)
    header = _header(raw, path)
    stored = _voxels(raw, header, path, index)
    affine = _affine(header, stored.shape, path, notes)
    _repair_sizes(header, affine, notes)
    factor = _MM.get(int(header["xyzt_units"]) & 7, 1.0)
    sizes = tuple(float(size) * factor for size in header["pixdim"][1:4])
    return RawImage(_scaled(stored, header, notes), affine, header, notes, sizes)


def axis_affine(affine: Affine) -> Affine:
    """Return ``affine`` (4, 4) turned to the nearest world axes, voxel sizes kept, origin 0."""
    turns = nib.io_orientation(affine)
    result = np.eye(4)
    result[:3, :3] = 0.0
    for column, (row, sign) in enumerate(turns):
        result[int(row), column] = sign * np.linalg.norm(affine[:3, column])
    return result


def axis_directions(affine: Affine) -> tuple[tuple[int, bool], ...]:
    """Return for each array axis the nearest world axis (0 R/L, 1 A/P, 2 S/I) and if it runs to -."""
    return tuple((int(world), bool(sign < 0)) for world, sign in nib.io_orientation(affine))


def model_axes(affine: Affine, orientation: str) -> tuple[int, int, int]:
    """Return the array axis that becomes each axis of a volume turned to ``orientation`` (such as RAS)."""
    axis_of = {world: axis for axis, (world, _) in enumerate(axis_directions(affine))}
    pairs = ("LR", "AP", "SI")
    worlds = [next(i for i, pair in enumerate(pairs) if letter in pair) for letter in orientation]
    return (axis_of[worlds[0]], axis_of[worlds[1]], axis_of[worlds[2]])


def slice_axis(affine: Affine, orientation: str = "RAS") -> int:
    """Return the array axis across which a pipeline of this ``orientation`` cuts slices."""
    return model_axes(affine, orientation)[2]


def grid_header(affine: Affine) -> Any:
    """Return a NIfTI-1 header for ``affine`` (4, 4), mm: sform and, without shear, qform of code 1."""
    header = nib.Nifti1Header()
    header["dim"][0] = 3
    header["dim"][1:4] = 1
    header["pixdim"][1:4] = np.linalg.norm(affine[:3, :3], axis=0)
    header.set_xyzt_units("mm")
    if is_orthogonal(affine):
        header.set_qform(affine, code=1)
    header.set_sform(affine, code=1)
    return header


def encode_nifti(array: npt.NDArray[Any], grid: Any, *, compressed: bool = True, level: int = 6) -> bytes:
    """Return the bytes of a NIfTI file that holds ``array`` on the grid of the header ``grid``.

    Only the fields that place the grid are taken from ``grid``, as they are; texts, display
    ranges and extensions are not. The same array always gives the same bytes.

    Args:
        array: (I, J, K) or (I, J, K, C), of the type to be stored.
        grid: NIfTI-1 or NIfTI-2 header.
        compressed: as a ``.nii.gz`` is.
        level: gzip level, 1 (fast) to 9.
    """
    second = isinstance(grid, nib.Nifti2Header)
    header = (nib.Nifti2Header if second else nib.Nifti1Header)(endianness="<")
    header.set_data_dtype(array.dtype)
    header.set_data_shape(array.shape)
    for name in _GRID_FIELDS:
        header[name] = grid[name]
    header["vox_offset"] = 544 if second else 352
    header["scl_slope"], header["scl_inter"] = 1, 0
    body = np.asarray(array, dtype=array.dtype.newbyteorder("<")).tobytes(order="F")
    content: bytes = header.binaryblock + bytes(4) + body
    if not compressed:
        return content
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=level, fileobj=buffer, mtime=0) as stream:
        stream.write(content)
    return buffer.getvalue()


def _content(path: Path) -> tuple[bytes, list[str]]:
    notes: list[str] = []
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    packed = raw[:2] == b"\x1f\x8b"
    if packed != path.name.lower().endswith(".gz"):
        notes.append(f"the file is {'' if packed else 'not '}compressed although its name says otherwise")
    if not packed:
        return raw, notes
    try:
        return gzip.decompress(raw), notes
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: truncated or corrupt ({error}); copy or export the file again") from error


def _header(raw: bytes, path: Path) -> Any:
    size = next((n for n in (348, 540) if raw[:4] in (n.to_bytes(4, "little"), n.to_bytes(4, "big"))), 0)
    if not size or len(raw) < size:
        what = f"{len(raw)} bytes" if len(raw) < 348 else f"first bytes {raw[:4].hex(' ')}"
        raise DataError(
            f"{path}: expected a NIfTI-1 or NIfTI-2 file, got {what}; it is truncated or in another format"
        )
    # Unchecked on purpose: the check repairs fields, and masks must carry them as they were.
    cls = nib.Nifti1Header if size == 348 else nib.Nifti2Header
    header = cls(raw[:size], check=False)
    magic = bytes(header["magic"].item())[:3]
    if magic not in (b"n+1", b"n+2"):
        raise DataError(
            f"{path}: expected a single-file NIfTI (mark n+1 or n+2), got {magic!r}; "
            "ANALYZE and .hdr/.img pairs are not read: convert to .nii.gz"
        )
    return header


def _voxels(raw: bytes, header: Any, path: Path, index: int | None) -> npt.NDArray[Any]:
    shape = _shape(header, path)
    three_dimensions(shape, path, index)
    try:
        dtype = header.get_data_dtype()
        offset = int(header["vox_offset"])
    except (KeyError, ValueError, OverflowError, HeaderDataError) as error:
        raise DataError(f"{path}: the header is corrupt (data type or offset: {error})") from error
    if dtype.names is not None or dtype.kind not in "iuf":
        kind = {"c": "complex", "V": "RGB"}.get(dtype.kind, str(dtype))
        raise DataError(f"{path}: expected real numbers, got {kind} voxels; export one real-valued channel")
    offset = offset if offset >= header.sizeof_hdr else header.sizeof_hdr + 4
    count = 1
    for size in shape:
        count *= size
    if offset + count * dtype.itemsize > len(raw):
        raise DataError(
            f"{path}: truncated: the header says {offset + count * dtype.itemsize} bytes for shape {shape}, "
            f"the file holds {len(raw)}; copy or export the file again"
        )
    voxels: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer=raw, offset=offset, order="F")
    return one_of_series(voxels, index)


def _shape(header: Any, path: Path) -> tuple[int, ...]:
    dim = [int(value) for value in header["dim"]]
    if not 1 <= dim[0] <= 7:
        raise DataError(f"{path}: the header is corrupt: {dim[0]} dimensions")
    return tuple(dim[1 : dim[0] + 1])


def one_of_series(voxels: npt.NDArray[Any], index: int | None) -> npt.NDArray[Any]:
    """Return image ``index`` (None: the only one) of voxels whose axes :func:`three_dimensions` accepts."""
    series = voxels.reshape((*voxels.shape[:3], -1), order="F")
    chosen: npt.NDArray[Any] = series[..., index or 0]
    return chosen


def three_dimensions(shape: tuple[int, ...], path: Path, index: int | None = None) -> tuple[int, int, int]:
    """Return the first three axes of ``shape``.

    Args:
        shape: of the file's array, time or channels last.
        path: the file, for messages.
        index: which image of a series to take, from 0; None refuses a series.

    Raises:
        DataError: fewer than three axes, an empty axis, a series where none is to be chosen from, or
            fewer images than ``index`` needs.
    """
    if any(size < 1 for size in shape):
        raise DataError(f"{path}: the image is empty: shape {shape}")
    if len(shape) < 3:
        raise DataError(f"{path}: expected a 3-D image, got shape {shape}; store one slice as (x, y, 1)")
    images = math.prod(shape[3:])
    if index is None and images != 1:
        raise DataError(
            f"{path}: expected one 3-D image, got a series of shape {shape}; save the one to use by itself, "
            f"or choose it with site.files.series_image, 0 to {images - 1}"
        )
    if index is not None and not 0 <= index < images:
        raise DataError(f"{path}: image {index} asked for, but shape {shape} holds 0 to {images - 1}")
    return (shape[0], shape[1], shape[2])


def _affine(header: Any, shape: tuple[int, ...], path: Path, notes: list[str]) -> Affine:
    fixed = header.copy()
    fixed["pixdim"][1:4] = np.abs(fixed["pixdim"][1:4])
    if fixed["pixdim"][0] != -1:
        fixed["pixdim"][0] = 1  # the standard: anything but -1 counts as 1
    unit = int(header["xyzt_units"]) & 7
    factor = np.diag([_MM.get(unit, 1.0)] * 3 + [1.0])
    if unit not in (1, 2, 3):
        notes.append("the header gives no unit of length; millimetres assumed")
    elif unit != 2:
        notes.append(f"lengths converted from {'metres' if unit == 1 else 'micrometres'} to millimetres")
    by_qform = _qform(fixed) if header["qform_code"] > 0 else None
    if header["sform_code"] > 0:
        with np.errstate(invalid="ignore"):
            affine = factor @ header.get_sform()
        check_affine(affine, path)
        if by_qform is not None:
            apart = corner_displacement(affine, factor @ by_qform, shape)
            if not apart <= 0.01:
                notes.append(f"sform and qform differ by up to {apart:.2f} mm at a corner; the sform is used")
        return np.asarray(affine, np.float64)
    if header["qform_code"] > 0:
        if by_qform is None:
            raise GeometryError(f"{path}: the header's qform is not a rotation; repair the header")
        affine = factor @ by_qform
    else:
        fixed["dim"][0], fixed["dim"][1:4] = 3, shape
        affine = factor @ fixed.get_base_affine()
        notes.append("the header has neither sform nor qform; only its voxel sizes are used")
    check_affine(affine, path)
    return np.asarray(affine, np.float64)


def _repair_sizes(header: Any, affine: Affine, notes: list[str]) -> None:
    """Give the header the voxel sizes of the affine where its own cannot be or contradict it, and say so.

    With a qform beside the sform they belong to the qform, which masks repeat.
    """
    factor = _MM.get(int(header["xyzt_units"]) & 7, 1.0)
    stored = np.asarray(header["pixdim"][1:4], np.float64) * factor
    used = np.linalg.norm(affine[:3, :3], axis=0)
    with np.errstate(invalid="ignore"):
        possible = bool(np.all(stored > 0) and np.all(np.isfinite(stored)))
        agree = bool(np.all(np.abs(stored - used) <= 0.01 * used))
    if agree or (possible and header["qform_code"] > 0):
        return
    texts = [", ".join(f"{value:.4g}" for value in values) for values in (stored, used)]
    notes.append(
        f"the header's voxel sizes, {texts[0]} mm, contradict its transform or cannot be; {texts[1]} mm are "
        "used and written with the masks"
    )
    header["pixdim"][1:4] = used / factor


def _qform(header: Any) -> Affine | None:
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(header.get_qform(), np.float64)
    except (HeaderDataError, ValueError):
        return None


def _scaled(stored: npt.NDArray[Any], header: Any, notes: list[str]) -> npt.NDArray[Any]:
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0 or not np.isfinite(slope):
        return stored
    if not np.isfinite(intercept):
        notes.append("the header's intercept is not a number; 0 assumed")
        intercept = 0.0
    if slope == 1 and intercept == 0:
        return stored
    with np.errstate(over="ignore", invalid="ignore"):
        return stored.astype(np.float64) * slope + intercept
