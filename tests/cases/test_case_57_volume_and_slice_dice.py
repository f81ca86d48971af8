"""The headline is the Dice of the whole volume; a mean over slices is named as such, with a rule for empty
slices.
"""

import json

import numpy as np
import pytest
from small_volumes import diagonal, write

from tesla_med.actions.evaluate import evaluate
from tesla_med.config.models import LabelClass
from tesla_med.scoring.metrics import dice, score_case

CASE = 57
CLASSES = (LabelClass(value=0, name="background"), LabelClass(value=1, name="prostate"))
REFERENCE = np.zeros((16, 16, 20), np.uint8)
REFERENCE[4:8, 4:8, 8:12] = 1
FOUND = np.where(np.arange(20) < 10, REFERENCE, 0).astype(np.uint8)


def mean_over_slices(axis, empty):
    planes = zip(np.moveaxis(REFERENCE, axis, 0), np.moveaxis(FOUND, axis, 0), strict=True)
    scores = [dice(*pair, empty) for pair in planes]
    return np.mean([score for score in scores if score is not None])


def test_the_mean_over_slices_is_another_figure():
    assert dice(REFERENCE, FOUND) == pytest.approx(2 / 3)
    assert mean_over_slices(2, "one") == pytest.approx(0.9)
    assert mean_over_slices(2, "skip") == pytest.approx(0.5)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_run_reports_the_volume_whichever_way_the_slices_run(axis):
    reference, found = (np.moveaxis(item, 2, axis) for item in (REFERENCE, FOUND))
    (score,) = score_case(found, found, reference, CLASSES, (1, 1, 3))
    assert (score.dice, score.dice_source) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_evaluate_names_the_mean_over_volumes_and_the_pooled_figure(tmp_path):
    whole = np.zeros_like(REFERENCE)
    whole[2:14, 2:14, 2:18] = 1
    for name, reference, found in (("Case00", REFERENCE, FOUND), ("Case01", whole, whole)):
        write(tmp_path / f"masks/{name}.nii.gz", found, diagonal(1, 1, 3))
        write(tmp_path / f"references/{name}.nii.gz", reference, diagonal(1, 1, 3))
    result = evaluate(tmp_path / "masks", tmp_path / "references", out=tmp_path / "out")
    assert [case.scores[0].dice for case in result.cases] == [pytest.approx(2 / 3), 1.0]
    (row,) = json.loads((tmp_path / "out/summary.json").read_text())["classes"]
    assert row["dice_mean"] == pytest.approx((2 / 3 + 1) / 2)
    common, total = 2 * (FOUND.sum() + whole.sum()), FOUND.sum() + REFERENCE.sum() + 2 * whole.sum()
    assert row["dice_pooled"] == pytest.approx(common / total)
    assert row["dice_pooled"] > row["dice_mean"]  # the large structure weighs more
    assert not [name for name in row if "slice" in name]
