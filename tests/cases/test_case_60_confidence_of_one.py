"""Bins are (low, high], and the last one includes a confidence of exactly 1."""

import numpy as np
import pytest

from tesla_med.scoring.areas import count_case
from tesla_med.scoring.calibration import count_binary

CASE = 60


def plain_ece(probability, truth, bins):
    """Return the calibration error by its definition, bin after bin."""
    edges = np.linspace(0, 1, bins + 1)
    total = 0.0
    for index in range(bins):
        inside = (probability > edges[index]) & (probability <= edges[index + 1])
        if index == 0:
            inside |= probability == 0
        if inside.any():
            total += inside.sum() * abs(truth[inside].mean() - probability[inside].mean())
    return total / len(probability)


def test_the_last_bin_is_closed():
    probability, truth = np.array([0.95, 1.0]), np.array([True, False])
    counts = count_binary(probability, truth, 10)
    assert counts.ece == pytest.approx(0.475)
    assert counts.ece == pytest.approx(plain_ece(probability, truth, 10))
    assert list(counts.count) == [0] * 9 + [2]


def test_as_the_definition_says_with_ones_and_zeros_among_the_rest():
    generator = np.random.default_rng(0)
    probability = generator.choice([0.0, 0.1, 0.5, 0.95, 1.0, *generator.random(20)], 500)
    truth = generator.random(500) < probability**2
    assert count_binary(probability, truth, 15).ece == pytest.approx(plain_ece(probability, truth, 15))


def test_the_figures_of_a_case_follow_the_same_rule():
    foreground = np.array([0.95, 1.0], np.float32).reshape(1, 2, 1)
    probs = np.stack([1 - foreground, foreground])
    reference = np.array([1, 0]).reshape(1, 2, 1)
    counts = count_case(probs, probs, reference, np.ones((1, 2, 1), bool), (0, 1), 10)
    found = counts["adapted"]["region"]["1"]
    assert found["count"][-1] == 2
    assert abs(found["correct"][-1] - found["confidence"][-1]) / 2 == pytest.approx(0.475)
