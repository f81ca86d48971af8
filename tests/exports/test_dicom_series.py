"""A series that a run reads carries its mask as a DICOM Segmentation; what does not fit is refused."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pydicom
import pytest
import SimpleITK as sitk  # noqa: N813
import small_site as small
from exported import replace_mask, voxels, write_series

from tesla_med.actions.export import export
from tesla_med.errors import DataError

SHAPE = (24, 20, 6)
TILT = (3 * np.tan(np.radians(0.05)), 0, 0)
JITTER = np.array([0, 0.02, -0.02, 0.02, 0, 0.01])
MADE = {
    "plain": {},
    "downwards": {"step": -3.0},
    "tilted": {"drift": TILT},
    "uneven": {"places": [3 * index + more for index, more in enumerate(JITTER)]},
    "rounded": {"places": [round(0.625 * index, 2) for index in range(6)], "step": 0.625},
    "four digits": {"direction": (0.9446, 0.1428, 0.2955, -0.2045, 0.9603, 0.1898)},
    "single": {},
    "bare": {},
    "compressed": {},
    "words": {},
    "two series": {"SeriesDescription": "T2"},
}
GONE = ("AccessionNumber", "StudyID", "StudyTime", "StudyDate", "PatientSex", "PatientBirthDate", "PatientID")


WORDS = {"PatientBirthDate": "1950", "StudyDate": "REMOVED", "StudyTime": "REMOVED", "PatientSex": "U"}
"""What de-identification writes where the standard wants a date, a time or a letter."""


def compress(paths):
    """Write voxels as JPEG Lossless, which pydicom alone cannot read and GDCM can."""
    for path in paths:
        other = path.with_name(f"{path.name}.dcm")
        writer = sitk.ImageFileWriter()
        writer.SetFileName(str(other))
        writer.SetImageIO("GDCMImageIO")
        writer.UseCompressionOn()
        writer.SetCompressor("JPEG")
        writer.KeepOriginalImageUIDOn()
        writer.Execute(sitk.ReadImage(str(path)))
        item, packed = pydicom.dcmread(path), pydicom.dcmread(other)
        item.PixelData, item.file_meta.TransferSyntaxUID = (
            packed.PixelData,
            packed.file_meta.TransferSyntaxUID,
        )
        item["PixelData"].is_undefined_length = True
        other.unlink()
        item.save_as(path)
    assert item.file_meta.TransferSyntaxUID == "1.2.840.10008.1.2.4.70"


def write_all(folder):
    for seed, (name, fields) in enumerate(MADE.items()):
        array = voxels((*SHAPE[:2], 1 if name == "single" else 6), seed)
        paths = write_series(folder / name, array, **{"SeriesDescription": "T2", **fields})
        if name == "compressed":
            compress(paths)
        for path in paths if name == "bare" else ():
            item = pydicom.dcmread(path)
            for keyword in GONE:
                delattr(item, keyword)
            item.save_as(path)
        for path in paths if name == "words" else ():
            item = pydicom.dcmread(path)
            for keyword, word in WORDS.items():
                item[keyword]._value = word
            item.save_as(path)
        if name == "two series":  # on the same grid: nothing but the description tells which it was
            for path in paths:
                path.rename(path.with_name(f"A{path.name}"))
            write_series(folder / name, voxels(SHAPE, 99), number=2, SeriesDescription="ADC")


@pytest.fixture(scope="module")
def finished(one_thread, tmp_path_factory):
    folder = tmp_path_factory.mktemp("series")
    write_all(folder / "dicom")
    weights = small.train_weights(folder / "weights")
    site = small.site(files=small.Files(image=("*",), masks=(), series="t2*"))
    result = small.run(folder / "dicom", weights, folder / "run", method="source", site=site)
    assert [item.reason for item in result.results] == [""] * len(MADE)
    for seed, name in enumerate(MADE):
        replace_mask(folder / "run", name, seed)
    export(folder / "run", "dicom-seg", dicom=folder / "dicom", out=folder / "seg")
    return folder


@pytest.mark.parametrize("name", MADE)
def test_each_frame_has_the_mask_of_its_slice(finished, name):
    said = json.loads((finished / "seg" / "export.json").read_text(encoding="utf-8"))
    assert said["skipped"].get(name, "") == ""
    item = pydicom.dcmread(finished / "seg" / f"{name}_seg.dcm")
    mask = nib.load(finished / "run" / "masks" / f"{name}_mask.nii.gz")
    values, to_voxel = np.asarray(mask.dataobj), np.linalg.inv(mask.affine) @ np.diag([-1.0, -1, 1, 1])
    headers = [
        pydicom.dcmread(path, stop_before_pixels=True) for path in (finished / "dicom" / name).iterdir()
    ]
    slices = {header.SOPInstanceUID: header for header in headers if header.SeriesDescription == "T2"}
    pixels = item.pixel_array.reshape(-1, item.Rows, item.Columns)
    groups = item.PerFrameFunctionalGroupsSequence
    assert len(pixels) == len(groups) == values.shape[2] == len(slices)
    for frame, group in zip(pixels, groups, strict=True):
        below = slices.pop(group.DerivationImageSequence[0].SourceImageSequence[0].ReferencedSOPInstanceUID)
        position = np.array(group.PlanePositionSequence[0].ImagePositionPatient, float)
        assert np.allclose(position, np.array(below.ImagePositionPatient, float), atol=1e-9)
        voxel = to_voxel @ [*position, 1]
        assert np.abs(voxel - np.rint(voxel)).max() < 0.05
        assert np.array_equal(frame, values[:, :, round(voxel[2])].T)
    assert not slices
    assert item.ReferencedSeriesSequence[0].SeriesInstanceUID == below.SeriesInstanceUID
    measures = item.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    assert measures.SpacingBetweenSlices == pytest.approx(0.625 if name == "rounded" else 3.0, rel=1e-3)
    assert measures.SliceThickness > 0


def test_what_is_not_known_of_a_patient_stays_empty(finished):
    item = pydicom.dcmread(finished / "seg" / "bare_seg.dcm")
    assert [item[keyword].value or "" for keyword in GONE] == [""] * len(GONE)


def test_what_is_no_date_and_no_sex_becomes_empty(finished):
    item, plain = (pydicom.dcmread(finished / "seg" / f"{name}_seg.dcm") for name in ("words", "plain"))
    assert [item[keyword].value or "" for keyword in WORDS] == [""] * len(WORDS)
    assert [plain[keyword].value for keyword in WORDS] == ["19500101", "20240101", "120000", "M"]
    assert item.PatientID == plain.PatientID == "identifier-4711"


def test_names_are_replaced_on_them_too(finished, tmp_path):
    more = {"dicom": finished / "dicom", "anonymise": True, "key": tmp_path / "key.csv"}
    result = export(finished / "run", "dicom-seg", out=tmp_path / "out", **more)
    assert len(result.cases) == len(MADE)
    for path in result.files:
        assert b"Quimby" not in path.read_bytes()


def refusal(finished, tmp_path):
    with pytest.raises(DataError) as error:
        export(finished / "run", "dicom-seg", dicom=tmp_path / "dicom", out=tmp_path / "out", cases=["plain"])
    return str(error.value)


def test_another_series_than_the_run_chose_is_refused(finished, tmp_path):
    write_series(tmp_path / "dicom" / "plain", voxels(SHAPE, 0), SeriesDescription="ADC")
    assert "plain: " in (said := refusal(finished, tmp_path))
    assert "no series matches site.files.series 't2*'; there are: 'ADC'" in said


def test_a_multi_frame_file_is_refused_in_a_sentence(finished, tmp_path):
    frames = np.ascontiguousarray(voxels(SHAPE, 0).T).tobytes()
    write_series(tmp_path / "dicom" / "plain", voxels((24, 20, 1), 0), NumberOfFrames=6, PixelData=frames)
    assert "plain: " in (said := refusal(finished, tmp_path))
    assert "is a multi-frame image; expected one slice per file; split it first" in said


@pytest.mark.parametrize(
    "change", [{"spacing": (1.0, 1.6)}, {"step": 3.2}, {"direction": (0, 1, 0, -1, 0, 0)}]
)
def test_a_grid_that_differs_is_refused_with_both(finished, tmp_path, change):
    write_series(tmp_path / "dicom" / "plain", voxels(SHAPE, 0), SeriesDescription="T2", **change)
    said = refusal(finished, tmp_path)
    assert "plain: the mask does not lie on the grid of" in said
    assert "the mask has shape" in said
    assert "the series" in said.partition("the mask has shape")[2]
    assert "give the series that was adapted to" in said


@pytest.mark.parametrize("given", [".", "Nowhere", "Nowhere/plain"])
def test_series_are_found_in_the_folder_of_their_site(finished, tmp_path, given):
    write_series(tmp_path / "dicom" / "Nowhere" / "plain", voxels(SHAPE, 0), SeriesDescription="T2")
    more = {"dicom": tmp_path / "dicom" / given, "out": tmp_path / "out", "cases": ["plain"]}
    assert export(finished / "run", "dicom-seg", **more).skipped == {}


def test_the_folder_of_the_site_comes_first_and_the_other_where_it_has_no_such_case(finished, tmp_path):
    elsewhere = {"SeriesDescription": "T2", "origin": (0.0, 0.0, 0.0)}
    write_series(tmp_path / "dicom" / "plain", voxels(SHAPE, 0), **elsewhere)
    write_series(tmp_path / "dicom" / "Nowhere" / "plain", voxels(SHAPE, 0), SeriesDescription="T2")
    write_series(tmp_path / "dicom" / "tilted", voxels(SHAPE, 1), SeriesDescription="T2", **MADE["tilted"])
    more = {"dicom": tmp_path / "dicom", "cases": ["plain", "tilted", "bare"]}
    result = export(finished / "run", "dicom-seg", out=tmp_path / "out", **more)
    assert result.cases == ("plain", "tilted")
    places = (str(tmp_path / "dicom" / where / "bare") for where in ("Nowhere", ""))
    assert result.skipped == {"bare": f"no DICOM series in {' or '.join(places)}"}


def test_pixels_whose_size_is_nowhere_are_refused(finished, tmp_path):
    for path in write_series(
        tmp_path / "dicom" / "plain", voxels(SHAPE, 0), spacing=(1.0, 1.0), SeriesDescription="T2"
    ):
        item = pydicom.dcmread(path)
        del item.PixelSpacing
        item.save_as(path)
    assert "gives PixelSpacing nowhere" in refusal(finished, tmp_path)


def test_slices_of_two_studies_are_refused(finished, tmp_path):
    paths = write_series(tmp_path / "dicom" / "plain", voxels(SHAPE, 0), SeriesDescription="T2")
    item = pydicom.dcmread(paths[0])
    item.StudyInstanceUID = "1.2.3"
    item.save_as(paths[0])
    assert "have different StudyInstanceUIDs; expected one for all" in refusal(finished, tmp_path)
