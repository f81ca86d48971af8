"""The axes of a reliability diagram, the definitions in calibration.json and the documentation say the same,
for one class and for all classes together.
"""

import json
from pathlib import Path

import pytest
import small_site as small
import tile_site
from lines import adapt, run, sets, write_site

CASE = 64
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
PAGE = Path(__file__).resolve().parents[2] / "docs/concepts/calibration.md"


@pytest.fixture
def axes(monkeypatch):
    """Collect the texts that are set as labels of axes."""
    from matplotlib.axes import Axes

    found = {"x": set(), "y": set()}
    for name in found:
        original = getattr(Axes, f"set_{name}label")

        def note(self, text, *args, original=original, name=name, **kwargs):
            found[name] |= {text} - {""}
            return original(self, text, *args, **kwargs)

        monkeypatch.setattr(Axes, f"set_{name}label", note)
    return found


def definitions(out):
    return json.loads((out / "report/calibration.json").read_text(encoding="utf-8"))["definitions"]


def test_one_class_of_volumes(tmp_path, known_weights, axes, monkeypatch):
    small.make_volumes(tmp_path / "nii", 1)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert adapt(known_weights(), "--method", "source", reports="[calibration]") == 0
    confidence, accuracy = "predicted probability of prostate", "share of voxels that are prostate"
    assert axes == {"x": {confidence}, "y": {accuracy, "voxels"}}
    words = definitions(tmp_path / "out")
    assert words["1"] == f"one class: confidence is the {confidence}, accuracy the {accuracy}"
    assert "highest probability of a voxel" in words["all"]
    assert "share of voxels whose most probable class is right" in words["all"]


def test_every_class_of_tiles(tmp_path, tile_weights, axes, monkeypatch):
    tile_site.make_tiles(tmp_path / "nii", 2)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    line = {"pipeline": "kather", "reports": "[calibration]"}
    assert adapt(tile_weights, "--method", "source", **line) == 0
    words = definitions(tmp_path / "out")
    drawn = [text for text in axes["y"] if text != "tiles"]
    assert len(drawn) == 4
    assert all(any(text in word for word in words.values()) for text in drawn)
    assert all(text.startswith("share of tiles that are ") for text in drawn)


def test_all_classes_of_a_comparison(tmp_path, small_weights, axes, monkeypatch):
    small.make_volumes(tmp_path / "nii", 1)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    line = ["compare", "--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--methods", "source"]
    line += ["--seeds", "1", "--weights", str(small_weights), "--device", "cpu", *sets(*small.SMALL)]
    assert run(line) == 0
    assert "highest probability of a voxel" in axes["x"]
    assert "share of voxels whose most probable class is right" in axes["y"]


def test_the_page_says_so_too():
    text = PAGE.read_text(encoding="utf-8")
    assert "predicted probability of the class; share of voxels that are of the class" in text
    assert "highest probability of a voxel; share of voxels whose most probable class is right" in text
