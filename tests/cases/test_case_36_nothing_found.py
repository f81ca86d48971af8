"""A mask without foreground is a valid mask on the image's grid; the case is called `empty`."""

import csv

import numpy as np
import small_site as small
from lines import adapt, work_there
from small_volumes import assert_same_grid

CASE = 36


def test_background_everywhere(known_weights, tmp_path, monkeypatch):
    folder = work_there(tmp_path, monkeypatch, 1)
    words = ("--method", "source", "--set", "keep_largest=true")
    assert adapt(known_weights(empty=True), *words, reports="[table,calibration,html]") == 0
    (case,) = small.record(folder / "out")["cases"]
    assert case["status"] == "empty"
    with (folder / "out/report/metrics.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["status"], float(row["dice"])) == ("empty", 0.0)
    for part in ("masks", "source_masks"):
        assert not np.any(small.labels(folder / "out", "Case00", part))
        assert_same_grid(folder / f"out/{part}/Case00_mask.nii.gz", folder / "nii/Case00.nii.gz")
