"""The program that measures the report: what it counts lies there, and its cases differ."""

from __future__ import annotations

import programs
import pytest


@pytest.fixture(scope="module")
def program():
    return programs.load("report_time")


def test_what_is_counted_is_there(program, tmp_path):
    made = program.generate(4, 32, True)
    row = program.measure(made, 8, tmp_path, [])
    files = sorted((tmp_path / "report/slices").rglob("*.js"))
    assert row["files_beside"] == len(files) == 8
    assert len({path.read_bytes() for path in files}) == 8
    assert row["slices_mb"] == pytest.approx(sum(path.stat().st_size for path in files) / 1e6)
    assert row["page_mb"] == pytest.approx((tmp_path / "report/report.html").stat().st_size / 1e6)
    assert row["seconds"] == pytest.approx(row["seconds_of_page"] + 8 * row["ms_per_case"] / 1000)
    assert all('"entropy":"data:image/png' in path.read_text() for path in files)
    bare = program.measure(
        made, 2, tmp_path / "bare", ["report.slices=false", "report.max_cases_with_overlays=0"]
    )
    assert bare["files_beside"] == 0
    assert bare["page_mb"] < row["page_mb"]
    lines = program.table([row, bare]).splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["every", "slice"], ["no", "pictures"]]
