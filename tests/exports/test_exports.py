"""Masks in the formats of other programs: read back, voxel for voxel, on the same grid."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import shutil
import zipfile

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
import small_site as small
import tile_site
from exported import replace_mask, voxels, write_series

from tesla_med.actions.export import export
from tesla_med.adapt import adapt_site
from tesla_med.cli.app import run
from tesla_med.errors import ConfigError, DataError, OutputError
from tesla_med.exports.base import EXPORTS
from tesla_med.io.volumes import read_volume
from tesla_med.io.walk import exports_among

AXIAL, SAGITTAL, OBLIQUE = (1, 0, 0, 0, 1, 0), (0, 1, 0, 0, 0, -1), (0.8, 0.6, 0, -0.6, 0.8, 0)
FORMS = tuple(EXPORTS.names())
SHAPES = {"Case1": (24, 20, 4), "Case2": (20, 24, 5)}
DIRECTIONS = {"Case1": AXIAL, "Case2": OBLIQUE}


@pytest.fixture(scope="module")
def finished(one_thread, tmp_path_factory):
    """A run on two DICOM series whose masks are random, so that no flip and no swap of axes goes unseen."""
    folder = tmp_path_factory.mktemp("exports")
    for seed, (name, shape) in enumerate(SHAPES.items()):
        write_series(folder / "dicom" / name, voxels(shape, seed), direction=DIRECTIONS[name])
    weights = small.train_weights(folder / "weights")
    small.run(folder / "dicom", weights, folder / "run", method="source")
    for seed, name in enumerate(SHAPES):
        replace_mask(folder / "run", name, seed)
    return folder


def mask_of(folder, name):
    image = nib.load(folder / "run" / "masks" / f"{name}_mask.nii.gz")
    return np.asarray(image.dataobj), image.affine


def options(form, folder):
    return {"dicom": folder / "dicom"} if EXPORTS.get(form).needs_series else {}


# ------------------------------------------------------------ every format


@pytest.mark.parametrize("form", FORMS)
def test_every_format_says_what_it_wrote(finished, tmp_path, form):
    result = export(finished / "run", form, out=tmp_path / "out", **options(form, finished))
    assert result.cases == ("Case1", "Case2")
    assert exports_among(tmp_path.rglob("*")) == {tmp_path / "out"}
    assert result.skipped == {}
    record = json.loads((tmp_path / "out" / "export.json").read_text(encoding="utf-8"))
    there = {path for path in small.files_below(tmp_path / "out") if not path.startswith(".")} - {
        "export.json"
    }
    assert set(record["files"]) == there == {str(path.relative_to(result.out)) for path in result.files}
    for name, digest in record["files"].items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == digest


@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_replaced_only_when_asked(finished, tmp_path, form):
    more = options(form, finished)
    export(finished / "run", form, out=tmp_path / "out", **more)
    with pytest.raises(OutputError, match="--overwrite"):
        export(finished / "run", form, out=tmp_path / "out", **more)
    export(finished / "run", form, out=tmp_path / "out", cases=("Case2",), overwrite=True, **more)
    names = " ".join(small.files_below(tmp_path / "out"))
    assert "Case1" not in names
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(OutputError, match=r"no export \(thesis.txt\)"):
        export(finished / "run", form, out=tmp_path / "other", overwrite=True, **more)
    assert (tmp_path / "other" / "thesis.txt").is_file()


@pytest.mark.parametrize("form", FORMS)
def test_no_file_names_the_patient(finished, tmp_path, form):
    more, key = options(form, finished), tmp_path / "key.csv"
    with pytest.raises(ConfigError, match="--key means nothing without --anonymise"):
        export(finished / "run", form, out=tmp_path / "out", key=key, **more)
    result = export(finished / "run", form, out=tmp_path / "out", anonymise=True, key=key, **more)
    for name, content in small.files_below(tmp_path / "out").items():
        for word in ("Case1", "Case2"):
            assert word not in name
        for secret in (b"Quimby", b"identifier-4711", b"secret words"):
            assert secret not in content
        if name.endswith(".json"):
            assert b'"Case1"' not in content
    assert result.key == key
    with key.open(encoding="utf-8", newline="") as stream:
        rows = {row["case"]: row["pseudonym"] for row in csv.DictReader(stream)}
    assert set(rows) == {"Case1", "Case2"}
    assert set(rows.values()) == {"case-0001", "case-0002"}


def test_bad_calls_are_refused_and_write_nothing(finished, tmp_path):
    with pytest.raises(ConfigError, match="export format"):
        export(finished / "run", "stl", out=tmp_path / "out")
    with pytest.raises(ConfigError, match="needs --dicom"):
        export(finished / "run", "dicom-seg", out=tmp_path / "out")
    with pytest.raises(OutputError, match="no case p9"):
        export(finished / "run", "zip", out=tmp_path / "out", cases=("p9",))
    with pytest.raises(OutputError, match="not a run"):
        export(finished / "dicom", "zip", out=tmp_path / "out")
    with pytest.raises(DataError, match="nothing to export"):
        export(finished / "run", "dicom-seg", out=tmp_path / "out", dicom=finished / "run")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------ DICOM Segmentation


def seg_volume(path):
    import highdicom

    segmentation = highdicom.seg.segread(path)
    return segmentation, segmentation.get_volume(combine_segments=True)


@pytest.mark.parametrize("name", SHAPES)
def test_dicom_seg_has_the_voxels_of_the_nifti_mask(finished, tmp_path, name):
    import pydicom

    export(finished / "run", "dicom-seg", out=tmp_path, dicom=finished / "dicom")
    segmentation, volume = seg_volume(tmp_path / f"{name}_seg.dcm")
    values, affine = mask_of(finished, name)
    back = np.linalg.inv(affine) @ np.diag([-1.0, -1.0, 1.0, 1.0]) @ volume.affine
    where = np.stack(np.nonzero(volume.array), axis=-1)  # of frames of the segmentation
    points = np.rint(where @ back[:3, :3].T + back[:3, 3]).astype(int)
    assert np.abs(where @ back[:3, :3].T + back[:3, 3] - points).max() < 1e-3
    assert len(points) == values.sum() > 0
    assert (values[tuple(points.T)] == 1).all()
    plain = pydicom.dcmread(tmp_path / f"{name}_seg.dcm")
    series = pydicom.dcmread(next(iter((finished / "dicom" / name).iterdir())))
    for key in ("PatientID", "StudyInstanceUID"):
        assert plain[key].value == series[key].value
    assert plain.SeriesInstanceUID != series.SeriesInstanceUID
    assert plain.ReferencedSeriesSequence[0].SeriesInstanceUID == series.SeriesInstanceUID
    assert "research use only" in plain.SeriesDescription
    assert "research use" in plain.ContentDescription
    described = segmentation.get_segment_description(1)
    assert described.segment_label == "prostate"
    kind = described.segmented_property_type
    assert (kind.value, kind.scheme_designator) == ("41216001", "SCT")
    assert described.algorithm_identification.name == "tesla-med source"


def test_the_route_over_nifti_gives_the_same_frames(one_thread, finished, tmp_path):
    """The series as NIfTI by another reader, adapted, and exported against the series: the same object."""
    for name in SHAPES:
        files = sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(finished / "dicom" / name))
        image = sitk.ReadImage(files)
        (tmp_path / "nii").mkdir(exist_ok=True)
        sitk.WriteImage(image, str(tmp_path / "nii" / f"{name}.nii.gz"))
        both = read_volume(finished / "dicom" / name), read_volume(tmp_path / "nii" / f"{name}.nii.gz")
        assert np.array_equal(both[0].array, both[1].array)
    weights = small.train_weights(tmp_path / "weights")
    small.run(tmp_path / "nii", weights, tmp_path / "run", method="source")
    for seed, name in enumerate(SHAPES):
        replace_mask(tmp_path / "run", name, seed)
    result = export(tmp_path / "run", "dicom-seg", dicom=finished / "dicom")
    assert result.unverified == ("Case1", "Case2")  # only the grids say that they belong together
    assert result.out == tmp_path / "run" / "export" / "dicom-seg"
    direct = export(finished / "run", "dicom-seg", out=tmp_path / "direct", dicom=finished / "dicom")
    assert direct.unverified == ()
    for name in SHAPES:
        (_, one), (_, two) = (seg_volume(item.out / f"{name}_seg.dcm") for item in (result, direct))
        assert np.array_equal(one.array, two.array)
        assert np.allclose(one.affine, two.affine)


def test_the_geometry_is_that_of_the_series_in_simpleitk(finished, tmp_path):
    export(finished / "run", "dicom-seg", out=tmp_path, dicom=finished / "dicom")
    for name in SHAPES:
        replace_filled = seg_volume(tmp_path / f"{name}_seg.dcm")[1]
        image = sitk.ReadImage(sitk.ImageSeriesReader.GetGDCMSeriesFileNames(str(finished / "dicom" / name)))
        corners = {
            tuple(np.round(image.TransformIndexToPhysicalPoint(index), 3))
            for index in ((0, 0, 0), tuple(side - 1 for side in image.GetSize()))
        }
        shape = replace_filled.spatial_shape
        ends = ((0, 0, 0), tuple(side - 1 for side in shape))
        every = [
            tuple(
                np.round(
                    (replace_filled.affine @ [*np.take_along_axis(np.array(ends), pick, 0)[0], 1])[:3], 3
                )
            )
            for pick in (np.array([[a, b, c]]) for a in (0, 1) for b in (0, 1) for c in (0, 1))
        ]
        assert corners <= {tuple(value + 0.0 for value in item) for item in every}
        assert sorted(shape) == sorted(image.GetSize())


def test_a_series_of_another_grid_is_refused_by_name(finished, tmp_path):
    for name, shape in SHAPES.items():
        moved = (-10.0, 20.4, 5.0) if name == "Case1" else (-10.0, 20.0, 5.0)
        write_series(tmp_path / "dicom" / name, voxels(shape, 9), direction=DIRECTIONS[name], origin=moved)
    result = export(finished / "run", "dicom-seg", out=tmp_path / "out", dicom=tmp_path / "dicom")
    assert result.cases == ("Case2",)
    assert result.unverified == ("Case2",)
    assert "does not lie on the grid" in result.skipped["Case1"]
    write_series(tmp_path / "cut" / "Case1", voxels((24, 20, 3), 9))
    with pytest.raises(DataError, match=r"Case1: .*(grid|voxels)"):
        export(
            finished / "run", "dicom-seg", out=tmp_path / "cut-out", dicom=tmp_path / "cut", cases=("Case1",)
        )


@pytest.mark.parametrize("slices", [1, 3, 100])
def test_a_series_that_lies_whole_slices_away_is_refused(finished, tmp_path, slices):
    for name, shape in SHAPES.items():
        moved = (-10.0, 20.0, 5.0 + (3.0 * slices if name == "Case1" else 0.0))
        write_series(tmp_path / "dicom" / name, voxels(shape, 9), direction=DIRECTIONS[name], origin=moved)
    result = export(finished / "run", "dicom-seg", out=tmp_path / "out", dicom=tmp_path / "dicom")
    assert result.cases == ("Case2",)
    assert "does not lie on the grid" in result.skipped["Case1"]


def test_an_export_that_was_interrupted_or_failed_leaves_the_earlier_one(finished, tmp_path, monkeypatch):
    writer, calls, out = EXPORTS.get("slicer"), [], tmp_path / "out"
    write = writer.write

    def interrupted(self, item, out):
        calls.append(item.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(self, item, out)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(finished / "run", "slicer", out=out)
    assert not [name for name in small.files_below(out) if not name.startswith(".")]
    export(finished / "run", "slicer", out=out)  # nothing is in its way
    (out / "mine").mkdir()
    before = small.files_below(out)
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(writer, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(finished / "run", "slicer", out=out, overwrite=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError):
        export(finished / "run", "dicom-seg", out=out, dicom=tmp_path / "empty", overwrite=True)
    assert small.files_below(out) == before
    done = export(finished / "run", "slicer", out=out, cases=("Case2",), overwrite=True)
    assert [path.name for path in done.files] == ["Case2.seg.nrrd"]
    assert not (out / "Case1.seg.nrrd").exists()
    assert (out / "mine").is_dir()


@pytest.fixture
def placed(one_thread, tmp_path):
    """A run on two NIfTI images, whose sform and qform can be set apart in a mask."""
    small.make_volumes(tmp_path / "nii", 2)
    small.run(tmp_path / "nii", small.train_weights(tmp_path), tmp_path / "run", method="source")
    return tmp_path


def change_mask(folder, name, change):
    path = folder / "run" / "masks" / f"{name}_mask.nii.gz"
    image = nib.load(path)
    new = nib.Nifti1Image(np.asarray(image.dataobj), image.affine, image.header)
    change(new)
    nib.save(new, path)


def test_a_mask_that_slicer_would_show_elsewhere_is_refused_alone(placed):
    def apart(image):
        moved = image.affine.copy()
        moved[:3, 3] += 7.0
        image.set_sform(image.affine, code=1)
        image.set_qform(moved, code=1)
        image.header["sform_code"], image.header["qform_code"] = 2, 1

    def sheared(image):
        affine = image.affine.copy()
        affine[0, 2] = 0.3 * affine[2, 2]
        image.set_sform(affine, code=1)
        image.header["qform_code"] = 0

    change_mask(placed, "Case00", apart)
    found = export(placed / "run", "slicer", out=placed / "one")
    assert found.cases == ("Case01",)
    assert "3D Slicer would show it elsewhere" in found.skipped["Case00"]
    change_mask(placed, "Case00", sheared)
    found = export(placed / "run", "slicer", out=placed / "two")
    assert found.cases == ("Case01",)
    assert "SimpleITK cannot read it" in found.skipped["Case00"]


@pytest.mark.parametrize("form", ["zip", "itksnap"])
def test_texts_that_others_wrote_into_a_mask_go_with_the_names(placed, form):
    def named(image):
        image.header["descrip"], image.header["aux_file"] = b"Zelda Quimby", b"quimby.nii"
        image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"Zelda Quimby 1950"))

    change_mask(placed, "Case00", named)
    values = np.asarray(nib.load(placed / "run/masks/Case00_mask.nii.gz").dataobj)
    found = export(placed / "run", form, out=placed / "out", anonymise=True, key=placed / "key.csv")
    for path in found.files:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(placed / "unpacked")
    masks = list(placed.rglob("case-*_mask.nii.gz"))
    assert len(masks) == 2
    assert not any(b"uimby" in gzip.decompress(path.read_bytes()) for path in masks)
    assert any(np.array_equal(np.asarray(nib.load(path).dataobj), values) for path in masks)
    if form == "zip":
        manifest = json.loads((placed / "unpacked/manifest.json").read_text(encoding="utf-8"))
        for item in manifest["masks"]:
            content = (placed / "unpacked" / item["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == item["sha256"]
    (placed / "run/masks/Case01_mask.nii.gz").write_bytes(b"cut off")
    found = export(placed / "run", form, out=placed / "more")
    assert list(found.skipped) == ["Case01"]


def test_masks_of_the_source_and_untrusted_ones_are_called_so(placed, capsys):
    path = placed / "run" / "run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["method"]["name"] = "tesla"
    record["cases"][0] |= {"used": "source", "trusted": False}
    record["cases"][1] |= {"used": "adapted", "trusted": True}
    path.write_text(json.dumps(record), encoding="utf-8")
    assert run(["export", str(placed / "run"), "--format", "zip", "--out", str(placed / "out")]) == 0
    assert "1 mask of these the run does not trust" in capsys.readouterr().err
    with zipfile.ZipFile(placed / "out" / "masks.zip") as archive:
        manifest = json.loads(archive.read("manifest.json"))
    assert [item["method"] for item in manifest["masks"]] == ["source", "tesla"]
    assert json.loads((placed / "out/export.json").read_text(encoding="utf-8"))["untrusted"] == ["Case00"]


def test_a_series_with_parts_missing_fails_its_case_alone(finished, tmp_path):
    import pydicom

    for name, shape in SHAPES.items():
        write_series(tmp_path / "dicom" / name, voxels(shape, 9), direction=DIRECTIONS[name])
    for path in (tmp_path / "dicom" / "Case1").iterdir():
        item = pydicom.dcmread(path)
        del item.StudyInstanceUID
        item.save_as(path)
    result = export(finished / "run", "dicom-seg", out=tmp_path / "out", dicom=tmp_path / "dicom")
    assert result.cases == ("Case2",)
    assert "StudyInstanceUID" in result.skipped["Case1"]


@pytest.mark.parametrize("form", ["dicom-seg", "slicer"])
def test_labels_without_a_class_are_refused_and_not_left_away(finished, tmp_path, form):
    shutil.copytree(finished / "run", tmp_path / "run")
    path = tmp_path / "run" / "masks" / "Case1_mask.nii.gz"
    image = nib.load(path)
    values = np.asarray(image.dataobj).copy()
    values[12:16, 12:16, 3] = 7
    nib.save(nib.Nifti1Image(values, image.affine, image.header), path)
    result = export(tmp_path / "run", form, out=tmp_path / "out", **options(form, finished))
    assert result.cases == ("Case2",)
    assert "holds label 7, expected only 0, 1" in result.skipped["Case1"]
    assert not list((tmp_path / "out").glob("Case1*"))


TEXTS = {
    None: ("Quimby^Zelda", "Knee"),
    "ISO_IR 100": ("Müller^Jörg", "Prüfung"),
    "ISO_IR 192": ("Łukasz^Żaneta=前列腺^医", "Übersicht"),
    "ISO 2022 IR 87": ("Yamada^Tarou=山田^太郎=やまだ^たろう", "前立腺"),
    "ISO_IR 144": ("Люкceмбypг", "Обзор"),
}


@pytest.mark.parametrize("label", ["Prostata: Übergangszone", "前列腺", "prostate"])
@pytest.mark.parametrize("characters", TEXTS)
def test_texts_survive_whatever_their_characters(finished, tmp_path, characters, label):
    import pydicom

    patient, study = TEXTS[characters]
    sets = ["", characters] if characters == "ISO 2022 IR 87" else characters
    fields = {"SpecificCharacterSet": sets, "PatientName": patient, "StudyDescription": study}
    write_series(tmp_path / "dicom" / "Case1", voxels(SHAPES["Case1"], 0), **fields)
    shutil.copytree(finished / "run", tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    record["settings"]["pipeline"]["classes"][1]["name"] = label
    (tmp_path / "run" / "run.json").write_text(json.dumps(record), encoding="utf-8")
    more = {"dicom": tmp_path / "dicom", "out": tmp_path / "out", "cases": ["Case1"]}
    assert export(tmp_path / "run", "dicom-seg", **more).skipped == {}
    item = pydicom.dcmread(tmp_path / "out" / "Case1_seg.dcm")
    assert str(item.PatientName) == patient
    assert item.StudyDescription == study
    assert item.SegmentSequence[0].SegmentLabel == label
    assert item.SegmentSequence[0].SegmentedPropertyTypeCodeSequence[0].CodeMeaning == label
    plain = (patient + study + label).isascii()
    assert item.get("SpecificCharacterSet") == (None if plain else "ISO_IR 192")


def test_slices_without_a_frame_of_reference_are_refused(finished, tmp_path):
    for name, shape in SHAPES.items():
        write_series(
            tmp_path / "dicom" / name, voxels(shape, 0), direction=DIRECTIONS[name], FrameOfReferenceUID=""
        )
    with pytest.raises(DataError, match="FrameOfReferenceUID"):
        export(finished / "run", "dicom-seg", out=tmp_path / "out", dicom=tmp_path / "dicom")


def test_one_series_can_be_given_itself_and_an_empty_mask_is_an_empty_segment(one_thread, tmp_path):
    write_series(tmp_path / "dicom" / "Case1", voxels((24, 20, 4), 0))
    weights = small.train_weights(tmp_path / "weights")
    small.run(tmp_path / "dicom", weights, tmp_path / "run", method="source")
    replace_mask(tmp_path / "run", "Case1", 0, filled=0.0)
    export(tmp_path / "run", "dicom-seg", out=tmp_path / "out", dicom=tmp_path / "dicom" / "Case1")
    _, volume = seg_volume(tmp_path / "out" / "Case1_seg.dcm")
    assert volume.array.sum() == 0
    assert sorted(volume.spatial_shape) == [4, 20, 24]


# ------------------------------------------------------------ the others


@pytest.mark.parametrize("name", SHAPES)
def test_slicer_has_names_colours_and_the_grid(finished, tmp_path, name):
    export(finished / "run", "slicer", out=tmp_path)
    image = sitk.ReadImage(str(tmp_path / f"{name}.seg.nrrd"))
    mask = sitk.ReadImage(str(finished / "run" / "masks" / f"{name}_mask.nii.gz"))
    assert np.array_equal(sitk.GetArrayFromImage(image), sitk.GetArrayFromImage(mask))
    for of in ("GetOrigin", "GetSpacing", "GetDirection"):
        assert np.allclose(getattr(image, of)(), getattr(mask, of)(), atol=1e-5)
    told = {key: image.GetMetaData(key) for key in image.GetMetaDataKeys()}
    assert told["Segment0_Name"] == "prostate"
    assert told["Segment0_LabelValue"] == "1"
    assert np.allclose(
        [float(word) for word in told["Segment0_Color"].split()], np.array([230, 85, 13]) / 255, atol=1e-5
    )
    assert "SCT^41216001^prostate" in told["Segment0_Tags"]


def test_itksnap_and_zip_have_the_masks_as_they_are(finished, tmp_path):
    export(finished / "run", "itksnap", out=tmp_path / "snap")
    export(finished / "run", "zip", out=tmp_path / "zip")
    lines = (tmp_path / "snap" / "labels.txt").read_text(encoding="utf-8").splitlines()
    assert lines[1].split()[:7] == ["0", "0", "0", "0", "0", "0", "0"]
    assert lines[2].split() == ["1", "230", "85", "13", "1", "1", "1", '"prostate"']
    with zipfile.ZipFile(tmp_path / "zip" / "masks.zip") as archive:
        manifest = json.loads(archive.read("manifest.json"))
        for item in manifest["masks"]:
            original = (finished / "run" / "masks" / f"{item['case']}_mask.nii.gz").read_bytes()
            assert archive.read(item["file"]) == original
            assert (tmp_path / "snap" / f"{item['case']}_mask.nii.gz").read_bytes() == original
            assert hashlib.sha256(original).hexdigest() == item["sha256"]
    first = (tmp_path / "zip" / "masks.zip").read_bytes()
    export(finished / "run", "zip", out=tmp_path / "zip", overwrite=True)
    assert (tmp_path / "zip" / "masks.zip").read_bytes() == first


def test_the_command_says_what_came_out(finished, tmp_path, capsys):
    words = ["export", str(finished / "run"), "--format", "dicom-seg", "--dicom", str(finished / "dicom")]
    assert run([*words, "--out", str(tmp_path / "a"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["cases"] == ["Case1", "Case2"]
    (finished / "elsewhere" / "Case1").mkdir(parents=True, exist_ok=True)
    write_series(finished / "elsewhere" / "Case1", voxels(SHAPES["Case1"], 5), direction=DIRECTIONS["Case1"])
    words[-1] = str(finished / "elsewhere")
    assert run([*words, "--out", str(tmp_path / "b")]) == 1
    shown = capsys.readouterr()
    assert "not exported: Case2: no DICOM series" in shown.err
    assert "make sure that they are of the same patients: Case1" in shown.err


def test_tiles_have_no_masks_to_export(one_thread, tmp_path):
    tile_site.make_tiles(tmp_path / "tiles", 2, seed=3)
    weights = tile_site.train_weights(tmp_path)
    overrides = [*tile_site.SMALL, "reports=[table]"]
    adapt_site(
        tile_site.site(),
        tmp_path / "tiles",
        weights=weights,
        method="source",
        out=tmp_path / "run",
        device="cpu",
        overrides=overrides,
    )
    with pytest.raises(ConfigError, match=r"export: not for tiles; predictions\.csv is their result"):
        export(tmp_path / "run", "zip")
    assert not (tmp_path / "run" / "export").exists()
