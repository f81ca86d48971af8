"""Voxel sizes that contradict the transform of the header, or cannot be, are named and kept out of masks."""

import csv
import json

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from lines import run, sets, write_site
from small_volumes import diagonal, noise, write

CASE = 17
SHAPE, STEPS = (16, 16, 4), (1.0, 1.0, 3.0)
SETTINGS = sets(*(*small.SMALL, *small.FEW, *small.BARE))


def sizes(*values):
    return np.array([1.0, *values, 0.0, 0.0, 0.0, 0.0], np.float32)


CONTRADICTIONS = {
    "zero": ({"pixdim": sizes(1, 1, 0)}, "1, 1, 0 mm"),
    "not a number": ({"pixdim": sizes(1, 1, np.nan)}, "1, 1, nan mm"),
    "another": ({"pixdim": sizes(1, 1, 5)}, "1, 1, 5 mm"),
    "negative": ({"pixdim": sizes(1, 1, -3), "codes": (0, 0)}, "1, 1, -3 mm"),
}


@pytest.fixture
def site(tmp_path):
    return str(write_site(tmp_path))


def adapt(site, weights, tmp_path):
    words = ["--site", site, "--volumes", str(tmp_path / "nii"), "--method", "source", "--device", "cpu"]
    return run(["adapt", *words, "--weights", str(weights), "--out", str(tmp_path / "out"), *SETTINGS])


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_they_are_named_and_not_repeated(name, known_weights, site, tmp_path, capsys):
    fields, stored = CONTRADICTIONS[name]
    fields = dict(fields)
    codes = fields.pop("codes", (1, 0))
    image, truth = noise(SHAPE), (noise(SHAPE) > 100).astype(np.uint8)
    write(tmp_path / "nii/Case00.nii.gz", image, diagonal(*STEPS), codes=codes, **fields)
    write(tmp_path / "nii/Case00_segmentation.nii.gz", truth, diagonal(*STEPS), codes=codes)
    assert adapt(site, known_weights(), tmp_path) == 0
    notes = [
        text
        for text in json.loads((tmp_path / "out/run.json").read_text())["cases"][0]["notes"]
        if "voxel sizes" in text and "contradict" in text
    ]
    assert len(notes) == 1
    assert stored in notes[0]
    assert "1, 1, 3 mm" in notes[0]
    mask = nib.load(next((tmp_path / "out/masks").glob("Case00*")))
    assert mask.header.get_zooms() == STEPS
    assert np.array_equal(np.linalg.norm(mask.affine[:3, :3], axis=0), STEPS)
    (row,) = csv.DictReader((tmp_path / "out/report/metrics.csv").open())
    volume = float((np.asarray(mask.dataobj) > 0).sum()) * 3 / 1000
    assert float(row["volume_ml"]) == pytest.approx(volume, rel=1e-3)
    capsys.readouterr()
    assert run(["sites", "check", site, "--volumes", str(tmp_path / "nii")]) == 0
    assert stored in "".join(capsys.readouterr())


def test_a_sound_header_is_not_remarked_upon(known_weights, site, tmp_path):
    write(tmp_path / "nii/Case00.nii.gz", noise(SHAPE), diagonal(*STEPS))
    assert adapt(site, known_weights(), tmp_path) == 0
    assert "contradict" not in (tmp_path / "out/run.json").read_text()
