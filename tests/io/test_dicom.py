"""Folders of DICOM slices: placed by geometry, or refused with the reason."""

import shutil

import nibabel as nib
import numpy as np
import pydicom
import pytest
import small_site as small
from dicom_files import write_series

from tesla_med.errors import DataError
from tesla_med.io.cases import find_cases
from tesla_med.io.dicom import dicom_files
from tesla_med.io.files import sha256
from tesla_med.io.volumes import read_volume

SHAPE = (20, 16, 6)
SAGITTAL = (0.0, 1.0, 0.0, 0.0, 0.0, -1.0)


def values(shape=SHAPE):
    return np.random.default_rng(0).integers(0, 900, shape).astype(np.uint16)


@pytest.mark.parametrize("direction", [(1, 0, 0, 0, 1, 0), SAGITTAL, (0.8, 0.6, 0, -0.6, 0.8, 0)])
def test_voxels_and_places(tmp_path, direction):
    array = values()
    write_series(tmp_path, array, direction=direction)
    volume = read_volume(tmp_path)
    assert np.array_equal(volume.array[0], array)
    assert volume.spacing == pytest.approx((1.0, 1.5, 3.0))
    across, down = np.array(direction[:3]), np.array(direction[3:])
    for i, j, k in ((0, 0, 0), (19, 0, 0), (0, 15, 0), (3, 4, 5)):
        lps = np.array([-10, 20, 5]) + i * across + 1.5 * j * down + 3 * k * np.cross(across, down)
        assert (volume.affine @ [i, j, k, 1])[:3] == pytest.approx(lps * [-1, -1, 1])


def test_rescale_slope_of_each_slice(tmp_path):
    array = values()
    write_series(tmp_path, array, RescaleSlope=2, RescaleIntercept=-100)
    assert np.array_equal(read_volume(tmp_path).array[0], 2.0 * array - 100)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("slopes", "intercepts"),
    [
        ((1, 0.01, 0.02, 0.3, 2, 1), (0,) * 6),
        ((1, 20, 30, 40, 50, 900), (0,) * 6),
        ((1,) * 6, (0, -1000, -7.5, 300, 100000, 0)),
        ((0.3, 1, 1, 2, 1, 0.01), (0, 0, -5, 0, 0.25, 1)),
        ((None, 0.01, 0.01, 2, 1, 1), (None, 0, -3, 0, 0, 0)),
    ],
)
def test_slope_and_intercept_that_vary_between_slices(tmp_path, slopes, intercepts, signed):
    array = values()
    paths = write_series(tmp_path, array, PixelRepresentation=int(signed))
    for path, slope, intercept in zip(paths, slopes, intercepts, strict=True):
        item = pydicom.dcmread(path)
        if slope is not None:
            item.RescaleSlope, item.RescaleIntercept = slope, intercept
        item.save_as(path)
    expected = array * np.array([slope or 1 for slope in slopes]) + [value or 0 for value in intercepts]
    assert np.allclose(read_volume(tmp_path).array[0], expected, rtol=1e-6, atol=1e-6)


def test_one_slice(tmp_path):
    write_series(tmp_path, values((20, 16, 1)), step=4.0)
    volume = read_volume(tmp_path)
    assert volume.shape == (20, 16, 1)
    assert volume.spacing == pytest.approx((1.0, 1.5, 4.0))


@pytest.mark.parametrize(
    ("missing", "place"), [(2, "between 8.00 and 14.00"), (5, "between 17.00 and 23.00")]
)
def test_a_missing_slice(tmp_path, missing, place):
    paths = write_series(tmp_path, values((16, 12, 10)))
    assert read_volume(tmp_path).shape == (16, 12, 10)
    paths[missing].unlink()
    with pytest.raises(DataError, match=f"1 slice missing {place} mm.*gap of 6.00 mm.*stack of 3.00 mm"):
        read_volume(tmp_path)


def test_tilt(tmp_path):
    write_series(tmp_path, values(), drift=(0, 0.8, 0))
    with pytest.raises(DataError, match=r"tilted by 14\.9 degrees"):
        read_volume(tmp_path)


def test_a_doubled_place(tmp_path):
    write_series(tmp_path, values(), places=[0, 3, 3, 6, 9, 12])
    with pytest.raises(DataError, match=r"two slices at .*IM0998 and IM0999"):
        read_volume(tmp_path)


@pytest.mark.parametrize("places", [[0, 5, 5, 5, 10, 10], [0, 0, 0, 0, 0, 5]])
def test_more_doubled_places_than_others(tmp_path, places):
    write_series(tmp_path, values(), places=places)
    with pytest.raises(DataError, match="two slices at"):
        read_volume(tmp_path)


def test_the_index_of_a_disc_is_no_case(tmp_path):
    paths = write_series(tmp_path / "IMAGES" / "s1", values())
    shutil.copy(paths[0], tmp_path / "DICOMDIR")
    found = find_cases(tmp_path, small.site())
    assert [case.name for case in found.cases] == ["IMAGES/s1"]
    assert [path.name for path, _ in found.skipped] == ["DICOMDIR"]


def test_series_below_a_root_of_masks_are_no_cases(tmp_path):
    write_series(tmp_path / "images" / "p1", values())
    write_series(tmp_path / "labels" / "p1", values())
    layers = ({"pattern": "*_segmentation.nii.gz", "write": 1, "root": str(tmp_path / "labels")},)
    site = small.site(files={"image": ("Case*.nii.gz",), "masks": layers})
    assert [case.name for case in find_cases(tmp_path / "images", site).cases] == ["p1"]


