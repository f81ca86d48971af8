"""The headline is the Dice of the whole volume; a mean over slices is named as such, with a rule for empty
slices.
"""

import json

import numpy as np
import pytest
from small_volumes import diagonal, run_whole, write

import tesla_med

CASE = 57
REFERENCE = np.zeros((16, 16, 20), np.uint8)
REFERENCE[4:8, 4:8, 8:12] = 1
FOUND = np.where(np.arange(20) < 10, REFERENCE, 0).astype(np.uint8)


def scored(folder, pairs, **options):
    """Evaluate (reference, mask) pairs; return the result."""
    for number, (reference, found) in enumerate(pairs):
        write(folder / f"masks/Case{number:02d}.nii.gz", np.ascontiguousarray(found), diagonal(1, 1, 3))
        truth = folder / f"references/Case{number:02d}.nii.gz"
        write(truth, np.ascontiguousarray(reference), diagonal(1, 1, 3))
    return tesla_med.evaluate(folder / "masks", folder / "references", **options)


@pytest.mark.parametrize(("empty", "mean"), [("one", 0.9), ("skip", 0.5)])
def test_the_mean_over_slices_is_another_figure(tmp_path, empty, mean):
    """Each slice as a volume of its own."""
    pairs = [(REFERENCE[..., k : k + 1], FOUND[..., k : k + 1]) for k in range(20)]
    (row,) = scored(tmp_path / "slices", pairs, empty=empty).summary()
    assert row["dice_mean"] == pytest.approx(mean)
    (row,) = scored(tmp_path / "volume", [(REFERENCE, FOUND)], empty=empty).summary()
    assert row["dice_mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_volume_is_reported_whichever_way_the_slices_run(known_weights, tmp_path, axis):
    reference, found = (np.ascontiguousarray(np.moveaxis(item, 2, axis)) for item in (REFERENCE, FOUND))
    (case,) = scored(tmp_path, [(reference, found)]).cases
    assert case.scores[0].dice == pytest.approx(2 / 3)
    write(tmp_path / "nii/Case00.nii.gz", 100 * found.astype(np.int16), diagonal(1, 1, 3))
    write(tmp_path / "nii/Case00_segmentation.nii.gz", reference, diagonal(1, 1, 3))
    (case,) = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out").results
    (score,) = case.scores
    assert (score.dice, score.dice_source) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_evaluate_names_the_mean_over_volumes_and_the_pooled_figure(tmp_path):
    whole = np.zeros_like(REFERENCE)
    whole[2:14, 2:14, 2:18] = 1
    result = scored(tmp_path, [(REFERENCE, FOUND), (whole, whole)], out=tmp_path / "out")
    assert [case.scores[0].dice for case in result.cases] == [pytest.approx(2 / 3), 1.0]
    (row,) = json.loads((tmp_path / "out/summary.json").read_text())["classes"]
    assert row["dice_mean"] == pytest.approx((2 / 3 + 1) / 2)
    common, total = 2 * (FOUND.sum() + whole.sum()), FOUND.sum() + REFERENCE.sum() + 2 * whole.sum()
    assert row["dice_pooled"] == pytest.approx(common / total)
    assert row["dice_pooled"] > row["dice_mean"]  # the large structure weighs more
    assert not [name for name in row if "slice" in name]
