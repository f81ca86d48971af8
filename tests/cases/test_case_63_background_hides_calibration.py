"""Calibration is reported first for the region around the structure, then for all voxels, each with its
count.
"""

import numpy as np
import pytest

from tesla_med.config.models import LabelClass
from tesla_med.reports._content import tiles
from tesla_med.reports._run_content import calibration_rows
from tesla_med.scoring.areas import calibration_region, count_case
from tesla_med.scoring.summary import merge, summarise

CASE = 63
SHAPE = (100, 100, 10)


def measured(confidence):
    """100,000 voxels, 0.5 % foreground and 0.5 % false positives of one confidence, background near 0."""
    reference = np.zeros(SHAPE, np.uint8)
    reference[10:20, 10:20, :5] = 1
    mask = reference.copy()
    mask[50:60, 50:60, :5] = 1
    assert reference.sum() == mask.sum() - reference.sum() == 500
    foreground = np.where(mask, confidence, 0.001).astype(np.float32)
    probs = np.stack([1 - foreground, foreground])
    region = calibration_region(reference, mask, dilation=0)
    return summarise(merge([count_case(probs, probs, reference, region, (0, 1), 10)]))


@pytest.mark.parametrize(("confidence", "everywhere", "region"), [(0.6, 0.002, 0.1), (0.99, 0.006, 0.49)])
def test_the_region_shows_what_all_voxels_hide(confidence, everywhere, region):
    found = measured(confidence)
    assert found["all"]["adapted"]["1"]["ece"] == pytest.approx(everywhere, abs=2e-4)
    for key in ("all", "1"):
        assert found["all"]["adapted"][key]["ece"] < everywhere + 2e-4
        assert found["all"]["adapted"][key]["voxels"] == 100_000
        assert found["region"]["adapted"][key]["ece"] == pytest.approx(region, abs=1e-5)
        assert found["region"]["adapted"][key]["voxels"] == 1000


def test_reports_lead_with_the_region():
    found = measured(0.6)
    (tile,) = (item for item in tiles([], found) if item.label == "ECE")
    assert "0.100" in tile.value
    assert "region" in tile.detail
    classes = (LabelClass(value=0, name="background"), LabelClass(value=1, name="prostate"))
    rows = calibration_rows(found, classes)
    assert rows[0]["area"] == "calibration region"
    assert [(row["name"], row["voxels"]) for row in rows[:2]] == [
        ("all classes", "1,000"),
        ("prostate", "1,000"),
    ]
    assert rows[-1]["voxels"] == "100,000"
