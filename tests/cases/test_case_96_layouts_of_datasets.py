"""Patterns may hold folders and a mask layer may have a root of its own, so that imagesTr/labelsTr and BIDS
derivatives can be written down; what can never match, or takes labels for images, is said.
"""

import json
import shutil

import pytest
import small_site as small
from lines import run, sets

CASE = 96
FOLDERS = "files: {image: 'imagesTr/*.nii.gz', masks: [{pattern: 'labelsTr/*.nii.gz', write: 1}]}\n"
BIDS = """\
files:
  image: '*_T2w.nii.gz'
  masks: [{root: derivatives/labels, pattern: '*_T2w_seg.nii.gz', write: 1}]
"""
BIDS_WITH_FOLDERS = """\
files:
  image: 'sub-*/anat/*_T2w.nii.gz'
  masks: [{root: derivatives/labels, pattern: 'sub-*/anat/*_T2w_seg.nii.gz', write: 1}]
"""
LAYOUTS = {
    "folders": (FOLDERS, "imagesTr/p_{}.nii.gz", "labelsTr/p_{}.nii.gz", "p_{}", "labelsTr"),
    "bids": (
        *(BIDS, "sub-{0}/anat/sub-{0}_T2w.nii.gz", "derivatives/labels/sub-{0}/anat/sub-{0}_T2w_seg.nii.gz"),
        *("sub-{0}/anat/sub-{0}_T2w", "derivatives/labels"),
    ),
}
LAYOUTS["bids with folders"] = (BIDS_WITH_FOLDERS, *LAYOUTS["bids"][1:3], "sub-{0}/sub-{0}_T2w", None)


@pytest.fixture
def lay_out(tmp_path, monkeypatch):
    """Write two cases in a layout, and a site file X."""
    monkeypatch.chdir(tmp_path)

    def write(image, mask, text):
        for number, made in enumerate(small.make_volumes(tmp_path / "made", 2)):
            reference = made.with_name(made.name.replace(".nii.gz", "_segmentation.nii.gz"))
            for source, target in ((made, image), (reference, mask)):
                path = tmp_path / "data" / target.format(f"0{number}")
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, path)
        (tmp_path / "site_configs/prostate").mkdir(parents=True, exist_ok=True)
        (tmp_path / "site_configs/prostate/X.yaml").write_text("institution: Nowhere\n" + text)

    return write


def check(capsys, volumes="data"):
    code = run(["sites", "check", "X", "--volumes", volumes, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_command_finds_them(layout, lay_out, tmp_path, known_weights, capsys):
    text, image, mask, name, references = LAYOUTS[layout]
    lay_out(image, mask, text)
    names = [name.format(number) for number in ("00", "01")]
    code, found = check(capsys)
    assert code == 0
    assert found["remarks"] == []
    assert [case["case"] for case in found["cases"]] == names
    assert all(case["labels"] == [0, 1] for case in found["cases"])
    words = ["--site", "X", "--volumes", "data", "--weights", str(known_weights()), "--device", "cpu"]
    settings = sets("reports=[table]", "model.params.width=4")
    assert run(["predict", *words, "--out", "out", *settings]) == 0
    assert [item["status"] for item in small.record(tmp_path / "out")["cases"]] == ["ok", "ok"]
    assert "dice" in (tmp_path / "out/report/metrics.csv").read_text()
    if references is not None:
        capsys.readouterr()
        assert run(["evaluate", "--predictions", "out", "--references", f"data/{references}", "--json"]) == 0
        assert [item["case"] for item in json.loads(capsys.readouterr().out)["cases"]] == names


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_image_finds_its_reference(layout, lay_out, capsys):
    text, image, mask, _, _ = LAYOUTS[layout]
    lay_out(image, mask, text)
    code, found = check(capsys, "data/" + image.format("01"))
    assert code == 0
    assert [case["labels"] for case in found["cases"]] == [[0, 1]]


def test_a_root_elsewhere(lay_out, tmp_path, capsys):
    text = BIDS.replace("derivatives/labels", "../labels")
    _, image, _, _, _ = LAYOUTS["bids"]
    lay_out(image, "../labels/sub-{0}/anat/sub-{0}_T2w_seg.nii.gz", text)
    code, found = check(capsys)
    assert code == 0
    assert [case["labels"] for case in found["cases"]] == [[0, 1]] * 2


def test_channels_in_folders_of_their_own(lay_out, tmp_path, capsys):
    lay_out("T2/p_{}.nii.gz", "labels/p_{}.nii.gz", "")
    shutil.copytree(tmp_path / "data/T2", tmp_path / "data/ADC")
    files = "{image: ['T2/*.nii.gz', 'ADC/*.nii.gz'], masks: [{root: labels, pattern: '*.nii.gz', write: 1}]}"
    (tmp_path / "site_configs/prostate/X.yaml").write_text(f"institution: Nowhere\nfiles: {files}\n")
    words = ["sites", "check", "X", "--volumes", "data", "--set", "channels=2", "--json"]
    assert run(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [case["case"] for case in found["cases"]] == ["p_00", "p_01"]
    assert [item["reason"] for item in found["skipped"]] == []


REMARKS = {
    "labels as images": ("files: {image: '*.nii.gz'}", "sounds like labels"),
    "no such format": ("files: {image: 'imagesTr/*.nii.gz', masks: [{pattern: '*.png'}]}", "can never match"),
    "apart": ("files: {image: '*_0*.nii.gz', masks: [{pattern: 'labelsTr/*.nii.gz'}]}", "meets no image"),
    "no root": (
        "files: {image: 'imagesTr/*.nii.gz', masks: [{root: labels, pattern: '*.nii.gz'}]}",
        "no such folder",
    ),
}


@pytest.mark.parametrize("kind", REMARKS)
def test_what_looks_wrong_is_said(kind, lay_out, capsys):
    text, remark = REMARKS[kind]
    lay_out(*LAYOUTS["folders"][1:3], text)
    run(["sites", "check", "X", "--volumes", "data", "--json"])
    shown = capsys.readouterr()
    assert any(remark in item for item in json.loads(shown.out).get("remarks", ()))
    assert remark in shown.err


@pytest.mark.parametrize(
    "pattern", ["/data/*.nii.gz", "a/../*.nii.gz", "a/**/b*.nii.gz", "imagesTr/", "a\\\\*.nii.gz"]
)
def test_a_path_that_no_file_has(pattern, lay_out, capsys):
    lay_out(*LAYOUTS["folders"][1:3], f"files: {{image: '{pattern}'}}\n")
    assert run(["sites", "check", "X", "--volumes", "data"]) == 2
    assert "can never match" in capsys.readouterr().err
