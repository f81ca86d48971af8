"""After a rollback whatever described undone masks is made again or removed, pictures and events too."""

import json

import pytest
from lines import adapt, run, sets, work_there

CASE = 111
pytestmark = pytest.mark.usefixtures("one_thread")
GUARDED = sets("quality.intercept=0.9", "quality.slope=0.01")


def predicted(out):
    content = json.loads((out / "report/predicted_dice.json").read_text(encoding="utf-8"))
    return {item["case"] for item in content["cases"]}


@pytest.mark.slow
def test_no_figure_of_an_undone_mask_remains(tmp_path, small_weights, monkeypatch, capsys):
    work_there(tmp_path, monkeypatch, 3)
    more = "--guard", "--reset", "case", *GUARDED
    assert adapt(small_weights, *more, reports="[table, calibration, quality, html]") == 0
    out = tmp_path / "out"
    named = predicted(out)
    capsys.readouterr()
    assert run(["rollback", "out", "--to-case", "source", "--json"]) == 0
    undone = set(json.loads(capsys.readouterr().out)["undone"])
    assert undone & named
    assert predicted(out) == named - undone
    assert (out / "report/predicted_dice.png").exists() == bool(named - undone)
