"""`rollback --case NAME` puts the source masks of single cases in place where cases are independent, and the
messages count what is on disk after the call.
"""

import json

import pytest
import small_site as small
import tile_site
from lines import adapt, run, work_there, write_site

CASE = 116
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 4)


def test_single_cases(place, small_weights, capsys):
    assert adapt(small_weights, "--method", "bn", "--reset", "case") == 0
    before = small.masks(place / "out")
    assert run(["rollback", "out", "--case", "Case01", "--case", "Case03"]) == 0
    assert "2 results rolled back now; of all, 2 are the source model's" in capsys.readouterr().out
    after = small.masks(place / "out")
    for name in ("Case00", "Case01", "Case02", "Case03"):
        mask = f"masks/{name}_mask.nii.gz"
        source = name in ("Case01", "Case03")
        assert after[mask] == before[f"source_{mask}" if source else mask]
        assert (place / f"out/checkpoints/{name}.safetensors").exists() != source
    record = small.record(place / "out")
    assert record["rolled_back"]["cases"] == ["Case01", "Case03"]
    assert [case["used"] for case in record["cases"]] == ["adapted", "source", "adapted", "source"]
    assert run(["rollback", "out", "--case", "Case00", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["undone"] == ["Case00"]
    assert content["kept"] == ["Case02"]
    assert content["back"] == ["Case00", "Case01", "Case03"]
    assert small.record(place / "out")["rolled_back"]["cases"] == ["Case00", "Case01", "Case03"]
    assert adapt(small_weights, "--method", "bn", "--reset", "case", "--resume") == 2
    assert "rolled back in Case00, Case01, Case03" in capsys.readouterr().err


def test_counts_are_those_on_disk(place, small_weights, capsys):
    assert adapt(small_weights, "--method", "bn", "--reset", "case") == 0
    assert run(["rollback", "out", "--to-case", "2"]) == 0
    capsys.readouterr()
    assert run(["rollback", "out", "--to-case", "3"]) == 0
    said = capsys.readouterr().out
    assert "0 results rolled back now; of all, 2 are the source model's by a rollback, 2 are as" in said
    assert "Weights: 2 files, one per case" in said
    assert small.record(place / "out")["rolled_back"]["to_case"] == 2


def test_refused_where_cases_depend_on_each_other(place, small_weights, capsys):
    assert adapt(small_weights, "--method", "tent", "--reset", "site") == 0
    before = small.files_below(place / "out")
    assert run(["rollback", "out", "--case", "Case01"]) == 2
    assert "not independent" in capsys.readouterr().err
    assert small.files_below(place / "out") == before


def test_wrong_words(place, small_weights, capsys):
    assert adapt(small_weights, "--method", "bn", "--reset", "case") == 0
    for words, text in (
        ((), "give either --to-case N or --case NAME"),
        (("--case", "Case01", "--to-case", "2"), "give either --to-case N or --case NAME"),
        (("--case", "Case9"), "has no case Case9; it has 4: Case00, Case01"),
        (("--to-case", "Case01"), "use --case"),
    ):
        assert run(["rollback", "out", *words]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_tiles_are_refused_by_name(tmp_path, tile_weights, monkeypatch, capsys):
    tile_site.make_tiles(tmp_path / "nii", 2)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    assert adapt(tile_weights, "--method", "source", pipeline="kather") == 0
    assert run(["rollback", "out", "--case", "TUM/0.png"]) == 2
    assert "rollback --case: not for tiles" in capsys.readouterr().err
