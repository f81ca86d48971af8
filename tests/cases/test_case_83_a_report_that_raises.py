"""A report that raises does not end the run: every case is done, the failing report is named at the end, the
exit code is 1, and --resume makes the report again.
"""

import json
from contextlib import contextmanager

import matplotlib.figure
import PIL.Image
import pytest
import small_site as small
import tile_site
from lines import adapt, run, work_there, write_site

CASE = 83
pytestmark = pytest.mark.usefixtures("one_thread")


DRAWING = {matplotlib.figure.Figure: "savefig", PIL.Image.Image: "save"}


@pytest.fixture
def undrawable(monkeypatch):
    """Return a context in which no figure, or no picture, of a format can be drawn."""
    originals = {of: getattr(of, name) for of, name in DRAWING.items()}

    def failing(original, kind):
        def save(self, *args, **kwargs):
            if str(kwargs.get("format", "")).lower() == kind:
                raise RuntimeError("no font")
            return original(self, *args, **kwargs)

        return save

    @contextmanager
    def within(kind):
        with monkeypatch.context() as patch:
            for of, name in DRAWING.items():
                patch.setattr(of, name, failing(originals[of], kind))
            yield

    return within


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 3)


FAILING = {
    "html": ("jpeg", "report.html"),
    "calibration": ("png", "reliability.png"),
}  # on a case, at the end


@pytest.mark.parametrize("name", FAILING)
def test_every_case_is_done_and_resume_makes_the_report(place, known_weights, undrawable, capsys, name):
    weights = known_weights()
    line = (weights, "--method", "source")
    kind, file = FAILING[name]
    with undrawable(kind):
        assert adapt(*line, reports=f"[{name}, table]") == 1
    said = capsys.readouterr()
    assert said.err.count(f"report {name}: not made: unexpected RuntimeError: no font") == 1
    assert "--resume makes it again" in said.err
    assert len(list((place / "out/masks").glob("*.nii.gz"))) == 3
    assert (place / "out/report/metrics.csv").is_file()
    assert not (place / "out/report" / file).exists()
    record = small.record(place / "out")
    assert list(record["reports_failed"]) == [name]
    assert [case["status"] for case in record["cases"]] == ["ok"] * 3
    before = small.masks(place / "out")
    assert adapt(*line, "--resume", "--json", reports=f"[{name}, table]") == 0
    assert json.loads(capsys.readouterr().out)["reports_failed"] == {}
    assert (place / "out/report" / file).is_file()
    assert small.masks(place / "out") == before


def test_a_report_on_tiles_too(tmp_path, tile_weights, monkeypatch, undrawable, capsys):
    tile_site.make_tiles(tmp_path / "nii", 2)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    line = {"pipeline": "kather", "reports": "[confusion, table]"}
    with undrawable("png"):
        assert adapt(tile_weights, "--method", "source", **line) == 1
    assert "report confusion: not made" in capsys.readouterr().err
    assert (tmp_path / "out/predictions.csv").is_file()
    assert adapt(tile_weights, "--method", "source", "--resume", **line) == 0
    assert (tmp_path / "out/report/confusion.png").is_file()


def test_going_back_is_not_stopped_by_a_report(place, small_weights, undrawable, capsys):
    assert adapt(small_weights, "--reset", "case", reports="[calibration]") == 0
    with undrawable("png"):
        assert run(["rollback", "out", "--to-case", "source"]) == 1
    assert "report calibration: not made" in capsys.readouterr().err
    assert small.record(place / "out")["rolled_back"]["to_case"] == 0
    assert run(["rollback", "out", "--to-case", "source"]) == 0
