"""Calibration of the rows of a comparison: means over what was counted, and no figure where nothing was."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tesla_med.compare import calibration
from tesla_med.compare.calibration import count_calibration
from tesla_med.compare.figures import summarise
from tesla_med.compare.plots import draw
from tesla_med.compare.tables import grid
from tesla_med.scoring.calibration import CalibrationCounts, joined_bins

KEY = ("tesla", "N-O")
NONE = np.zeros(4)


def task_of(found):
    """Return what stands in for a task that counts this of its cases."""
    parts = [{KEY: item} for item in found]
    return SimpleNamespace(site=None, find=lambda *_: None, recount=lambda items, runs: iter(parts))


@pytest.fixture
def counted(monkeypatch):
    """Count what two cases of site A and one of site B gave."""

    def count(of_a, of_b):
        monkeypatch.setattr(calibration, "other_sites", lambda _: [])
        tasks = {"A": task_of(of_a), "B": task_of(of_b)}
        return count_calibration(tasks, {"A": {}, "B": {}}, None)

    return count


def summary_of(measured, bins):
    rows = [
        {"row": name, "protocol": "N-O", "site": site, "case": case, "seed": 0, "label": 1}
        | {"dice": 0.7, "dice_source": 0.6, "status": "ok"}
        for name in ("source", "tesla")
        for site in ("A", "B")
        for case in ("1", "2")
    ]
    order = (("source", "N-O"), KEY)
    found = summarise(rows, sites=("A", "B"), order=order, baseline="source", calibration=measured)
    return replace(found, reliability={key: joined_bins(items) for key, items in bins.items()})


def counts(voxels, confidence, correct, brier, nll):
    bins = (np.array([0, 0, value, 0.0]) for value in (voxels, confidence, correct))
    return CalibrationCounts(*bins, brier, nll)


def test_means_are_over_what_was_counted(counted):
    measured, _ = counted([counts(6, 4.0, 3, 1.2, 3.0), counts(4, 2.5, 3, 0.8, 1.0)], [counts(2, 1, 1, 1, 1)])
    want = {"ece": 0.05, "brier": 0.2, "nll": 0.4}
    assert measured[(*KEY, "A")] == pytest.approx(want)
    assert measured[(*KEY, "B")] == pytest.approx({"ece": 0.0, "brier": 0.5, "nll": 0.5})


def test_where_nothing_was_counted_there_is_no_figure(counted):
    empty = CalibrationCounts(NONE, NONE, NONE)
    measured, bins = counted([empty], [counts(2, 1.2, 1, 1, 1)])
    assert measured[(*KEY, "A")] == {"ece": None, "brier": None, "nll": None}
    summary = summary_of(measured, bins)
    header, body = grid(summary)
    assert [line[header.index("ECE")] for line in body] == ["", "n/a"]
    assert {"calibration.png", "reliability.png"} <= set(draw(summary, []))


def test_nothing_at_all(counted):
    empty = CalibrationCounts(NONE, NONE, NONE)
    summary = summary_of(*counted([empty], [empty]))
    header, body = grid(summary)
    assert [line[header.index("ECE")] for line in body] == ["", "n/a"]
    assert draw(summary, [])
