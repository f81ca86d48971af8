"""Voxels whose reference means "do not score" are left out of every figure and of the calibration region, and
counted; a value that nothing explains is refused by name.
"""

import csv
import json

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from lines import VOLUMES, adapt, run, sets, write_site
from small_volumes import write

CASE = 68
pytestmark = pytest.mark.usefixtures("one_thread")
IGNORING = VOLUMES.replace("write: 1}", "write: 1, ignore: [255]}")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two cases; in the reference of the first the right half of every slice is 255."""
    small.make_volumes(tmp_path / "nii", 2)
    path = tmp_path / "nii/Case00_segmentation.nii.gz"
    image = nib.load(path)
    mask = np.asarray(image.dataobj).astype(np.uint8)
    mask[16:] = 255
    nib.save(nib.Nifti1Image(mask, image.affine), path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows(out):
    with (out / "report/metrics.csv").open(encoding="utf-8", newline="") as stream:
        return {row["case"]: row for row in csv.DictReader(stream)}


def test_left_out_of_every_figure(place, known_weights, capsys):
    write_site(place, text=IGNORING)
    assert adapt(known_weights(), "--method", "source", reports="[table, calibration]") == 0
    count = 16 * 32 * small.SLICES
    assert f"{count} voxels of the reference are ignored" in capsys.readouterr().err
    mask, truth = (
        np.asarray(nib.load(path).dataobj)[:16]
        for path in ("out/masks/Case00_mask.nii.gz", "nii/Case00_segmentation.nii.gz")
    )
    dice = 2 * np.sum((mask == 1) & (truth == 1)) / (np.sum(mask == 1) + np.sum(truth == 1))
    assert float(rows(place / "out")["Case00"]["dice"]) == pytest.approx(dice, abs=1e-6)
    calibration = json.loads((place / "out/report/calibration.json").read_text(encoding="utf-8"))
    voxels = [calibration[area]["adapted"]["all"]["voxels"] for area in ("all", "region")]
    assert voxels[0] == 2 * 32 * 32 * small.SLICES - count
    assert voxels[1] <= voxels[0]
    record = small.record(place / "out")["cases"]
    assert [any("ignored" in note for note in case["notes"]) for case in record] == [True, False]


def test_refused_by_name_where_nothing_explains_it(place, known_weights, capsys):
    write_site(place)
    assert adapt(known_weights(), "--method", "source") == 1
    said = capsys.readouterr().err
    assert "holds value 255 beside 1" in said
    assert "ignore: [255]" in said
    assert [case["status"] for case in small.record(place / "out")["cases"]] == ["unscored", "ok"]
    assert run(["sites", "check", "prostate/X", "--volumes", "nii"]) == 1
    assert "255" in capsys.readouterr().out


def test_zones_are_still_joined(tmp_path, known_weights, monkeypatch):
    path = small.make_volumes(tmp_path / "nii", 1)[0].with_name("Case00_segmentation.nii.gz")
    image = nib.load(path)
    mask = np.asarray(image.dataobj).astype(np.uint8)
    mask[16:] *= 2
    nib.save(nib.Nifti1Image(mask, image.affine), path)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert adapt(known_weights(), "--method", "source") == 0


def test_a_value_is_not_both(place, known_weights, capsys):
    write_site(place, text=VOLUMES.replace("write: 1}", "values: {0: 0, 1: 1, 255: 1}, ignore: [255]}"))
    assert adapt(known_weights(), "--method", "source") == 2
    assert "255 is in 'values' and in 'ignore'" in capsys.readouterr().err


def test_evaluate(tmp_path, capsys):
    truth = np.zeros((8, 8, 2), np.uint8)
    truth[2:4, 2:4], truth[6:] = 1, 255
    mask = (truth == 1).astype(np.uint8)
    mask[6:] = 1
    write(tmp_path / "masks/a_mask.nii.gz", mask)
    write(tmp_path / "references/a.nii.gz", truth)
    words = [
        "evaluate",
        "--predictions",
        str(tmp_path / "masks"),
        "--references",
        str(tmp_path / "references"),
    ]
    words += ["--ignore", "255", "--strict", "--out", str(tmp_path / "out"), "--json"]
    assert run(words) == 0
    shown = capsys.readouterr()
    assert "32 voxels of 1 reference are ignored" in shown.err
    content = json.loads(shown.out)
    assert content["cases"][0]["ignored"] == 32
    assert [(row["label"], row["dice_mean"]) for row in content["summary"]] == [(1, 1.0)]
    assert json.loads((tmp_path / "out/summary.json").read_text())["ignored_voxels"] == 32
    assert run([*words, "--values", "255=1"]) == 2
    assert "both ignored and mapped" in capsys.readouterr().err


def test_training_leaves_such_slices_out(place, capsys):
    write_site(place, text=IGNORING)
    short = sets(*small.SMALL, "train.steps=2", "train.validate_every=1")
    line = ["train", "--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--out", "trained"]
    assert run([*line, "--device", "cpu", *short]) == 0
    record = json.loads((place / "trained/train.json").read_text(encoding="utf-8"))
    assert record["left_out"] == [f"X/Case00: {small.SLICES} slices with voxels that are ignored"]
    assert record["training_cases"] == ["X/Case01"]
