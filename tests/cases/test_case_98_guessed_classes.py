"""Without a list of classes, `evaluate` names each value that only the masks or only the references hold;
--strict refuses it, and --values says what it means.
"""

import json

import numpy as np
import pytest
import tile_site
from lines import adapt, run, write_site
from small_volumes import blocks, write

CASE = 98
SHAPE = (12, 10, 4)


@pytest.fixture
def words(tmp_path):
    """Masks of 0 and 1 and the same references with 255 in place of 1."""
    for name in ("a", "b"):
        mask = blocks(SHAPE, 1).astype(np.uint8)
        write(tmp_path / "masks" / f"{name}_mask.nii.gz", mask)
        write(tmp_path / "references" / f"{name}.nii.gz", mask * np.uint8(255))
    return [
        "evaluate",
        "--predictions",
        str(tmp_path / "masks"),
        "--references",
        str(tmp_path / "references"),
    ]


def test_a_value_of_one_side_is_named_once(words, capsys):
    assert run(words) == 0
    said = capsys.readouterr().err
    assert "value 1 is in masks only (2 cases: a, b)" in said
    assert "value 255 is in references only (2 cases: a, b)" in said
    assert said.count("--values") == 1


def test_strict_refuses_it(words, capsys, tmp_path):
    assert run([*words, "--strict", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "value 255 is in references only" in said
    assert "--values" in said
    assert not (tmp_path / "out").exists()


def test_a_map_says_what_it_means(words, capsys, tmp_path):
    out = tmp_path / "out"
    assert run([*words, "--values", "255=1", "--strict", "--json", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "only" not in shown.err
    (row,) = json.loads(shown.out)["summary"]
    assert row["label"] == 1
    assert row["dice_mean"] == 1.0
    assert json.loads((out / "summary.json").read_text())["unexplained"] == []


@pytest.mark.parametrize("text", ["255", "a=1", "255=-1", "=1"])
def test_a_map_that_is_none(words, capsys, text):
    assert run([*words, "--values", text]) == 2
    assert "FROM=TO" in capsys.readouterr().err


def test_two_meanings(words, capsys):
    assert run([*words, "--values", "255=1", "--values", "255=2"]) == 2
    assert "two meanings to 255" in capsys.readouterr().err


def test_tiles_have_no_values(tmp_path, tile_weights, monkeypatch, capsys):
    tile_site.make_tiles(tmp_path / "nii", 1)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    assert adapt(tile_weights, "--method", "source", pipeline="kather") == 0
    capsys.readouterr()
    for more in (("--values", "1=2"), ("--ignore", "3")):
        assert run(["evaluate", "--predictions", "out", *more]) == 2
        assert f"{more[0]}: not for tiles" in capsys.readouterr().err
