"""The program of Dice against passes: its arithmetic, its table and picture, and a whole quick run."""

from __future__ import annotations

import json

import programs
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def frontier():
    return programs.load("frontier")


def row(case, arm="tesla", *, site="D", updates=24, passes=100.0, source=80.0, adapted=85.0, guarded=84.0):
    about = {"model": "reference", "seed": 1, "site": site, "case": case, "arm": arm, "updates": updates}
    return about | {"passes": passes, "source": source, "adapted": adapted, "guarded": guarded}


def test_means_are_over_volumes_then_over_sites(frontier):
    rows = [row("a"), row("b"), row("c", site="E", adapted=55.0, guarded=80.0, passes=130.0)]
    (point,) = frontier.curves(rows)
    assert point["adapted"] == pytest.approx((85.0 + 55.0) / 2)
    assert point["guarded"] == pytest.approx((84.0 + 80.0) / 2)
    assert point["passes"] == pytest.approx(110.0)
    assert point["harm_adapted"] == pytest.approx(100.0 / 3)
    assert point["harm_guarded"] == 0.0
    assert point["volumes"] == 3


def test_a_mask_that_is_missing_counts_as_none_of_the_organ(frontier):
    (point,) = frontier.curves([row("a", adapted=None)])
    assert point["adapted"] == 0.0
    assert point["harm_adapted"] == 100.0


def test_only_a_method_with_a_guard_has_its_columns(frontier):
    text = frontier.table(frontier.curves([row("a"), row("a", "bn", updates=0)]))
    lines = text.splitlines()
    assert [line.count("|") for line in lines] == [8] * 4
    assert lines[2].endswith("|  |  |")
    assert lines[3].endswith("| 84.0 | 0.0 |")


def test_curves_are_drawn_and_taken_up(frontier, tmp_path, capsys):
    (tmp_path / "results").mkdir()
    rows = [row("a", updates=updates, passes=4.0 * updates) for updates in frontier.UPDATES]
    (tmp_path / "results" / "reference-1.json").write_text(json.dumps({"rows": rows}))
    picture = tmp_path / "curves.png"
    assert frontier.main(["--out", str(tmp_path), "--picture", str(picture)]) == 0  # nothing is run again
    assert picture.stat().st_size > 1000
    assert capsys.readouterr().out.count("| tesla |") == len(frontier.UPDATES)


@pytest.mark.slow
def test_a_quick_run(frontier, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(frontier, "UPDATES", (1, 2))
    call = ["--quick", "--device", "cpu", "--steps", "2", "--volumes", "1", "--out", str(tmp_path)]
    assert frontier.main([*call, "--models", "robust"]) == 0
    (path,) = (tmp_path / "results").iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert {item["arm"] for item in rows} == set(frontier.ARMS)
    passes = {(item["arm"], item["updates"]): item["passes"] for item in rows}
    for arm in ("tent", "released", "tesla", "vesta"):
        assert passes[arm, 1] < passes[arm, 2]
    assert passes["bn", 0] < passes["tent", 1] < passes["tesla", 1] < passes["vesta, one run", 1]
    assert passes["vesta, one run", 2] < passes["vesta", 2]
    assert "harmed, %" in capsys.readouterr().out
