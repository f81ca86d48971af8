"""Where no image is found the exit code is 2, and one sentence gives the path, the names tried and what is
there.
"""

import pytest
import small_site as small
from lines import run

import tesla_med

CASE = 69
SITE = """\
institution: Nowhere
files: {image: 'Case*.nii.gz', masks: [{pattern: '*_segmentation.nii.gz', write: 1}]}
"""


@pytest.fixture
def adapt(small_weights, tmp_path, monkeypatch, capsys):
    """Run ``adapt`` and return what it said on standard error."""
    (tmp_path / "site_configs/prostate").mkdir(parents=True)
    (tmp_path / "site_configs/prostate/X.yaml").write_text(SITE)
    monkeypatch.chdir(tmp_path)
    assert tesla_med.load_site("X").institution == "Nowhere"

    def said(volumes):
        words = ("--site", "X", "--volumes", volumes, "--weights", str(small_weights), "--device", "cpu")
        assert run(["adapt", *words]) == 2
        assert not (tmp_path / "runs").exists()
        shown = capsys.readouterr()
        lines = [line for line in shown.err.splitlines() if line]
        assert shown.out == ""
        assert len(lines) == 1
        return lines[0]

    return said


def test_an_empty_folder(adapt, tmp_path):
    (tmp_path / "empty").mkdir()
    text = adapt("empty")
    for words in (
        "empty: no image of site X found",
        "Case*.nii.gz",
        ".nii.gz",
        "the folder holds no files of its own",
    ):
        assert words in text


def test_a_folder_of_files_that_are_dicom_by_name_only(adapt, tmp_path):
    (tmp_path / "dicom").mkdir()
    for index in range(3):
        (tmp_path / f"dicom/{index}.dcm").write_bytes(bytes(132))
    text = adapt("dicom")
    for words in ("dicom: no image", "3 .dcm, such as 0.dcm", "mark of a DICOM file", "convert them"):
        assert words in text


def test_a_folder_of_other_names(adapt, tmp_path):
    image = small.make_volumes(tmp_path / "source", 1)[0]
    small.copy_image(image, tmp_path / "other/scan.nii.gz")
    text = adapt("other")
    for words in ("other: no image", "Case*.nii.gz", "1 .nii.gz, such as scan.nii.gz"):
        assert words in text


def test_a_missing_path(adapt):
    assert "missing: no such file or folder" in adapt("missing")


@pytest.mark.parametrize("name", ["notes.txt", "0.dcm"])
def test_a_file_that_is_no_image(adapt, tmp_path, name):
    (tmp_path / name).write_bytes(b"hello")
    text = adapt(name)
    assert f"{name}: not an image" in text
    assert ".nii.gz" in text


def test_the_path_of_one_image_is_a_case(tmp_path, small_weights):
    image = small.make_volumes(tmp_path / "nii", 2)[1]
    result = small.run(image, small_weights, tmp_path / "out", method="source")
    assert [item.case for item in result.results] == ["Case01"]
