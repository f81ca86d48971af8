"""The headline is the Dice of the whole volume; a mean over slices has a name and a rule for empty slices."""

import numpy as np
import pytest
from small_volumes import diagonal, write

from tesla_med.actions.evaluate import evaluate
from tesla_med.config.models import LabelClass
from tesla_med.scoring.metrics import dice, per_slice_dice, score_case

CASE = 57
REFERENCE = np.zeros((16, 16, 20), np.uint8)
REFERENCE[4:8, 4:8, 8:12] = 1
FOUND = np.where(np.arange(20) < 10, REFERENCE, 0).astype(np.uint8)


def test_the_three_figures():
    assert dice(REFERENCE, FOUND) == pytest.approx(2 / 3)
    assert per_slice_dice(REFERENCE, FOUND, empty="one") == pytest.approx(0.9)
    assert per_slice_dice(REFERENCE, FOUND, empty="skip") == pytest.approx(0.5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_slices_may_run_along_any_axis(axis):
    reference, found = (np.moveaxis(item, 2, axis) for item in (REFERENCE, FOUND))
    assert per_slice_dice(reference, found, slice_axis=axis, empty="one") == pytest.approx(0.9)


def test_runs_and_evaluate_report_the_volume(tmp_path):
    classes = (LabelClass(value=0, name="background"), LabelClass(value=1, name="prostate"))
    assert score_case(FOUND, FOUND, REFERENCE, classes, (1, 1, 3))[0].dice == pytest.approx(2 / 3)
    write(tmp_path / "masks/Case00.nii.gz", FOUND, diagonal(1, 1, 3))
    write(tmp_path / "references/Case00.nii.gz", REFERENCE, diagonal(1, 1, 3))
    result = evaluate(tmp_path / "masks", tmp_path / "references")
    assert result.summary()[0]["dice_mean"] == pytest.approx(2 / 3)
