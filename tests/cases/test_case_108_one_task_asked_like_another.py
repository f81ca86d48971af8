"""Every option is honoured for every task or refused by name, before anything is read or written."""

import csv
import json

import pytest
import small_site as small
import tile_site
from lines import adapt, run, sets, work_there, write_site

CASE = 108
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Two tiles of each class and their site."""
    tile_site.make_tiles(tmp_path / "nii", 2)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = {
    "guard": (["--guard"], "--guard"),
    "probabilities": (["--save-probs"], "--save-probs"),
    "uncertainty": (["--save-uncertainty"], "--save-uncertainty"),
    "reset": (["--reset", "case"], "--reset case"),
    "report": (sets("reports=[unknown]"), "unknown report 'unknown'"),
    "recalibration": (sets("recalibrate=true"), "recalibrate"),
    "largest part": (sets("keep_largest=true"), "keep_largest"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_on_tiles_is_refused_before_anything_is_read(place, capsys, name):
    words, named = REFUSED[name]
    (place / "nothing").mkdir()
    given = ["--site", "kather/X", "--volumes", "nothing", "--weights", "none.safetensors"]
    assert run(["adapt", *given, "--out", "out", "--device", "cpu", *words]) == 2
    assert named in capsys.readouterr().err
    assert not (place / "out").exists()


def test_evaluate_refuses_what_is_for_masks(place, tile_weights, capsys):
    assert adapt(tile_weights, "--method", "source", pipeline="kather") == 0
    for words, named in (
        (("--empty", "one"), "--empty one"),
        (("--ignore", "255"), "--ignore"),
        (("--values", "255=1"), "--values"),
    ):
        assert run(["evaluate", "--predictions", "out", *words]) == 2
        assert f"{named}: not for tiles" in capsys.readouterr().err


def test_sites_check_reads_tiles(place, capsys):
    assert run(["sites", "check", "kather/X", "--volumes", "nii", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["cases"]) == 8


def test_predict_takes_a_classifier_of_tiles(place, tile_weights):
    words = ["--site", "kather/X", "--volumes", "nii", "--weights", str(tile_weights), "--device", "cpu"]
    assert run(["predict", *words, "--out", "out", *sets(*tile_site.SMALL, "reports=[table]")]) == 0
    with (place / "out/predictions.csv").open(newline="") as stream:
        assert len(list(csv.DictReader(stream))) == 8


def test_rollback_takes_a_run_on_tiles(place, tile_weights):
    assert adapt(tile_weights, "--method", "bn", pipeline="kather") == 0
    assert run(["rollback", "out", "--to-case", "source"]) == 0
    with (place / "out/predictions.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert all(row["prediction"] == row["source_prediction"] for row in rows)


def test_volumes_honour_what_tiles_refuse(tmp_path, known_weights, monkeypatch):
    work_there(tmp_path, monkeypatch, 1)
    more = "--guard", "--save-probs", "--save-uncertainty", "--reset", "case"
    assert adapt(known_weights(), "--method", "source", *more) == 0
    for part in ("probs", "uncertainty"):
        assert len(list((tmp_path / "out" / part).glob("Case00*"))) == 1
    assert small.record(tmp_path / "out")["settings"]["reset"] == "case"