def test_uneven_slices(tmp_path):
    write_series(tmp_path, values(), places=[0, 3, 6, 9.9, 12, 15])
    with pytest.raises(DataError, match=r"uneven slices: a step of 3\.90 mm"):
        read_volume(tmp_path)


def test_two_series(tmp_path):
    write_series(tmp_path, values(), number=4)
    write_series(tmp_path / "other", values(), number=7, origin=(0, 0, 0))
    for path in dicom_files(tmp_path / "other"):
        shutil.move(path, tmp_path / f"B{path.name}")
    with pytest.raises(
        DataError, match=r"2 series in one folder: .*number 4, 20 x 16 x 6 voxels, axial.*number 7"
    ):
        read_volume(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"direction": SAGITTAL}, "another direction"), ({"spacing": (2.0, 2.0)}, "localiser")],
)
def test_a_localiser_in_the_series(tmp_path, change, words):
    write_series(tmp_path, values(), series="1.2.3")
    write_series(tmp_path / "other", values((20, 16, 1)), series="1.2.3", **change)
    shutil.move(dicom_files(tmp_path / "other")[0], tmp_path / "Z")
    with pytest.raises(DataError, match=words):
        read_volume(tmp_path)


def test_multi_frame_and_colour(tmp_path):
    array = values((20, 16, 1))
    frames = np.repeat(array[:, :, 0].T[None], 3, axis=0).astype("<u2").tobytes()
    write_series(tmp_path / "a", array, NumberOfFrames=3, PixelData=frames)
    with pytest.raises(DataError, match="3 frames"):
        read_volume(tmp_path / "a")
    colour = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0}
    eight = {"BitsAllocated": 8, "BitsStored": 8, "HighBit": 7, "PixelData": bytes(3 * 20 * 16)}
    write_series(tmp_path / "b", array, **colour, **eight)
    with pytest.raises(DataError, match="colour channels"):
        read_volume(tmp_path / "b")


def test_a_file_that_is_cut_off(tmp_path):
    paths = write_series(tmp_path, values())
    paths[2].write_bytes(paths[2].read_bytes()[:-200])
    with pytest.raises(DataError, match="DICOM"):
        read_volume(tmp_path)


def test_folders_are_cases_where_no_image_matches(tmp_path):
    write_series(tmp_path / "p1" / "t2", values())
    write_series(tmp_path / "p2", values())
    (tmp_path / "p2" / "notes.txt").write_text("x")
    found = find_cases(tmp_path, small.site())
    assert [case.name for case in found.cases] == ["p1/t2", "p2"]
    assert [path.name for path, _ in found.skipped] == ["notes.txt"]
    alone = find_cases(tmp_path / "p2", small.site())
    assert [case.name for case in alone.cases] == ["p2"]
    small.make_volumes(tmp_path, 1)
    mixed = find_cases(tmp_path, small.site())
    assert [case.name for case in mixed.cases] == ["Case00"]
    assert len(mixed.skipped) == 13
    with pytest.raises(DataError, match="give the folder of its series"):
        find_cases(dicom_files(tmp_path / "p2")[0], small.site())


def test_the_hash_of_a_folder(tmp_path):
    paths = write_series(tmp_path, values())
    before = sha256(tmp_path)
    assert before == sha256(tmp_path)
    paths[0].write_bytes(paths[0].read_bytes() + b"x")
    assert sha256(tmp_path) != before


def test_a_run_writes_nifti_on_the_grid_and_no_names(one_thread, tmp_path):
    weights = small.train_weights(tmp_path / "small")
    write_series(tmp_path / "dicom" / "p1", values((32, 28, 4)))
    write_series(tmp_path / "dicom" / "p2", values((32, 28, 5)), places=[0, 3, 9, 12, 15])
    out = tmp_path / "out"
    result = small.run(tmp_path / "dicom", weights, out, reports=("reports=[table,html]",))
    assert [item.status in ("ok", "empty") for item in result.results] == [True, False]
    assert "1 slice missing" in result.results[1].reason
    mask = nib.load(out / "masks/p1_mask.nii.gz")
    assert mask.shape == (32, 28, 4)
    assert np.allclose(mask.affine, read_volume(tmp_path / "dicom/p1").affine)
    for path in out.rglob("*"):
        if path.is_file():
            assert not any(
                word in path.read_bytes() for word in (b"Quimby", b"identifier-4711", b"secret words")
            ), path
    again = small.run(tmp_path / "dicom", weights, out, reports=("reports=[table,html]",), resume=True)
    assert [item.status for item in again.results] == [item.status for item in result.results]


def test_files_with_the_mark_and_nothing_else_fail_their_case_by_name(one_thread, tmp_path):
    weights = small.train_weights(tmp_path / "small")
    (tmp_path / "dicom" / "p1").mkdir(parents=True)
    for index in range(3):
        (tmp_path / f"dicom/p1/{index}.dcm").write_bytes(bytes(128) + b"DICM")
    write_series(tmp_path / "dicom" / "p2", values((32, 28, 4)))
    result = small.run(tmp_path / "dicom", weights, tmp_path / "out", method="source")
    assert [item.status == "failed" for item in result.results] == [True, False]
    assert "0.dcm: cannot be read as DICOM" in result.results[0].reason
    assert not list((tmp_path / "out/masks").rglob("p1*"))
