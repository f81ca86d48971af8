"""Read a folder of DICOM slices as one volume, or refuse it with the reason.

Slices are sorted by where they lie, never by name or number. A series that does not fill space evenly
(a missing or doubled slice, a tilted gantry) is refused: stretching it would put masks in the wrong
place. No text of the header is kept but the description of a series, where a message must tell several
apart; else messages name positions and numbers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError
from tesla_med.io.dicom_kinds import no_image
from tesla_med.io.fetched import check_fetched, unfetched
from tesla_med.io.geometry import Affine, RawImage, check_affine
from tesla_med.io.names import fold, natural

_SERIES, _NUMBER, _FRAMES = "0020|000e", "0020|0011", "0028|0008"
_DESCRIPTION, _PROTOCOL, _STUDY, _PATIENT = "0008|103e", "0018|1030", "0020|000d", "0010|0020"
_POSITION, _ORIENTATION = "0020|0032", "0020|0037"
_RELATED = "0020|1209"
_STEP, _THICKNESS = "0018|0088", "0018|0050"
INDEX = "DICOMDIR"
"""Name of the file that lists what is on a disc (PS3.10)."""
UNEVEN = 0.05
"""Largest deviation of a slice's position from an even stack, as a share of the step."""
_STRAIGHT = 0.9
"""Cosine above which a slice counts as lying in a plane of the body."""
MAX_TILT = 0.1
"""Degrees between the stack's direction and the slices' normal."""
Doubles = npt.NDArray[np.float64]


def is_dicom(path: Path) -> bool:
    """Return whether a file has the mark of DICOM, whatever its name; the index of a disc does not count."""
    if path.name.upper() == INDEX:
        return False
    try:
        with path.open("rb") as stream:
            stream.seek(128)
            return stream.read(4) == b"DICM"
    except OSError:
        return False


def may_be_slice(path: Path) -> bool:
    """Return whether a file has the mark of DICOM, or would have it if its content were there."""
    return is_dicom(path) or (path.suffix.lower() in (".dcm", ".ima") and bool(unfetched(path)))


def dicom_files(folder: Path) -> list[Path]:
    """Return the DICOM images directly in a folder, by name; reports and the like do not count.

    Raises:
        DataError: the content of one was not fetched.
    """
    files = [item for item in sorted(folder.iterdir()) if not item.name.startswith(".")]
    found = [item for item in files if is_dicom(item)]
    endings = {item.suffix.lower() for item in found} | {".dcm", ".ima"}
    for item in files:
        if item.suffix.lower() in endings:
            check_fetched(item)
    return [item for item in found if not no_image(item)]


def read_dicom(folder: Path, series: str | None = None) -> RawImage:
    """Read the one series in a folder.

    Args:
        folder: its files are slices of one series; files that are no DICOM images do not matter.
        series: glob for the description or protocol name of the one to read, where there are several.

    Returns:
        Voxels (I, J, K) after rescale slope and intercept, slices in the order of their position, and the
        affine (4, 4) to RAS+ mm.

    Raises:
        DataError: no series or several, multi-frame or colour images, slices of different grids or
            directions, a missing or doubled slice, a tilted gantry, or a file that cannot be read.
        GeometryError: the affine cannot be used.
    """
    import SimpleITK as sitk  # noqa: N813 - its usual name

    slices, affine = placed_slices(folder, series)
    reader = sitk.ImageSeriesReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileNames([str(item.path) for item in slices])
    if len({item.pixels for item in slices}) > 1:
        # Otherwise every slice is cast to the type of the first, whose slope and intercept may differ.
        reader.SetOutputPixelType(sitk.sitkFloat64)
    try:
        array = sitk.GetArrayFromImage(reader.Execute())
    except RuntimeError as error:
        raise DataError(f"{folder}: its DICOM voxels cannot be read: {_last_line(error)}") from error
    return RawImage(array.T, affine, notes=[f"read from a DICOM series of {len(slices)} slices"])


