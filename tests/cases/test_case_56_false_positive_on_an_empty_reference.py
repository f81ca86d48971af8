"""A mask where the reference is empty has Dice 0, stays in the mean, and is counted and shown with its
volume.
"""

import numpy as np
import pytest
from small_volumes import blocks, diagonal, write

from tesla_med.actions.evaluate import evaluate
from tesla_med.config.models import LabelClass
from tesla_med.records import CaseResult
from tesla_med.reports._content import class_summary
from tesla_med.scoring.metrics import dice, score_case

CASE = 56
SHAPE = (16, 16, 8)
NOTHING = np.zeros(SHAPE, np.uint8)
EIGHT = NOTHING.copy()
EIGHT[4:6, 4:6, 2:4] = 1
CLASSES = (LabelClass(value=0, name="background"), LabelClass(value=1, name="prostate"))


def test_evaluate_keeps_it_in_the_mean(tmp_path):
    agreeing = (blocks(SHAPE) > 0).astype(np.uint8)
    for name, reference, mask in (("Case00", NOTHING, EIGHT), ("Case01", agreeing, agreeing)):
        write(tmp_path / f"references/{name}.nii.gz", reference, diagonal(1, 1, 3))
        write(tmp_path / f"masks/{name}.nii.gz", mask, diagonal(1, 1, 3))
    result = evaluate(tmp_path / "masks", tmp_path / "references", classes=CLASSES)
    (score,) = result.cases[0].scores
    assert (score.dice, score.hd95_mm, score.value("nsd")) == (0.0, None, 0.0)
    assert (score.volume_ml, score.volume_ml_reference) == (pytest.approx(8 * 3 / 1000), 0.0)
    (row,) = result.summary()
    assert row["dice_mean"] == pytest.approx(0.5)
    assert (row["cases"], row["false_positive"], row["not_applicable"]) == (2, 1, 0)


def test_a_run_does_too():
    assert dice(NOTHING, EIGHT) == 0.0
    scores = score_case(EIGHT, EIGHT, NOTHING, CLASSES, (1, 1, 3))
    assert scores[0].volume_ml == pytest.approx(8 * 3 / 1000)
    common = {"site": "X", "method": "tesla", "protocol": "N-O", "seed": 0, "status": "ok", "used": "adapted"}
    results = [
        CaseResult(case="Case00", scores=scores, **common),
        CaseResult(case="Case01", scores=score_case(EIGHT, EIGHT, EIGHT, CLASSES, (1, 1, 3)), **common),
    ]
    (row,) = class_summary(results)
    assert (row["dice"], row["scored"], row["false_positive"]) == ("0.500", "2", "1")
