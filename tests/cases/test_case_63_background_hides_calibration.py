"""Calibration is reported first for the region around the structure, then for all voxels, each with its
count.
"""

import json
import re

import numpy as np
import pytest
from small_volumes import diagonal, run_whole, write

CASE = 63
SHAPE = (60, 60, 6)


@pytest.fixture
def result(known_weights, tmp_path):
    """A run that takes two equal blocks for the structure, of which one is the structure."""
    data = np.zeros(SHAPE, np.int16)
    data[10:20, 10:20, 1:4] = data[40:50, 40:50, 1:4] = 100
    truth = (data > 0).astype(np.uint8)
    truth[30:] = 0
    write(tmp_path / "nii/Case00.nii.gz", data, diagonal(1, 1, 3))
    write(tmp_path / "nii/Case00_segmentation.nii.gz", truth, diagonal(1, 1, 3))
    reports = ("reports=[calibration,html]",)
    off = ("preprocessing.fill.enabled=false",)
    return run_whole(tmp_path / "nii", known_weights(), tmp_path / "out", reports=reports, overrides=off)


def test_the_region_shows_what_all_voxels_hide(result):
    content = json.loads((result.out / "report/calibration.json").read_text(encoding="utf-8"))
    assert list(content).index("region") < list(content).index("all")
    wrong, total = 300, int(np.prod(SHAPE))
    inside = content["region"]["adapted"]["1"]["voxels"]
    assert inside == 2 * 3 * (16 * 16 - 4 * 5)  # each block with three voxels around it, within slices
    for key in ("all", "1"):
        for area, voxels in (("all", total), ("region", inside)):
            figures = content[area]["adapted"][key]
            assert figures["voxels"] == voxels
            assert figures["ece"] == pytest.approx(wrong / voxels, rel=1e-3)
    assert wrong / total < 0.015
    assert wrong / inside > 0.15


def test_the_page_leads_with_the_region(result):
    page = (result.out / "report/report.html").read_text(encoding="utf-8")
    content = json.loads((result.out / "report/calibration.json").read_text(encoding="utf-8"))
    words = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    region, everywhere = (content[area]["adapted"]["all"] for area in ("region", "all"))
    assert f"{region['ece']:.3f}" in words
    first = words.index("calibration region")
    assert (
        first < words.index(f"{region['voxels']:,}", first) < words.index(f"{everywhere['voxels']:,}", first)
    )
