"""What lies beside the slices of a patient in an archive is left out with the reason, and is no case."""

import numpy as np
import pydicom
import pytest
import small_site as small
from dicom_files import write_series
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    generate_uid,
)

from tesla_med.errors import DataError
from tesla_med.io.cases import find_cases
from tesla_med.io.dicom import check_count, dicom_files
from tesla_med.io.dicom_kinds import no_image
from tesla_med.io.volumes import read_volume

STORAGE = "1.2.840.10008.5.1.4.1.1"
KINDS = {
    "88.11": ("SR", "a structured report"),
    "88.67": ("SR", "a structured report"),
    "88.59": ("KO", "a selection of key objects"),
    "11.1": ("PR", "a presentation state"),
    "66.4": ("SEG", "a segmentation"),
    "66.1": ("REG", "a registration"),
    "481.2": ("RTDOSE", "a radiotherapy dose"),
    "481.3": ("RTSTRUCT", "a radiotherapy structure set"),
    "481.5": ("RTPLAN", "a radiotherapy plan"),
    "104.1": ("DOC", "a document"),
}
SHAPE = (20, 16, 5)


def values():
    return np.random.default_rng(0).integers(0, 900, SHAPE).astype(np.uint16)


def write_object(path, ending, modality, syntax=ExplicitVRLittleEndian, **fields):
    path.parent.mkdir(parents=True, exist_ok=True)
    item = Dataset()
    item.file_meta = FileMetaDataset()
    item.file_meta.MediaStorageSOPClassUID = item.SOPClassUID = f"{STORAGE}.{ending}"
    item.file_meta.MediaStorageSOPInstanceUID = item.SOPInstanceUID = generate_uid()
    item.file_meta.TransferSyntaxUID = syntax
    item.Modality, item.PatientName, item.PatientID = modality, "Quimby^Zelda", "identifier-4711"
    item.StudyInstanceUID, item.SeriesInstanceUID = generate_uid(entropy_srcs=["study"]), generate_uid()
    for name, value in fields.items():
        setattr(item, name, value)
    item.save_as(path, enforce_file_format=True)
    return path


@pytest.mark.parametrize(
    "syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian, DeflatedExplicitVRLittleEndian]
)
@pytest.mark.parametrize("ending", KINDS)
def test_the_kind_is_told_by_the_storage_class(tmp_path, ending, syntax):
    path = write_object(tmp_path / "x", ending, KINDS[ending][0], syntax)
    assert no_image(path) == f"DICOM, but {KINDS[ending][1]} and no slice of an image"


@pytest.mark.parametrize("ending", ["2", "4", "4.1", "7", "128", "20", "2.1", "30"])
def test_images_stay_images(tmp_path, ending):
    assert no_image(write_object(tmp_path / "x", ending, "MR")) == ""


def test_files_without_a_class_stay_for_reading_to_judge(tmp_path):
    (tmp_path / "a").write_bytes(bytes(128) + b"DICM")
    (tmp_path / "b").write_bytes(bytes(128) + b"DICM" + b"\x02\x00\x02\x00UI\xff\xff")
    (tmp_path / "c").write_text("x")
    for name in "abcd":
        assert no_image(tmp_path / name) == ""


@pytest.mark.parametrize("where", ["", "other/"])
def test_objects_among_a_patients_files_are_no_cases(tmp_path, where):
    write_series(tmp_path / "P1", values(), NumberOfSeriesRelatedInstances=5)
    for ending, (modality, _) in KINDS.items():
        fields = {"NumberOfFrames": 4} if modality in ("SEG", "RTDOSE") else {}
        write_object(tmp_path / "P1" / f"{where}{ending}.dcm", ending, modality, **fields)
    found = find_cases(tmp_path, small.site())
    assert [(case.name, case.problem) for case in found.cases] == [("P1", "")]
    assert sorted(why for _, why in found.skipped) == sorted(
        f"DICOM, but {text} and no slice of an image" for _, text in KINDS.values()
    )
    assert np.array_equal(read_volume(tmp_path / "P1").array[0], values())
    assert len(dicom_files(tmp_path / "P1")) == 5
    check_count(tmp_path / "P1")


def test_one_is_chosen_among_series_and_objects(tmp_path):
    for number, name in enumerate(("T2", "ADC"), 1):
        write_series(tmp_path / "P1" / name, values(), number=number, SeriesDescription=name)
        write_object(
            tmp_path / "P1" / name / "seg.dcm", "66.4", "SEG", SeriesDescription=name, NumberOfFrames=5
        )
    site = small.site(files=small.Files(image=("*",), masks=(), series="t2"))
    found = find_cases(tmp_path, site)
    assert [(case.name, case.problem) for case in found.cases] == [("P1/T2", "")]


def test_objects_alone_are_said_to_be_none_of_the_images(tmp_path):
    write_object(tmp_path / "P1" / "report.dcm", "88.11", "SR")
    with pytest.raises(
        DataError, match=r"report\.dcm is DICOM, but a structured report and no slice"
    ) as error:
        find_cases(tmp_path, small.site())
    assert "none of these has the mark" not in str(error.value)


def test_a_run_goes_past_them(one_thread, tmp_path):
    weights = small.train_weights(tmp_path / "small")
    write_series(tmp_path / "dicom" / "P1", values())
    write_object(tmp_path / "dicom" / "P1" / "report", "88.11", "SR")
    write_object(tmp_path / "dicom" / "P1" / "plan" / "x", "481.5", "RTPLAN")
    result = small.run(tmp_path / "dicom", weights, tmp_path / "out", method="source")
    assert [(item.case, item.reason) for item in result.results] == [("P1", "")]
    assert pydicom.dcmread(tmp_path / "dicom" / "P1" / "report").Modality == "SR"