def placed_slices(folder: Path, series: str | None = None) -> tuple[list[Slice], Affine]:
    """Return the slices of the one series in a folder, as voxels count them, and where they lie.

    Args:
        folder: as of :func:`read_dicom`.
        series: as of :func:`read_dicom`.

    Returns:
        The slices by position, and the affine (4, 4) of the grid (I, J, K) to RAS+ mm: columns of a slice,
        its rows, and the slices.

    Raises:
        DataError: as of :func:`read_dicom`, but for voxels, which are not read.
        GeometryError: the affine cannot be used.
    """
    every = [read_header(path) for path in dicom_files(folder)]
    slices = [item for item in every if is_chosen(item, series)]
    if every and not slices:
        raise DataError(
            f"{folder}: no series matches site.files.series {series!r}; there are: {in_words(every)}"
        )
    _check_one_series(slices, folder)
    slices, step = _in_order(slices, folder)
    first = slices[0]
    affine = np.eye(4)
    affine[:3, 0] = first.across * first.spacing[0]
    affine[:3, 1] = first.down * first.spacing[1]
    affine[:3, 2] = step
    affine[:3, 3] = first.position
    affine = np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine  # DICOM's world is LPS+
    check_affine(affine, folder)
    return slices, affine


def header_texts(folder: Path) -> set[str]:
    """Return what headers of slices in a folder and below say of patient, study and series.

    What cannot be read says nothing.
    """
    found: set[str] = set()
    for path in sorted(item for item in folder.rglob("*") if item.is_file() and is_dicom(item)):
        with suppress(DataError):
            item = read_header(path)
            found |= {item.series, item.description, item.protocol, item.study, item.patient}
    return found - {""}


def check_count(folder: Path, series: str | None = None) -> None:
    """Check that a folder holds as many slices as their headers say that the series has, where they say so.

    Args:
        folder: of the slices.
        series: as of :func:`read_dicom`.

    Raises:
        DataError: there are fewer, or a file cannot be read.
    """
    slices = [item for item in map(read_header, dicom_files(folder)) if is_chosen(item, series)]
    stated = max((item.stated for item in slices), default=0)
    if len(slices) < stated:
        raise DataError(
            f"{folder}: {len(slices)} of the {stated} slices of the series that the headers state; "
            "the others are still to come, or to be exported"
        )


def is_chosen(item: Slice, pattern: str | None) -> bool:
    """Return whether a slice is of a series whose description or protocol name matches; all do where None."""
    if pattern is None:
        return True
    return any(fnmatchcase(fold(text), fold(pattern)) for text in (item.description, item.protocol) if text)


def in_words(slices: Sequence[Slice]) -> str:
    """Return description, number, size and orientation of each series among slices."""
    series: dict[str, list[Slice]] = {}
    for item in slices:
        series.setdefault(item.series, []).append(item)
    texts = []
    for items in sorted(series.values(), key=lambda found: (natural(found[0].number), found[0].description)):
        first = items[0]
        name = repr(first.description or first.protocol or "no description")
        number = f"number {first.number}, " if first.number else ""
        size = " x ".join(str(count) for count in (*first.size, len(items)))
        texts.append(f"{name} ({number}{size} voxels, {first.plane})")
    return ", ".join(texts)


@dataclass(frozen=True)
class Slice:
    """Where one file's slice lies, LPS+ in mm, and the series, study and patient that it belongs to.

    ``stated`` is the number of files that the series has by this one's header, 0 where it says nothing;
    ``pixels`` the library's number for the type that holds its voxels after slope and intercept.
    """

    path: Path
    series: str
    number: str
    description: str
    protocol: str
    study: str
    patient: str
    size: tuple[int, ...]
    spacing: tuple[float, float]
    position: Doubles
    across: Doubles
    down: Doubles
    thickness: float
    stated: int = 0
    pixels: int = 0

    @property
    def normal(self) -> Doubles:
        """The direction at right angles to the slice."""
        return np.cross(self.across, self.down)

    @property
    def plane(self) -> str:
        """The plane of the slice in words."""
        along = np.abs(self.normal)
        name = ("sagittal", "coronal", "axial")[int(along.argmax())]
        return name if along.max() > _STRAIGHT else f"oblique, nearest {name}"


