"""Read MetaImage (.mha, .mhd) and NRRD (.nrrd, .nhdr) files through SimpleITK."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from tesla_med.errors import DataError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.geometry import RawImage, check_affine
from tesla_med.io.nifti import one_of_series, three_dimensions

_META_SUFFIXES = (".mha", ".mhd")
_HEADER_LIMIT = 1 << 20


def read_metaimage(path: Path, index: int | None = None) -> RawImage:
    """Read a MetaImage or NRRD file whole.

    Args:
        path: the file.
        index: which image of a series to take, from 0; None refuses a series.

    Raises:
        DataError: unreadable, truncated, corrupt, or not one real-valued 3-D image.
        GeometryError: the affine cannot be used.
    """
    import SimpleITK as sitk  # noqa: N813 - its usual name

    if not path.is_file():
        raise DataError(f"{path}: no such file")
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    # Said outright, as the library tells formats apart by lower-case extensions only.
    meta = path.suffix.lower() in _META_SUFFIXES
    reader.SetImageIO("MetaImageIO" if meta else "NrrdImageIO")
    try:
        reader.ReadImageInformation()
        components = reader.GetNumberOfComponents()
        if components != 1:
            layers = "; overlapping segments of 3D Slicer lie in layers: export them as a label map"
            hint = layers if ".seg." in path.name.lower() else "; export one channel"
            raise DataError(f"{path}: expected one value per voxel, got {components}{hint}")
        shape = three_dimensions(tuple(reader.GetSize()), path, index)
        image = reader.Execute()
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        hint = "" if str(path).isascii() else "; if the file is sound, move it to a path of ASCII characters"
        raise DataError(f"{path}: cannot be read as MetaImage or NRRD: {reason}{hint}") from error
    array = sitk.GetArrayFromImage(image)
    if array.dtype.kind not in "iuf":
        raise DataError(f"{path}: expected real numbers, got {array.dtype} voxels")
    held = _held_bytes(path)  # the library fills what is missing with zeros and says nothing
    if held is not None and held < array.nbytes:
        raise DataError(
            f"{path}: truncated: {array.nbytes} bytes expected for {shape}, {held} found; export it again"
        )
    dimension = image.GetDimension()
    affine = np.eye(4)
    direction = np.array(image.GetDirection()).reshape(dimension, dimension)[:3, :3]
    affine[:3, :3] = direction * np.array(image.GetSpacing())[:3]
    affine[:3, 3] = np.array(image.GetOrigin())[:3]
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine  # the library's world is LPS+
    check_affine(affine, path)
    return RawImage(one_of_series(array.T, index), affine, sizes=tuple(image.GetSpacing()[:3]))


def _held_bytes(path: Path) -> int | None:
    """Return how many bytes of voxel data the file holds once unpacked; None where unknown."""
    try:
        content = path.read_bytes()
        if path.suffix.lower() in _META_SUFFIXES:
            return _held_by_metaimage(content, path)
        return _held_by_nrrd(content, path)
    except OSError as error:
        raise DataError(f"{path}: its data cannot be read: {error}") from error


def _held_by_metaimage(content: bytes, path: Path) -> int | None:
    fields: dict[str, str] = {}
    position = 0
    while "elementdatafile" not in fields and position < min(len(content), _HEADER_LIMIT):
        end = content.find(b"\n", position)
        end = len(content) if end < 0 else end
        key, _, value = content[position:end].decode("latin-1").partition("=")
        fields[key.strip().lower()] = value.strip()
        position = end + 1
    name = fields.get("elementdatafile", "LIST")
    if fields.get("binarydata", "true").lower() == "false" or name.upper().startswith("LIST") or "%" in name:
        return None
    data = content[position:] if name.upper() == "LOCAL" else _beside(path, name)
    if fields.get("compresseddata", "false").lower() == "true":
        return _unpacked(data, path)
    skipped = fields.get("headersize", "")
    return len(data) - (int(skipped) if skipped.isdigit() else 0)


def _held_by_nrrd(content: bytes, path: Path) -> int | None:
    ends = [(content.find(mark), len(mark)) for mark in (b"\n\n", b"\r\n\r\n")]
    end, length = min(((at, n) for at, n in ends if at >= 0), default=(len(content), 0))
    lines = content[:end].decode("latin-1").splitlines()
    fields = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("data file", fields.get("datafile"))
    if any(key in fields for key in ("line skip", "lineskip", "byte skip", "byteskip")):
        return None
    if name is not None and (name.upper().startswith("LIST") or "%" in name):
        return None
    data = content[end + length :] if name is None else _beside(path, name)
    encoding = fields.get("encoding", "").lower()
    if encoding in ("gzip", "gz"):
        return _unpacked(data, path)
    return len(data) if encoding == "raw" else None


def _beside(path: Path, name: str) -> bytes:
    data = path.parent / name
    check_fetched(data)
    return data.read_bytes()


def _unpacked(data: bytes, path: Path) -> int:
    unpacker = zlib.decompressobj(wbits=47)  # zlib or gzip, whichever the data begin with
    try:
        size = len(unpacker.decompress(data)) + len(unpacker.flush())
    except zlib.error as error:
        raise DataError(
            f"{path}: corrupt compressed data ({error}); copy or export the file again"
        ) from error
    if not unpacker.eof:
        raise DataError(
            f"{path}: truncated: its compressed data end too early; copy or export the file again"
        )
    return size
