"""Labels are stored as integers, without slope or intercept; reading and writing never changes them."""

import numpy as np
import small_site as small
from small_volumes import diagonal, raw, run_whole, write

import tesla_med

CASE = 29
SHAPE = (16, 14, 4)
CLASSES = "classes=[{value: 0, name: background}, {value: 2, name: one}, {value: 7, name: two}]"
WHOLE = (CLASSES, "preprocessing.fill.enabled=false")
LABELS = np.random.default_rng(0).choice([0, 2, 7], SHAPE)


def test_ten_cycles_change_nothing(known_weights, tmp_path):
    """The network gives labels of 0, 2 and 7 to brightness of 0, 2 and 7, so that a mask repeats itself."""
    write(tmp_path / "0/Case00.nii.gz", LABELS.astype(np.int16), scl_slope=0.37, scl_inter=-100)
    weights = known_weights(classes=3)
    for number in range(10):
        out = tmp_path / f"out{number}"
        run_whole(tmp_path / str(number), weights, out, overrides=WHOLE)
        mask = out / "masks/Case00_mask.nii.gz"
        header, stored = raw(mask)
        assert stored.dtype == np.uint8
        assert np.array_equal(stored, LABELS)
        assert (float(header["scl_slope"]), float(header["scl_inter"])) == (1, 0)
        (tmp_path / str(number + 1)).mkdir()
        mask.rename(tmp_path / str(number + 1) / "Case00.nii.gz")


def test_values_a_little_below_a_label_are_that_label(known_weights, tmp_path):
    almost = np.where(LABELS == 2, 1.99997, np.where(LABELS == 7, 6.9999999, 0.0))
    write(tmp_path / "nii/Case00.nii.gz", LABELS.astype(np.int16))
    write(tmp_path / "nii/Case00_segmentation.nii.gz", almost, diagonal(1, 1, 3))
    files = {"image": ("Case*.nii.gz",), "masks": ({"pattern": "*_segmentation.nii.gz"},)}
    site = small.site(files=files)
    weights = known_weights(classes=3)
    result = run_whole(tmp_path / "nii", weights, tmp_path / "out", overrides=WHOLE, site=site)
    assert [(score.label, score.dice) for score in result.results[0].scores] == [(2, 1.0), (7, 1.0)]
    write(tmp_path / "references/Case00.nii.gz", almost, diagonal(1, 1, 3))
    (case,) = tesla_med.evaluate(result.out, tmp_path / "references").cases
    assert [(score.label, score.dice) for score in case.scores] == [(2, 1.0), (7, 1.0)]
