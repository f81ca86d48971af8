"""The sform places an image if its code is above 0, else the qform; differences are noted and both are
kept.
"""

import numpy as np
import pytest
import small_site as small
from small_volumes import assert_same_grid, blocks, diagonal, run_whole, write

import tesla_med

CASE = 1
SHAPE = (32, 28, 12)
QFORM = diagonal(1, 1, 3)
SFORM = diagonal(1, 1, 3, origin=(10, -5, 3))
TRUTH = (blocks(SHAPE) > 0).astype(np.uint8)


@pytest.mark.parametrize("codes", [(2, 1), (1, 1)])
def test_the_sform_counts_the_difference_is_told_and_both_are_written_back(known_weights, tmp_path, codes):
    image = write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE), SFORM, QFORM, codes=codes)
    write(tmp_path / "nii/Case00_segmentation.nii.gz", TRUTH, SFORM, codes=(1, 0))
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out", reports=("reports=[html]",))
    (case,) = result.results
    assert (case.status, case.mean_dice) == ("ok", 1.0)
    (note,) = case.notes
    assert "11.58 mm" in note
    assert "sform is used" in note
    assert "11.58 mm" in (result.out / "report/report.html").read_text(encoding="utf-8")
    assert np.array_equal(small.labels(result.out, "Case00") > 0, blocks(SHAPE) > 0)
    assert_same_grid(result.out / "masks/Case00_mask.nii.gz", image)


def test_references_and_scores_follow_the_same_rule(tmp_path):
    write(tmp_path / "masks/Case00.nii.gz", TRUTH, SFORM, QFORM, codes=(1, 1))
    for name, placed, status in (("same", SFORM, "ok"), ("other", QFORM, "unscored")):
        write(tmp_path / name / "Case00.nii.gz", TRUTH, placed, codes=(1, 0))
        assert tesla_med.evaluate(tmp_path / "masks", tmp_path / name).cases[0].status == status


def test_without_an_sform_the_qform_counts_and_nothing_is_noted(known_weights, tmp_path):
    write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE), SFORM, QFORM, codes=(0, 1))
    write(tmp_path / "nii/Case00_segmentation.nii.gz", TRUTH, QFORM, codes=(1, 0))
    (case,) = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out").results
    assert (case.status, case.mean_dice, case.notes) == ("ok", 1.0, ())
