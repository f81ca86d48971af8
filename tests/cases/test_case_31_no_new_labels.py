"""Probabilities are resampled, never labels: every value in a mask is a class of the pipeline."""

import numpy as np
import small_site as small
from small_volumes import diagonal, run_whole, write

CASE = 31
CLASSES = "classes=[{value: 0, name: background}, {value: 2, name: one}, {value: 4, name: other}]"


def test_two_labels_side_by_side_after_resampling(known_weights, tmp_path):
    data = np.zeros((40, 36, 12), np.int16)
    data[10:20, 8:28, 3:9] = 50
    data[20:30, 8:28, 3:9] = 100
    write(tmp_path / "nii/Case00.nii.gz", data, diagonal(1, 1, 3))
    overrides = (CLASSES, "preprocessing.spacing=[1.3,1.3,1.3]", "preprocessing.fill.enabled=false")
    result = run_whole(tmp_path / "nii", known_weights(classes=3), tmp_path / "out", overrides=overrides)
    assert result.results[0].status == "ok"
    mask = small.labels(result.out, "Case00")
    assert set(np.unique(mask)) == {0, 2, 4}
    assert np.mean(mask == np.array([0, 2, 4])[data // 50]) > 0.98