def read_header(path: Path) -> Slice:
    """Read where a slice lies and what it belongs to, no voxels.

    Raises:
        DataError: it cannot be read, holds several frames or colours, or cannot be placed.
    """
    import SimpleITK as sitk  # noqa: N813 - its usual name

    reader = sitk.ImageFileReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileName(str(path))
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise DataError(f"{path}: cannot be read as DICOM: {_last_line(error)}") from error
    frames = int(_number(reader, _FRAMES, 1.0))
    if frames > 1:
        raise DataError(
            f"{path}: a multi-frame image of {frames} frames; expected one slice per file; convert it to "
            "NIfTI with dcm2niix"
        )
    if reader.GetNumberOfComponents() != 1:
        raise DataError(
            f"{path}: expected grey values, got {reader.GetNumberOfComponents()} colour channels per pixel"
        )
    position, direction = _numbers(reader, _POSITION), _numbers(reader, _ORIENTATION)
    if len(position) != 3 or len(direction) != 6:
        raise DataError(f"{path}: gives no image position and orientation, so it cannot be placed")
    steps = reader.GetSpacing()
    return Slice(
        path,
        _text(reader, _SERIES),
        _text(reader, _NUMBER),
        _text(reader, _DESCRIPTION),
        _text(reader, _PROTOCOL),
        _text(reader, _STUDY),
        _text(reader, _PATIENT),
        tuple(reader.GetSize()[:2]),
        (float(steps[0]), float(steps[1])),
        position,
        direction[:3],
        direction[3:],
        _number(reader, _STEP, _number(reader, _THICKNESS, 1.0)),
        int(_number(reader, _RELATED, 0.0)),
        reader.GetPixelID(),
    )


def _check_one_series(slices: Sequence[Slice], folder: Path) -> None:
    if not slices:
        raise DataError(f"{folder}: no DICOM file in it")
    count = len({item.series for item in slices})
    if count > 1:
        raise DataError(
            f"{folder}: {count} series in one folder: {in_words(slices)}; choose one by a pattern for its "
            "description, site.files.series, or give each its own folder"
        )
    first = slices[0]
    for item in slices:
        if item.size != first.size or not np.allclose(item.spacing, first.spacing, rtol=1e-3):
            raise DataError(
                f"{item.path}: {item.size} pixels of {item.spacing} mm; other slices of the series have "
                f"{first.size} of {first.spacing} mm; is it mixed with a localiser?"
            )
        apart = max(np.abs(item.across - first.across).max(), np.abs(item.down - first.down).max())
        if apart > 1e-3:
            raise DataError(
                f"{item.path}: is oriented in another direction than other slices of the series; "
                "is it mixed with a localiser?"
            )


def _in_order(slices: Sequence[Slice], folder: Path) -> tuple[list[Slice], Doubles]:
    """Return the slices sorted by position and the step from one to the next, (3,) in mm.

    Raises:
        DataError: they do not lie evenly, one straight behind the other.
    """
    normal = slices[0].normal
    ordered = sorted(slices, key=lambda item: float(item.position @ normal))
    if len(ordered) == 1:
        return ordered, normal * ordered[0].thickness
    positions = np.array([item.position for item in ordered])
    along = positions @ normal
    steps = np.diff(along)
    usual = float(np.median(steps))
    for index in np.flatnonzero(steps < 0.01)[:1]:
        pair = f"{ordered[index].path.name} and {ordered[index + 1].path.name}"
        raise DataError(
            f"{folder}: two slices at {along[index]:.2f} mm along the normal ({pair}); expected one"
        )
    for index, step in enumerate(steps):
        where = f"between {along[index]:.2f} and {along[index + 1]:.2f} mm along its normal"
        if step > 1.5 * usual:
            count = round(step / usual) - 1
            missing = f"{count} slice{'s' if count > 1 else ''} missing"
            raise DataError(
                f"{folder}: {missing} {where}: a gap of {step:.2f} mm in a "
                f"stack of {usual:.2f} mm; export the whole series"
            )
        if abs(step - usual) > UNEVEN * usual:
            raise DataError(
                f"{folder}: uneven slices: a step of {step:.2f} mm {where}, usually {usual:.2f} mm"
            )
    step = (positions[-1] - positions[0]) / (len(positions) - 1)
    tilt = float(np.degrees(np.arccos(np.clip(step @ normal / np.linalg.norm(step), -1, 1))))
    if tilt > MAX_TILT:
        raise DataError(
            f"{folder}: the stack is tilted by {tilt:.1f} degrees against its slices (gantry tilt); resample "
            "it to a straight grid first, with dcm2niix for example"
        )
    return ordered, step


def _text(reader: object, key: str) -> str:
    has, get = reader.HasMetaDataKey, reader.GetMetaData  # type: ignore[attr-defined]
    return str(get(key)).strip() if has(key) else ""


def _numbers(reader: object, key: str) -> Doubles:
    try:
        return np.array([float(part) for part in _text(reader, key).split("\\")], np.float64)
    except ValueError:
        return np.zeros(0)


def _number(reader: object, key: str, default: float) -> float:
    found = _numbers(reader, key)
    return float(found[0]) if len(found) and np.isfinite(found[0]) and found[0] > 0 else default


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1].strip()
