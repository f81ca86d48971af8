"""Missed structures are counted beside the mean HD95; a second mean counts them with the diagonal of their
grid.
"""

import json

import numpy as np
import pytest
from small_volumes import diagonal, write

import tesla_med

CASE = 58
SHAPE = (24, 24, 4)
DIAGONAL = float(np.sqrt(24**2 + 24**2 + 12**2))


def block(at):
    mask = np.zeros(SHAPE, np.uint8)
    mask[at : at + 8, 8:16, 1:3] = 1
    return mask


def evaluated(folder, missed):
    """Ten cases, of which the last ``missed`` are empty; every other one is 4 pixels off."""
    for index in range(10):
        write(folder / f"references/Case{index:02d}.nii.gz", block(6), diagonal(1, 1, 3))
        found = block(10) if index < 10 - missed else block(10) * 0
        write(folder / f"masks/Case{index:02d}.nii.gz", found, diagonal(1, 1, 3))
    return tesla_med.evaluate(folder / "masks", folder / "references", out=folder / "out")


def test_missing_more_never_looks_better(tmp_path):
    figures = []
    for missed in (0, 5, 10):
        result = evaluated(tmp_path / str(missed), missed)
        (row,) = json.loads((tmp_path / str(missed) / "out/summary.json").read_text())["classes"]
        assert (row["missed"], row["cases"]) == (missed, 10)
        assert row["hd95_mm_mean"] == (pytest.approx(4.0) if missed < 10 else None)
        expected = (4.0 * (10 - missed) + DIAGONAL * missed) / 10
        assert row["hd95_mm_mean_or_diagonal"] == pytest.approx(expected)
        assert [case.scores[0].dice for case in result.cases].count(0.0) == missed
        figures.append(row["hd95_mm_mean_or_diagonal"])
    assert figures == sorted(figures)


def test_no_distance_is_above_the_diagonal(tmp_path):
    """One voxel in one corner, and one in the corner furthest from it."""
    for folder, corner in (("references", (0, 0, 0)), ("masks", (-1, -1, -1))):
        mask = np.zeros(SHAPE, np.uint8)
        mask[corner] = 1
        write(tmp_path / folder / "Case00.nii.gz", mask, diagonal(1, 1, 3))
    (case,) = tesla_med.evaluate(tmp_path / "masks", tmp_path / "references").cases
    between = float(np.sqrt(23**2 + 23**2 + 9**2))
    assert case.scores[0].hd95_mm == pytest.approx(between)
    assert between < DIAGONAL
