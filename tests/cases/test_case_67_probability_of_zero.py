"""Log-loss clips probabilities to at least 1e-12 and counts where that mattered; Brier is unaffected."""

import numpy as np
import pytest

from tesla_med.errors import DataError
from tesla_med.scoring.areas import count_case
from tesla_med.scoring.calibration import EPSILON, count_binary
from tesla_med.scoring.summary import merge, summarise

CASE = 67


def test_one_true_voxel_of_probability_zero():
    probability, truth = np.array([0.0, 0.5, 1.0, 0.25]), np.array([True, True, True, False])
    found = count_binary(probability, truth, 10).summary()
    assert EPSILON == 1e-12
    assert found["nll"] == pytest.approx(-(np.log(1e-12) + np.log(0.5) + np.log(0.75)) / 4)
    assert found["clipped"] == 1
    assert found["brier"] == pytest.approx((1 + 0.25 + 0 + 0.0625) / 4)


def test_in_the_figures_of_a_run():
    foreground = np.array([0.0, 0.5, 0.9, 0.8], np.float32).reshape(2, 2, 1)
    probs = np.stack([1 - foreground, foreground])
    everything = np.ones((2, 2, 1), bool)
    found = summarise(merge([count_case(probs, probs, everything.astype(int), everything, (0, 1))]))
    figures = found["region"]["adapted"]["1"]
    assert found["epsilon"] == 1e-12
    assert np.isfinite(figures["nll"])
    assert (figures["clipped"], figures["voxels"]) == (1, 4)


def test_nothing_is_clipped_in_secret():
    assert count_binary(np.array([1e-9, 1.0]), np.array([True, True]), 10).clipped == 0
    with pytest.raises(DataError):
        count_binary(np.array([-3.0, 4.0]), np.array([False, True]), 10)  # logits
