"""The page of a study: what it says of every site, and that it stays small and closed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from tesla_med.study.page import rows_of, write_page
from tesla_med.study.tables import change_in


@dataclass(frozen=True)
class Cell:
    """Stands in for a cell of a study."""

    name: str
    key: dict = field(hash=False)

    def folder(self, out):
        return out / "cells" / self.name


def cell(site, method, seed=0, weights="source"):
    name = f"{site}/{method}-N-O-seed-{seed}-{weights}"
    return Cell(name, {"site": site, "weights": weights, "method": method, "protocol": "N-O", "seed": seed})


def case(name, source, adapted, **more):
    about = {"case": name, "status": "ok", "trusted": True, "metric": "dice", "predicted": None}
    return {**about, "source": source, "adapted": adapted, **more}


def written(out, cells, failed=(), problems=()):
    grid = SimpleNamespace(cells=tuple(item for item, _ in cells), problems=tuple(problems))
    contents = {item.name: {"cases": cases} for item, cases in cells if cases is not None}
    path = write_page(out, SimpleNamespace(name="a <study>"), grid, contents, dict(failed))
    return path.read_text(encoding="utf-8"), rows_of(out, grid, contents)


def test_changes_are_those_of_the_cases_that_both_have(tmp_path):
    """An organ is painted where there is none: a loss of 100 points, and no Dice of the source."""
    cases = [case("a", 0.9, 0.9), case("b", 0.8, 0.85), case("c", None, 0.0), case("d", None, None)]
    _, (first,) = written(tmp_path, [(cell("D", "tesla"), cases)])
    assert first.source == pytest.approx(85)
    assert first.adapted == pytest.approx(100 * 1.75 / 3)
    assert first.change == pytest.approx((0 + 5 - 100) / 3)
    assert first.harm == (1, 1, 1)


@pytest.mark.parametrize(
    ("source", "adapted", "status", "change"),
    [
        (0.8, 0.7, "ok", pytest.approx(-0.1)),
        (None, 0.0, "ok", -1.0),
        (0.0, None, "empty", 1.0),
        (None, None, "empty", None),
        (None, 0.7, "ok", None),
        (None, 0.0, "failed", None),
    ],
)
def test_the_change_of_a_case(source, adapted, status, change):
    assert change_in(case("a", source, adapted, status=status)) == change


def test_means_changes_harm_and_trust(tmp_path):
    report = tmp_path / "cells" / "D" / "tesla-N-O-seed-0-source" / "report" / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("x", encoding="utf-8")
    cells = [
        (cell("D", "tesla"), [case("a", 0.8, 0.9), case("b", 0.7, 0.64, trusted=False)]),
        (cell("D", "tesla", seed=1), [case("a", 0.8, 0.785), case("b", None, None, status="failed")]),
        (cell("E", "tesla"), [case("c", None, None, predicted=0.71), case("d", None, None, predicted=0.69)]),
    ]
    page, (first, second) = written(tmp_path, cells)
    assert (first.site, first.what, first.cases, first.failed, first.untrusted) == ("D", "tesla N-O", 4, 1, 1)
    assert first.source == pytest.approx(100 * (0.8 + 0.7 + 0.8) / 3)
    assert first.change == pytest.approx(100 * (0.1 - 0.06 - 0.015) / 3)
    assert first.harm == (2, 1, 1)
    assert [dot.name for dot in first.dots] == ["a, seed 0", "b, seed 0", "a, seed 1"]
    assert first.reports == (("cells/D/tesla-N-O-seed-0-source/report/report.html", "seed 0"),)
    assert not second.scored
    assert second.source is None
    assert second.change is None
    assert second.adapted == pytest.approx(70.0)
    for text in ("+0.8", "70.0 predicted", "b, seed 0: 70.0 to 64.0", "a &lt;study&gt;", "3 of 3 cells done"):
        assert text in page


def test_what_was_not_done_is_named_and_the_page_loads_nothing(tmp_path):
    broken = cell("D", "bn")
    cells = [(broken, None), (cell("D", "tesla"), [case("a", 0.8, 0.9)])]
    page, rows = written(tmp_path, cells, {broken.name: "no space <left>"}, [("F", "no images")])
    assert len(rows) == 1
    assert "1 of 2 cells done" in page
    assert "no space &lt;left&gt;" in page
    assert "F: no images" in page
    assert not re.search(r"(?:src|href)=\"(?!cells/)", page)
    assert "http" not in page
    assert "<script" not in page


def test_weights_are_named_where_there_are_several(tmp_path):
    cells = [(cell("D", "tesla", weights=name), [case("a", 0.5, 0.6)]) for name in ("one", "two")]
    _, rows = written(tmp_path, cells)
    assert [row.what for row in rows] == ["tesla N-O, one", "tesla N-O, two"]


def test_forty_sites_of_fifty_cases_stay_small(tmp_path):
    cells = [
        (
            cell(f"site{site:02d}", method),
            [case(f"patient-{index:04d}", 0.6 + index / 200, 0.7 + index / 250) for index in range(50)],
        )
        for site in range(40)
        for method in ("bn", "tent", "tesla")
    ]
    page, rows = written(tmp_path, cells)
    assert len(rows) == 120
    assert page.count("<ellipse") == 2 * 120 * 50
    assert Path(tmp_path / "study.html").stat().st_size < 30e6
