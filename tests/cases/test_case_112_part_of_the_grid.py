"""A 3D Slicer segmentation cropped to the segment is placed by its own geometry; what cannot be placed
is refused with the cause.
"""

import json

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - its usual name
import small_site as small
from lines import run, sets

CASE = 112
SITE = "institution: Nowhere\nfiles: {image: 'Case*.nii.gz', masks: [{pattern: '*.seg.nrrd', write: 1}]}\n"


def segment(image, box, *, shift=0.0, step=1.0, voxels=0):
    """Return labels of the reference of an image within a box of voxels, on the grid of the box."""
    mask = sitk.ReadImage(str(image).replace(".nii.gz", "_segmentation.nii.gz"))
    part = mask[tuple(slice(*ends) for ends in box)]
    part.SetOrigin(part.TransformIndexToPhysicalPoint((voxels, voxels, voxels)))
    part.SetOrigin([value + shift for value in part.GetOrigin()])
    part.SetSpacing([value * step for value in part.GetSpacing()])
    return sitk.Cast(part, sitk.sitkUInt8)


@pytest.fixture
def image(tmp_path, monkeypatch):
    (tmp_path / "site_configs/prostate").mkdir(parents=True)
    (tmp_path / "site_configs/prostate/X.yaml").write_text(SITE)
    monkeypatch.chdir(tmp_path)
    return small.make_volumes(tmp_path / "made", 1)[0]


@pytest.fixture
def box(image):
    """Return the box of the reference's foreground, one voxel wider."""
    mask = np.asarray(nib.load(str(image).replace(".nii.gz", "_segmentation.nii.gz")).dataobj)
    found = np.nonzero(mask)
    ends = [
        (max(0, int(at.min()) - 1), min(size, int(at.max()) + 2))
        for at, size in zip(found, mask.shape, strict=True)
    ]
    assert tuple(end - start for start, end in ends) != mask.shape
    return ends


def place(tmp_path, image, part, name="Case00.seg.nrrd"):
    small.copy_image(image, tmp_path / "nii/Case00.nii.gz")
    sitk.WriteImage(part, str(tmp_path / "nii" / name))


def check(capsys):
    code = run(["sites", "check", "X", "--volumes", "nii", "--json"])
    return code, json.loads(capsys.readouterr().out)["cases"][0]


def test_it_is_the_reference(image, box, tmp_path, known_weights, capsys):
    place(tmp_path, image, segment(image, box))
    assert check(capsys)[0] == 0
    settings = sets("reports=[table]", "model.params.width=4")
    common = ["--weights", str(known_weights()), "--device", "cpu", *settings]
    assert run(["predict", "--site", "X", "--volumes", "nii", *common, "--out", "part"]) == 0
    whole = ["--set", "site.files.masks=[{pattern: '*_segmentation.nii.gz', write: 1}]"]
    assert run(["predict", "--site", "X", "--volumes", "made", *common, *whole, "--out", "whole"]) == 0
    tables = [(tmp_path / name / "report/metrics.csv").read_text() for name in ("part", "whole")]
    assert tables[0] == tables[1]


@pytest.mark.parametrize("name", ["Case00.seg.nrrd", "Case00_seg.nrrd"])
def test_it_is_known_by_name_or_header(image, box, tmp_path, name, capsys):
    part = segment(image, box)
    if ".seg." not in name:
        part.SetMetaData("Segment0_ID", "Segment_1")
    place(tmp_path, image, part, name)
    words = ["evaluate", "--predictions", "made", "--references", "nii", "--json"]
    assert run(words) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["scores"][0]["dice"] == 1.0
    words[2], words[4] = words[4], words[2]
    assert run(words) == 0


def test_two_parts_are_compared(image, box, tmp_path, capsys):
    place(tmp_path, image, segment(image, box))
    (tmp_path / "other").mkdir()
    shifted = [(max(0, start - 2), end) for start, end in box]
    sitk.WriteImage(segment(image, shifted), str(tmp_path / "other/Case00.seg.nrrd"))
    (tmp_path / "nii/Case00.nii.gz").unlink()
    assert run(["evaluate", "--predictions", "nii", "--references", "other", "--json"]) == 0
    (case,) = json.loads(capsys.readouterr().out)["cases"]
    assert case["scores"][0]["dice"] == 1.0


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"shift": 0.4}, "cannot be placed by its own geometry"),
        ({"step": 1.1}, "cannot be placed by its own geometry"),
        ({"voxels": 1000}, "outside its image"),
    ],
)
def test_what_cannot_be_placed(image, box, tmp_path, change, cause, capsys):
    place(tmp_path, image, segment(image, box, **change))
    code, case = check(capsys)
    assert code == 1
    assert cause in case["problems"][0]
    assert "Case00.seg.nrrd" in case["problems"][0]


def test_another_file_of_another_shape_is_still_refused(image, box, tmp_path, capsys):
    place(tmp_path, image, segment(image, box), "Case00_segmentation.nrrd")
    words = ["sites", "check", "X", "--volumes", "nii", "--json"]
    words += ["--set", "site.files.masks=[{pattern: '*_segmentation.nii.gz', write: 1}]"]
    assert run(words) == 1
    assert "shape" in json.loads(capsys.readouterr().out)["cases"][0]["problems"][0]
