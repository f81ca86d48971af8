"""After --resume the steps of TensorBoard curves go on, and no point stands twice."""

import pytest
import tile_site
from events import points
from lines import adapt, work_there, write_site

from tesla_med.tasks import tiles as tiles_module
from tesla_med.tasks import volumes as volumes_module

CASE = 103
pytestmark = pytest.mark.usefixtures("one_thread")
TENSORBOARD = {"reports": "[tensorboard]"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 4)


def interrupt(patch, owner, name, calls):
    """Have a function interrupt the run the given number of times it is called."""
    original, seen = getattr(owner, name), []

    def stop(*args, **kwargs):
        seen.append(1)
        if len(seen) == calls:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    patch.setattr(owner, name, stop)


@pytest.mark.parametrize(
    "line",
    [("--reset", "case"), pytest.param(("--reset", "site"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_losses_of_volumes(place, small_weights, monkeypatch, line):
    adapt(small_weights, *line, out="whole", **TENSORBOARD)
    with monkeypatch.context() as patch:
        interrupt(patch, volumes_module, "encode_mask", 6)  # two masks a case: in the third one
        assert adapt(small_weights, *line, **TENSORBOARD) == 130
    assert adapt(small_weights, *line, "--resume", **TENSORBOARD) == 0
    whole, resumed = points(place / "whole"), points(place / "out")
    assert len(resumed) == len(set(resumed))
    assert set(resumed) == set(whole)
    losses = [step for tag, step in resumed if tag == "loss/total"]
    assert sorted(losses) == list(range(len(losses)))


def test_all_done_before(place, small_weights):
    assert adapt(small_weights, "--reset", "case", **TENSORBOARD) == 0
    before = points(place / "out")
    assert adapt(small_weights, "--reset", "case", "--resume", **TENSORBOARD) == 0
    assert sorted(points(place / "out")) == sorted(before)


@pytest.mark.slow
def test_tiles(tmp_path, tile_weights, monkeypatch):
    tile_site.make_tiles(tmp_path / "nii", 8)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiles_module.Tiles, "keep_every", 0.0)
    line = {"pipeline": "kather", **TENSORBOARD}
    adapt(tile_weights, out="whole", **line)
    with monkeypatch.context() as patch:
        interrupt(patch, tiles_module.Tiles, "finish", 3)
        assert adapt(tile_weights, **line) == 130
    assert adapt(tile_weights, "--resume", **line) == 0
    whole, resumed = points(tmp_path / "whole"), points(tmp_path / "out")
    assert len(resumed) == len(set(resumed))
    assert set(resumed) == set(whole)
