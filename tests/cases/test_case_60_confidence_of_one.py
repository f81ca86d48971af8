"""Bins are (low, high], and the last one includes a confidence of exactly 1."""

import csv
import json

import nibabel as nib
import numpy as np
import pytest
from by_hand import plain_ece
from small_volumes import noise, run_whole, write

import tesla_med

CASE = 60
SHAPE = (16, 14, 4)


def evaluated(folder, confidence, right):
    """Return the figures of tiles of two classes; the first wins, and is the label where it is right."""
    with (folder / "predictions.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["tile", "label", "prediction", "p_one", "p_two"])
        for number, (value, hit) in enumerate(zip(confidence, right, strict=True)):
            writer.writerow([f"{number}.png", "one" if hit else "two", "one", value, 1 - value])
    return tesla_med.evaluate(folder / "predictions.csv").adapted


def test_the_last_bin_is_closed(tmp_path):
    figures = evaluated(tmp_path, [0.95, 1.0], [True, False])
    assert figures.ece == pytest.approx(0.475)


def test_as_the_definition_says_with_ones_among_the_rest(tmp_path):
    generator = np.random.default_rng(0)
    confidence = generator.choice([0.6, 0.8, 0.95, 1.0, *(0.5 + 0.499 * generator.random(20))], 500)
    right = generator.random(500) < confidence**2
    wanted = plain_ece(confidence, right, 15)
    assert evaluated(tmp_path, confidence, right).ece == pytest.approx(wanted)


def test_the_figures_of_a_run_follow_the_same_rule(known_weights, tmp_path):
    image = noise(SHAPE)
    truth = (image + np.random.default_rng(1).integers(-40, 41, SHAPE) > 100).astype(np.uint8)
    write(tmp_path / "nii/Case00.nii.gz", image)
    write(tmp_path / "nii/Case00_segmentation.nii.gz", truth)
    reports = ("reports=[calibration]",)
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out", reports=reports, save_probs=True)
    content = json.loads((result.out / "report/calibration.json").read_text(encoding="utf-8"))
    figures = content["all"]["adapted"]["1"]
    probs = np.asarray(nib.load(result.out / "probs/Case00_prob.nii.gz").dataobj)
    foreground = probs[..., 1].ravel().astype(float)
    assert (foreground == 1).sum() > 100  # the network is certain of many voxels
    assert figures["voxels"] == truth.size
    assert sum(figures["bins"]["count"]) == truth.size
    assert figures["bins"]["count"][-1] >= (foreground == 1).sum()
    bins = len(figures["bins"]["count"])
    assert figures["ece"] == pytest.approx(plain_ece(foreground, truth.ravel(), bins), abs=1e-6)
