"""DICOM Segmentation objects by highdicom, which viewers lay over the series that they belong to."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from tesla_med.config.models import LabelClass
from tesla_med.errors import ConfigError, DataError, GeometryError
from tesla_med.exports.base import EXPORTS, NOTICE, Export, Finished, rgb
from tesla_med.io.dicom import dicom_files
from tesla_med.io.files import atomic_path, sha256
from tesla_med.io.masks import check_labels

MAKER = "tesla-med"
PRIVATE = "99TESLAMED"
"""Coding scheme of classes without a SNOMED CT concept."""
TOLERANCE = 1e-3
"""mm by which positions of mask and series may differ."""
SERIES_NUMBER = 900


@EXPORTS.register("dicom-seg")
class DicomSeg(Export):
    """One binary segment for each foreground class, on the grid of the series, with its patient and study.

    Where names are replaced the patient is the pseudonym, and study, series, slices and frame of reference
    have identifiers of their own, the same in every export with one key file.
    """

    summary = "DICOM Segmentation object for each case, on the grid of its DICOM series"
    needs_series: ClassVar[bool] = True

    def check(self) -> None:
        """Check that highdicom is there.

        Raises:
            ConfigError: it is not.
        """
        try:
            import highdicom  # noqa: F401
        except ImportError:
            raise ConfigError(
                "export to dicom-seg needs highdicom and pydicom: pip install 'tesla-med[dicom]'"
            ) from None

    def write(self, item: Finished, out: Path) -> list[Path]:
        """Write ``<case>_seg.dcm``; see :meth:`Export.write`."""
        if item.series is None:
            raise DataError(f"{item.name}: no DICOM series is known for it")
        slices = _slices(item.series)
        if item.secret:
            slices = [_nameless(one, item.name, item.secret) for one in slices]
        frames = _frames(item, slices)
        path = out / f"{item.name}_seg.dcm"
        dataset = _segmentation(item, slices, frames)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            dataset.save_as(temporary)
        return [path]


def _slices(folder: Path) -> list[Any]:
    import pydicom

    paths = dicom_files(folder)
    if not paths:
        raise DataError(f"{folder}: holds no DICOM file")
    slices = [pydicom.dcmread(path) for path in paths]
    if not all(item.get("FrameOfReferenceUID") for item in slices):
        raise DataError(
            f"{folder}: its slices have no FrameOfReferenceUID, without which nothing can be laid over them"
        )
    return slices


KEPT = (
    *("SOPClassUID", "Modality", "ImageType", "Rows", "Columns", "PixelSpacing", "SliceThickness"),
    *("SpacingBetweenSlices", "ImagePositionPatient", "ImageOrientationPatient", "InstanceNumber"),
    *("SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit"),
    *("PixelRepresentation", "RescaleSlope", "RescaleIntercept", "PixelData"),
)
"""What a slice keeps where names are replaced: its voxels and where they lie."""
REMADE = ("SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "FrameOfReferenceUID")
BLANK = ("PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber")


def _nameless(one: Any, name: str, secret: str) -> Any:
    """Return a slice of which only voxels and place are left, under a pseudonym and other identifiers."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import generate_uid

    result = Dataset()
    for keyword in KEPT:
        if keyword in one:
            result[keyword] = one[keyword]
    for keyword in REMADE:
        setattr(result, keyword, generate_uid(entropy_srcs=[secret, str(one.get(keyword, ""))]))
    for keyword in (*BLANK, "ReferringPhysicianName"):
        setattr(result, keyword, "")
    result.PatientName = result.PatientID = name
    result.SeriesNumber = 1
    result.file_meta = FileMetaDataset()
    result.file_meta.MediaStorageSOPClassUID = result.SOPClassUID
    result.file_meta.MediaStorageSOPInstanceUID = result.SOPInstanceUID
    result.file_meta.TransferSyntaxUID = one.file_meta.TransferSyntaxUID
    return result


