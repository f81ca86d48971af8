"""A mask where the reference is empty has Dice 0, stays in the mean, and is counted and shown with its
volume.
"""

import json
import re

import numpy as np
import pytest
from small_volumes import blocks, diagonal, run_whole, write

import tesla_med

CASE = 56
SHAPE = (16, 16, 8)
NOTHING = np.zeros(SHAPE, np.uint8)
EIGHT = NOTHING.copy()
EIGHT[4:6, 4:6, 2:4] = 1
LABELS = [{"value": 0, "name": "background"}, {"value": 1, "name": "prostate"}]


def test_evaluate_keeps_it_in_the_mean(tmp_path):
    agreeing = (blocks(SHAPE) > 0).astype(np.uint8)
    for name, reference, mask in (("Case00", NOTHING, EIGHT), ("Case01", agreeing, agreeing)):
        write(tmp_path / f"references/{name}.nii.gz", reference, diagonal(1, 1, 3))
        write(tmp_path / f"masks/{name}.nii.gz", mask, diagonal(1, 1, 3))
    (tmp_path / "masks/labels.json").write_text(json.dumps({"labels": LABELS}))
    result = tesla_med.evaluate(tmp_path / "masks", tmp_path / "references")
    (score,) = result.cases[0].scores
    assert (score.dice, score.hd95_mm, score.value("nsd")) == (0.0, None, 0.0)
    assert (score.volume_ml, score.volume_ml_reference) == (pytest.approx(8 * 3 / 1000), 0.0)
    (row,) = result.summary()
    assert row["dice_mean"] == pytest.approx(0.5)
    assert (row["cases"], row["false_positive"], row["not_applicable"]) == (2, 1, 0)


def test_a_run_does_too(known_weights, tmp_path):
    for name, reference in (("Case00", NOTHING), ("Case01", EIGHT)):
        write(tmp_path / f"nii/{name}.nii.gz", EIGHT.astype(np.int16), diagonal(1, 1, 3))
        write(tmp_path / f"nii/{name}_segmentation.nii.gz", reference, diagonal(1, 1, 3))
    reports = ("reports=[table,html]",)
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out", reports=reports)
    (score,) = result.results[0].scores
    assert (score.dice, score.hd95_mm) == (0.0, None)
    assert score.volume_ml == pytest.approx(8 * 3 / 1000)
    assert result.mean_dice == 0.5
    page = (result.out / "report/report.html").read_text(encoding="utf-8")
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert "0.500" in words
    assert "false positive" in words
