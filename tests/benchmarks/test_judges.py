"""The program of other judges: what a learned judge may know, and what its table says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import programs
import pytest

ZOO = Path(__file__).resolve().parents[2] / "docs" / "reference" / "results" / "zoo"


@pytest.fixture(scope="module")
def judges():
    return programs.load("judges")


@pytest.fixture(scope="module")
def rows(judges):
    names = ("reference-1.json", "robust-instance-norm-1.json")
    found = judges.zoo.finished(judges.zoo.parse(["--out", str(ZOO), "--table"]))
    wanted = {name.removesuffix(".json").rsplit("-", 1)[0].replace("-", " ") for name in names}
    return [row for row in found if row["model"].replace(",", "") in wanted and row["seed"] == 1]


def without_labels(row):
    return {key: value for key, value in row.items() if key not in ("dice", "classes")} | {
        "candidates": {name: {"dice": 0.0} for name in row["candidates"]}
    }


def test_a_learned_judge_knows_no_label(judges, rows):
    for row in rows[:5]:
        for name in row["candidates"]:
            assert judges.features(row, name) == judges.features(without_labels(row), name)


def test_a_site_has_no_part_in_the_choices_there(judges, rows):
    """Changed labels of a site change what is taken on the others, never on it."""

    def taken(given):
        found = judges.learned(given, judges.LEARNED["ridge"], 0.0)
        return [name for name, row in zip(found, given, strict=True) if row["site"] == "D"]

    changed = []
    for row in rows:
        items = row["candidates"].items()
        flipped = {name: item | {"dice": 100.0 - (item["dice"] or 0.0)} for name, item in items}
        changed.append(row | {"candidates": flipped if row["site"] == "D" else row["candidates"]})
    assert {row["site"] for row in rows} == {"D", "E"}
    assert taken(changed) == taken(rows)
    other = [row | {"site": {"D": "E", "E": "D"}[row["site"]]} for row in changed]
    assert judges.learned(other, judges.LEARNED["ridge"], 0.0) != judges.learned(
        [row | {"site": {"D": "E", "E": "D"}[row["site"]]} for row in rows], judges.LEARNED["ridge"], 0.0
    )


def test_the_rule_with_the_thresholds_of_the_pipelines_is_the_guard(judges, rows):
    assert judges.ruled(rows, 0.2, 0.3, mixed=False) == [row["taken"] for row in rows]


def test_the_best_of_all_loses_nothing(judges, rows):
    best = [max(row["candidates"], key=lambda name: judges.dice_of(row, name)) for row in rows]
    cells = [cell.strip() for cell in judges.line("best", rows, best).strip("|").split("|")]
    assert cells[2:] == ["0.0", "0.0", "0.0", "0.0"]
    plain = judges.line("source", rows, ["source"] * len(rows)).split("|")
    assert float(cells[1]) > float(plain[2])
    assert np.isfinite(float(plain[2]))