def _frames(item: Finished, slices: list[Any]) -> Any:
    """Return the mask as a volume of indices of the foreground classes, in the order of the series' frames.

    Raises:
        DataError: the mask holds a label that is no class.
        GeometryError: the grids of mask and series differ.
    """
    import highdicom

    values, affine = item.read()
    check_labels(values, [entry.value for entry in item.classes], f"{item.name}: the mask {item.mask}")
    indices = np.zeros(values.shape, np.uint8)
    for index, entry in enumerate(item.foreground, 1):
        indices[values == entry.value] = index
    try:
        series = highdicom.get_volume_from_series(slices)
        own = highdicom.Volume(
            indices,
            np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine,
            "PATIENT",
            frame_of_reference_uid=series.frame_of_reference_uid,
        )
        frames = own.match_geometry(series.get_geometry(), tol=TOLERANCE)
    except (RuntimeError, ValueError) as error:
        text = f"{item.name}: the mask does not lie on the grid of {item.series} ({error})"
        raise GeometryError(text) from None
    if sorted(values.shape) != sorted(series.spatial_shape):
        raise GeometryError(
            f"{item.name}: the mask has {' x '.join(map(str, values.shape))} voxels, the series {item.series}"
            f" {' x '.join(map(str, series.spatial_shape))}"
        )
    apart = _corners_apart(own, series)
    if apart > TOLERANCE:  # whole voxels, which matching pads and crops away
        raise GeometryError(
            f"{item.name}: the mask does not lie on the grid of {item.series}: corners are {apart:.2f} mm "
            "apart"
        )
    return frames


def _corners_apart(one: Any, other: Any) -> float:
    """Return in mm how far a corner of one volume may be from the nearest corner of another."""
    ours, theirs = (
        np.array([*product(*((0, side - 1) for side in item.spatial_shape))]) @ item.affine[:3, :3].T
        + item.affine[:3, 3]
        for item in (one, other)
    )
    return float(np.linalg.norm(ours[:, None] - theirs[None], axis=2).min(axis=1).max())


def _segmentation(item: Finished, slices: list[Any], frames: Any) -> Any:
    import highdicom
    from pydicom.sr.codedict import codes
    from pydicom.uid import generate_uid

    told = (item.secret, item.method, item.version, item.weights, repr(item.foreground), str(item.corrected))
    source = [sha256(item.mask), item.series_sha256, MAKER, *told]
    algorithm = highdicom.AlgorithmIdentificationSequence(
        name=f"{MAKER} {item.method}"[:64],
        family=codes.DCM.ArtificialIntelligence,
        version=item.version[:64],
        parameters={"weights_sha256": item.weights} if item.weights else None,
    )
    kind = "SEMIAUTOMATIC" if item.corrected else "AUTOMATIC"
    described = [_described(index, entry, algorithm, kind) for index, entry in enumerate(item.foreground, 1)]
    with warnings.catch_warnings():  # of empty frames, which are left out, and of optional attributes
        warnings.simplefilter("ignore")
        dataset: Any = highdicom.seg.Segmentation(
            source_images=slices,
            pixel_array=frames,
            segmentation_type="BINARY",
            segment_descriptions=described,
            series_instance_uid=generate_uid(entropy_srcs=[*source, "series"]),
            series_number=SERIES_NUMBER,
            sop_instance_uid=generate_uid(entropy_srcs=[*source, "instance"]),
            instance_number=1,
            manufacturer=MAKER,
            manufacturer_model_name=MAKER,
            software_versions=item.version,
            device_serial_number="0",
            content_description=NOTICE,
            content_label="SEGMENTATION",
            omit_empty_frames=bool(np.any(frames.array)),
        )
    dataset.SeriesDescription = f"{MAKER} {item.method}: research use only"[:64]
    return dataset


def _described(index: int, entry: LabelClass, algorithm: Any, made: str) -> Any:
    import highdicom
    from pydicom.sr.codedict import codes

    if entry.snomed:
        kind = highdicom.sr.CodedConcept(entry.snomed, "SCT", entry.name[:64])
    else:
        kind = highdicom.sr.CodedConcept(f"CLASS{entry.value}", PRIVATE, entry.name[:64])
    return highdicom.seg.SegmentDescription(
        segment_number=index,
        segment_label=entry.name[:64],
        segmented_property_category=codes.SCT.AnatomicalStructure,
        segmented_property_type=kind,
        algorithm_type=made,
        algorithm_identification=algorithm,
        display_color=highdicom.color.CIELabColor.from_rgb(*rgb(entry.color)),
    )
