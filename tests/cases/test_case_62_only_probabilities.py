"""Only probabilities are scored: other values are an error, and nothing is guessed from the range of a
batch.
"""

import csv

import numpy as np
import pytest
from lines import run

import tesla_med

CASE = 62
NAMES = ("one", "two")


def table(path, rows):
    """Write a table of tiles from rows of label, p_one and p_two."""
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["tile", "label", "prediction", "p_one", "p_two"])
        for number, (label, *probs) in enumerate(rows):
            writer.writerow([f"{number}.png", label, NAMES[int(np.argmax(probs))], *probs])
    return path


@pytest.mark.parametrize("pair", [(5.0, -4.0), (5.0, 0.2), (0.2, 5.0), (-0.5, 1.5), ("nan", 0.4)])
def test_another_value_is_an_error_that_names_the_tile(tmp_path, capsys, pair):
    rows = [("two", 0.2, 0.8), ("two", 0.4, 0.6), ("one", *pair)]
    path = table(tmp_path / "predictions.csv", rows)
    assert run(["evaluate", "--predictions", path]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "2.png" in told
    assert "probabilities" in told


def test_small_values_alone_are_still_probabilities(tmp_path):
    """No value is far from the middle, as logits might be."""
    path = table(tmp_path / "predictions.csv", [("one", 0.45, 0.55), ("one", 0.4, 0.6)])
    figures = tesla_med.evaluate(path).adapted
    assert figures.ece == pytest.approx((0.55 + 0.6) / 2)


@pytest.mark.parametrize("size", [1, 7, 30])
def test_tables_of_any_size_give_the_same(tmp_path, size):
    """Sums over parts of a table are those of the whole one."""
    generator = np.random.default_rng(0)
    first = generator.random(60)
    labels = np.where(generator.random(60) < first, *NAMES)
    rows = list(zip(labels, first, 1 - first, strict=True))
    whole = tesla_med.evaluate(table(tmp_path / "whole.csv", rows)).adapted
    parts = [
        tesla_med.evaluate(table(tmp_path / f"{start}.csv", rows[start : start + size])).adapted
        for start in range(0, 60, size)
    ]
    counts = [len(rows[start : start + size]) for start in range(0, 60, size)]
    for name in ("brier", "nll", "accuracy"):
        values = [getattr(part, name) for part in parts]
        assert np.average(values, weights=counts) == pytest.approx(getattr(whole, name))
