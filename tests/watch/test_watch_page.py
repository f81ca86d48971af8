"""The page and the curves of a watched folder, from what is kept of the cases."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import small_site as small
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tesla_med.errors import OutputError
from tesla_med.watch.board import Board
from tesla_med.watch.drift import find_drifts
from tesla_med.watch.history import History, Seen
from tesla_med.watch.page import LATEST, Shown, write_page
from tesla_med.watch.statistics import NAMES
from tesla_med.watch.watcher import figures_of


def cases(count, shift=0.0, after=100):
    generator = np.random.default_rng(0)
    found = []
    for number in range(count):
        values = generator.normal(10, 1, len(NAMES)) + (shift if number >= after else 0)
        about = {"status": "ok", "used": "adapted", "trusted": number % 10 != 3, "reason": "a <reason>"}
        about |= {"predicted_dice": 0.8, "statistics": dict(zip(NAMES, values.tolist(), strict=True))}
        name, day = f"P{number}", f"2026-01-{1 + number % 28:02d}T10:00:00+00:00"
        found.append(Seen(number=number, case=name, done=day, state="s", input_sha256="h", **about))
    return found


def page(tmp_path, seen, **changes):
    figures = figures_of(seen)
    about = {"aside": {}, "waiting": (), "changed": (), "skipped": (), "drifts": find_drifts(figures)}
    about |= {"periods": (40, 20)}
    shown = Shown(seen=seen, figures=figures, **(about | changes))
    plan = SimpleNamespace(site=small.site(), method="tesla", protocol="N-O")
    return write_page(plan, History(tmp_path), Path("in"), shown).read_text(encoding="utf-8")


def test_a_drift_stands_at_the_top(tmp_path):
    text = page(tmp_path, cases(160, shift=3))
    assert "The site has drifted away" in text
    assert "noise: standard deviation / median of the body: median 1" in text
    assert "since P1" in text
    assert text.count(": has drifted</figcaption>") == len(NAMES)
    assert "The site has drifted away" not in page(tmp_path, cases(160))
    assert "No drift: the last 20 cases look like the first 40" in page(tmp_path, cases(160))
    assert "before 60 cases are done" in page(tmp_path, cases(59))


def test_a_past_drift_is_listed_as_one(tmp_path):
    seen = cases(200, shift=3, after=100)
    back = cases(200)
    text = page(tmp_path, [*seen[:130], *back[130:]])
    assert "Earlier drifts" in text
    assert "The site has drifted away" not in text


def test_the_page_is_one_file_and_holds_no_markup_of_others(tmp_path):
    seen = cases(LATEST + 30)
    hostile = {"<script>alert(1)</script>": "<b>bold</b>"}
    text = page(
        tmp_path, seen, aside=hostile, changed=("P0",), waiting=("P999",), skipped=[(Path("a.txt"), "no")]
    )
    assert "<script" not in text
    assert "<b>" not in text
    assert not re.search(r"(?:src|href)=\"(?!cases/)", text)
    assert f"The latest {LATEST} of {len(seen)}" in text
    assert text.index("P229<") < text.index("P228<")
    assert "not trusted" in text
    assert "a.txt: no" in text
    assert text.count("h0M") > 1000


def test_reports_of_cases_are_linked_where_they_are(tmp_path):
    report = tmp_path / "cases" / "P0" / "report" / "report.html"
    report.parent.mkdir(parents=True)
    report.touch()
    text = page(tmp_path, cases(2))
    assert re.findall(r'href="([^"]*)"', text) == ["cases/P0/report/report.html"]


def test_curves_are_written_anew_at_every_start(tmp_path):
    seen = cases(12)
    for _ in range(2):
        board = Board(tmp_path, seen[:10])
        for item in seen[10:]:
            board.add(item)
        board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = events.Scalars("image/noise")
    assert [point.step for point in points] == list(range(12))
    assert points[3].value == pytest.approx(seen[3].statistics["noise"])
    assert points[3].wall_time == 1767520800
    assert events.Scalars("share/not trusted")[-1].value == pytest.approx(1 / 12)
    assert events.Scalars("dice/predicted")[0].value == pytest.approx(0.8)


def test_a_damaged_record_is_named_and_half_written_ones_are_removed(tmp_path):
    history = History(tmp_path)
    for item in cases(3):
        history.keep(item)
    left = tmp_path / ".done" / ".tmp-0123.json"
    left.write_text("{", encoding="utf-8")
    assert [item.case for item in history.read()] == ["P0", "P1", "P2"]
    assert not left.exists()
    (tmp_path / ".done" / "P1.json").write_text("{", encoding="utf-8")
    with pytest.raises(OutputError, match=r"P1.json: cannot be read: it is damaged; put it back, or remove"):
        history.read()


def test_the_table_has_a_row_per_case(tmp_path):
    lines = History(tmp_path).write_table(cases(2)).read_text(encoding="utf-8").splitlines()
    header, first = lines[0].split(","), lines[1].split(",")
    assert len(lines) == 3
    assert dict(zip(header, first, strict=True))["case"] == "P0"
    assert dict(zip(header, first, strict=True))["run"] == "cases/P0"
    assert set(NAMES) <= set(header)
