"""Only probabilities are scored: other values are an error, and nothing is guessed from the range of a
batch.
"""

import numpy as np
import pytest

from tesla_med.errors import DataError
from tesla_med.scoring.areas import count_case
from tesla_med.scoring.calibration import count_binary

CASE = 62
PROBABILITY, TRUTH = np.array([0.2, 0.4]), np.array([False, False])


def test_a_value_of_five_is_an_error_and_changes_no_other():
    assert count_binary(PROBABILITY, TRUTH, 10).ece == pytest.approx(0.3)
    with pytest.raises(DataError, match=r"\[0, 1\]"):
        count_binary(np.append(PROBABILITY, 5.0), np.append(TRUTH, True), 10)


@pytest.mark.parametrize("value", [5.0, -0.5, np.nan])
def test_of_whole_cases_too(value):
    probs = np.full((2, 2, 2, 1), 0.5, np.float32)
    broken = probs.copy()
    broken[1, 0, 0, 0] = value
    reference, region = np.zeros((2, 2, 1), int), np.ones((2, 2, 1), bool)
    for pair in ((probs, broken), (broken, probs)):
        with pytest.raises(DataError):
            count_case(*pair, reference, region, (0, 1))


def test_batches_of_any_size_give_the_same():
    generator = np.random.default_rng(0)
    probability = generator.random(60)
    truth = generator.random(60) < probability
    whole = count_binary(probability, truth, 10)
    for size in (1, 7, 30):
        parts = [
            count_binary(probability[start : start + size], truth[start : start + size], 10)
            for start in range(0, 60, size)
        ]
        total = sum(parts[1:], start=parts[0])
        assert total.ece == pytest.approx(whole.ece)
        assert (total.brier, total.nll) == (pytest.approx(whole.brier), pytest.approx(whole.nll))
