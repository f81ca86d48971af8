"""DICOM Segmentation objects by highdicom, which viewers lay over the series that they belong to."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar

from tesla_med.config.models import LabelClass
from tesla_med.errors import ConfigError, DataError
from tesla_med.exports.base import EXPORTS, NOTICE, Export, Finished, rgb
from tesla_med.exports.dicom_source import frames_on, slices_under
from tesla_med.io.files import atomic_path, sha256

MAKER = "tesla-med"
PRIVATE = "99TESLAMED"
"""Coding scheme of classes without a SNOMED CT concept."""
SERIES_NUMBER = 900
TEXTS = ("LO", "LT", "PN", "SH", "ST", "UC", "UT")
"""Value representations whose characters a character set has to hold."""
UNICODE = "ISO_IR 192"


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
        slices, grid = slices_under(item, item.series)
        frames = frames_on(item, grid)
        if item.secret:
            slices = [_nameless(one, item.name, item.secret) for one in slices]
        path = out / f"{item.name}_seg.dcm"
        dataset = _segmentation(item, slices, frames)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary:
            dataset.save_as(temporary)
        return [path]


KEPT = (
    *("SOPClassUID", "Modality", "ImageType", "Rows", "Columns", "PixelSpacing", "SliceThickness"),
    *("SpacingBetweenSlices", "ImagePositionPatient", "ImageOrientationPatient", "InstanceNumber"),
    *("SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit"),
    *("PixelRepresentation", "RescaleSlope", "RescaleIntercept"),
)
"""What a slice keeps where names are replaced: how voxels are stored and where they lie."""
REMADE = ("SOPInstanceUID", "SeriesInstanceUID", "StudyInstanceUID", "FrameOfReferenceUID")
BLANK = ("PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber")


def _nameless(one: Any, name: str, secret: str) -> Any:
    """Return a slice of which only its place is left, under a pseudonym and other identifiers."""
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
            omit_empty_frames=bool(frames.any()),
            specific_character_set=None,  # that of the series may not hold the names of classes
        )
    dataset.SeriesDescription = f"{MAKER} {item.method}: research use only"[:64]
    if any(not str(element.value).isascii() for element in dataset.iterall() if element.VR in TEXTS):
        dataset.SpecificCharacterSet = UNICODE
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
