"""The program that records runs of a case: which run is taken, its table, and a whole quick run."""

from __future__ import annotations

import json

import programs
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def restarts():
    return programs.load("restarts")


def row(steady, dice):
    runs = [{"steadiness": {"24": value}} for value in steady]
    masks = {f"usual.{number}.24.adapted": value for number, value in enumerate(dice, 1)}
    about = {"model": "reference", "seed": 1, "site": "D", "case": "a", "dice": {"source": 50.0} | masks}
    return about | {"settings": {"usual": {"runs": runs}}}


def test_of_equally_steady_runs_the_first_is_taken(restarts):
    found = row((0.5, 0.9, 0.9), (10.0, 20.0, 30.0))
    assert restarts.steadiest_of(found, "usual", (1, 2, 3), 24) == 2
    assert restarts.steadiest_of(found, "usual", (1, 3), 24) == 3


def test_what_a_number_of_runs_is_worth_is_the_mean_over_choices_of_them(restarts):
    found = row((0.5, 0.9, 0.7), (10.0, 20.0, 60.0))
    assert restarts.worth(found, "usual", 1, 24) == pytest.approx(30.0)
    assert restarts.worth(found, "usual", 2, 24) == pytest.approx((20.0 + 60.0 + 20.0) / 3)
    assert restarts.worth(found, "usual", 3, 24) == pytest.approx(20.0)


def test_more_runs_than_were_made_are_left_blank(restarts):
    lines = restarts.table([row((0.5, 0.9), (10.0, 20.0))]).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["reference 1", "D", "1", "50.0", "0.0", "15.0", "20.0", "", "50.0"]


def three_runs(steady, dice, source=50.0):
    """A volume with three runs: steadiness and Dice of each by checkpoint."""
    runs = [{"steadiness": dict(zip(("8", "16", "24"), item, strict=True))} for item in steady]
    masks = {
        f"usual.{number}.{updates}.adapted": value
        for number, item in enumerate(dice, 1)
        for updates, value in zip((8, 16, 24), item, strict=True)
    }
    about = {"model": "reference", "seed": 1, "site": "D", "case": "a"}
    means = {"source": source, "usual.mean3.24": 70.0}
    return about | {"dice": means | masks, "settings": {"usual": {"runs": runs}}}


def test_what_a_rule_gives_and_how_often_it_harms(restarts):
    steady = [(0.9, 0.5, 0.1), (0.1, 0.2, 0.3), (0.5, 0.6, 0.2)]
    found = three_runs(steady, [(10.0, 20.0, 30.0), (40.0, 50.0, 60.0), (70.0, 80.0, 90.0)])
    assert restarts.steadiest_number(found) == [10.0, 60.0, 80.0]
    lines = {
        line.split("|")[1].strip(): line.split("|")[2:4] for line in restarts.summary([found]).splitlines()
    }
    figures = {name: tuple(cell.strip() for cell in cells) for name, cells in lines.items()}
    assert figures["8 updates, steadiest of 1"] == ("40.0", "66.7")
    assert figures["8 updates, steadiest of 3"] == ("10.0", "100.0")
    assert figures["24 updates, steadiest of 3"] == ("60.0", "0.0")
    assert figures["number of updates by steadiness, 1 run"] == ("50.0", "33.3")
    assert figures["24 updates, mean of the probabilities of 3"] == ("70.0", "0.0")


@pytest.mark.slow
def test_a_quick_run_is_taken_up_where_it_was(restarts, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(restarts, "CHECKPOINTS", (1, 2))
    monkeypatch.setattr(restarts, "RUNS", 2)
    settings = {"usual": {"updates_per_case": 2, "weak_views": 1}}
    monkeypatch.setattr(restarts, "SETTINGS", settings)
    call = ["--quick", "--device", "cpu", "--steps", "2", "--volumes", "1", "--out", str(tmp_path)]
    call += ["--models", "robust", "--runs", "2", "--masks", "--settings", "usual"]
    assert restarts.main(call) == 0
    files = sorted((tmp_path / "volumes").glob("*/*/*.json"))
    assert [path.parent.name for path in files] == ["easy", "hard"]
    assert all(path.with_suffix(".npz").is_file() for path in files)
    content = json.loads(files[0].read_text())
    runs = content["settings"]["usual"]["runs"]
    assert len(runs) == 2
    assert set(runs[1]["steadiness"]) == {"1", "2"}
    assert {"source", "own", "half", "usual.1.2.part", "usual.2.2.adapted", "usual.mean2.2"} <= set(
        content["dice"]
    )
    files[0].unlink()
    written = files[1].stat().st_mtime_ns
    assert restarts.main(call) == 0
    assert files[0].is_file()
    assert files[1].stat().st_mtime_ns == written
    assert "| robust 1 | hard | 1 |" in capsys.readouterr().out
