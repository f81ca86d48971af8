"""How often each class is predicted is always shown; a class that is never predicted, or one that takes
nearly all, is a remark on the terminal, in the report and in run.json, for tiles and for volumes.
"""

import json

import numpy as np
import pytest
import small_site as small
import tile_site
from lines import adapt, run, write_site
from PIL import Image

CASE = 117
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def grey(tmp_path, monkeypatch):
    """Eight grey tiles without labels."""
    (tmp_path / "nii").mkdir()
    for number in range(8):
        Image.fromarray(np.full((64, 64, 3), 120, np.uint8)).save(tmp_path / f"nii/{number}.png")
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_grey_tiles(grey, tile_weights, capsys):
    line = {"pipeline": "kather", "reports": "[html]"}
    assert adapt(tile_weights, "--method", "source", **line) == 0
    said = capsys.readouterr()
    assert "predicted class" in said.out
    record = small.record(grey / "out")
    (chosen,) = (name for name, item in record["predicted"].items() if item["adapted"])
    assert record["predicted"][chosen] == {"source": 8, "adapted": 8}
    page = (grey / "out/report/report.html").read_text(encoding="utf-8")
    metrics = json.loads((grey / "out/report/metrics.json").read_text(encoding="utf-8"))
    assert metrics["predicted"] == record["predicted"]
    for name in record["predicted"]:
        text = f"class {name} is never predicted: 0 of 8 tiles (source model: 0)"
        if name == chosen:
            text = f"class {name} takes nearly all: 8 of 8 tiles (source model: 8)"
        assert said.err.count(text) == 1
        assert text in record["remarks"]
        assert text in page


def test_tiles_of_every_class_are_no_remark(tmp_path, tile_weights, monkeypatch, capsys):
    tile_site.make_tiles(tmp_path / "nii", 3)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    assert adapt(tile_weights, "--method", "source", pipeline="kather") == 0
    record = small.record(tmp_path / "out")
    assert sum(item["adapted"] for item in record["predicted"].values()) == 12
    assert record["remarks"] == []
    assert "predicted" not in capsys.readouterr().err


@pytest.mark.parametrize("empty", [True, False])
def test_volumes(tmp_path, known_weights, monkeypatch, capsys, empty):
    small.make_volumes(tmp_path / "nii", 2)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert adapt(known_weights(empty=empty), "--method", "source", reports="[html]") == 0
    said = capsys.readouterr()
    assert "predicted class" in said.out
    record = small.record(tmp_path / "out")
    assert record["predicted"]["prostate"]["adapted"] == (0 if empty else 2)
    text = "class prostate is never predicted: in 0 of 2 cases (source model: 0)"
    assert (text in said.err) == (text in record["remarks"]) == empty
    page = (tmp_path / "out/report/report.html").read_text(encoding="utf-8")
    assert (text in page) == empty


def test_a_class_that_takes_the_whole_field(tmp_path, known_weights, monkeypatch, capsys):
    for path in small.make_volumes(tmp_path / "nii", 1):
        small.copy_image(path, path, bright)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert adapt(known_weights(), "--method", "source") == 0
    assert "class prostate takes nearly all: 100 % of all voxels" in capsys.readouterr().err


def bright(array):
    array = np.full_like(array, 200)
    array[0, 0, 0] = 0
    return array


def test_after_going_back_the_counts_are_those_on_disk(tmp_path, small_weights, monkeypatch):
    small.make_volumes(tmp_path / "nii", 2)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert adapt(small_weights, "--reset", "case") == 0
    assert run(["rollback", "out", "--to-case", "source"]) == 0
    (found,) = small.record(tmp_path / "out")["predicted"].values()
    assert found["voxels_adapted"] == found["voxels_source"]
