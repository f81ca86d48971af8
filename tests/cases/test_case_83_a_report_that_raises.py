"""A report that raises does not end the run: every case is done, the failing report is named at the end, the
exit code is 1, and --resume makes the report again.
"""

import json

import pytest
import small_site as small
import tile_site
from lines import adapt, run, work_there, write_site

from tesla_med.reports.confusion import ConfusionReport
from tesla_med.reports.html import HtmlReport
from tesla_med.reports.table import TableReport

CASE = 83
pytestmark = pytest.mark.usefixtures("one_thread")


def broken(*_, **__):
    raise RuntimeError("no font")


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 3)


@pytest.mark.parametrize("hook", ["case", "finish"])
def test_every_case_is_done_and_resume_makes_the_report(place, known_weights, monkeypatch, capsys, hook):
    weights = known_weights()
    line = (weights, "--method", "source")
    with monkeypatch.context() as patch:
        patch.setattr(HtmlReport, hook, broken)
        assert adapt(*line, reports="[html, table]") == 1
    said = capsys.readouterr()
    assert said.err.count("report html: not made: unexpected RuntimeError: no font") == 1
    assert "--resume makes it again" in said.err
    assert len(list((place / "out/masks").glob("*.nii.gz"))) == 3
    assert (place / "out/report/metrics.csv").is_file()
    assert not (place / "out/report/report.html").exists()
    record = small.record(place / "out")
    assert list(record["reports_failed"]) == ["html"]
    assert [case["status"] for case in record["cases"]] == ["ok"] * 3
    before = small.masks(place / "out")
    assert adapt(*line, "--resume", "--json", reports="[html, table]") == 0
    assert json.loads(capsys.readouterr().out)["reports_failed"] == {}
    assert (place / "out/report/report.html").is_file()
    assert small.masks(place / "out") == before


def test_a_report_on_tiles_too(tmp_path, tile_weights, monkeypatch, capsys):
    tile_site.make_tiles(tmp_path / "nii", 2)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    line = {"pipeline": "kather", "reports": "[confusion, table]"}
    with monkeypatch.context() as patch:
        patch.setattr(ConfusionReport, "finish", broken)
        assert adapt(tile_weights, "--method", "source", **line) == 1
    assert "report confusion: not made" in capsys.readouterr().err
    assert (tmp_path / "out/predictions.csv").is_file()
    assert adapt(tile_weights, "--method", "source", "--resume", **line) == 0
    assert (tmp_path / "out/report/confusion.png").is_file()


def test_going_back_is_not_stopped_by_a_report(place, small_weights, monkeypatch, capsys):
    assert adapt(small_weights, "--reset", "case") == 0
    with monkeypatch.context() as patch:
        patch.setattr(TableReport, "finish", broken)
        assert run(["rollback", "out", "--to-case", "source"]) == 1
    assert "report table: not made" in capsys.readouterr().err
    assert small.record(place / "out")["rolled_back"]["to_case"] == 0
    assert run(["rollback", "out", "--to-case", "source"]) == 0
