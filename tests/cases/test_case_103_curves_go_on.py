"""After --resume the steps of TensorBoard curves go on, and no point stands twice."""

import pytest
import tile_site
from events import points
from lines import adapt, work_there, write_site
from moments import ctrl_c, slow_clock

CASE = 103
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
TENSORBOARD = {"reports": "[tensorboard]"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 4)


@pytest.mark.parametrize(
    "line",
    [("--reset", "case"), pytest.param(("--reset", "site"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_losses_of_volumes(place, small_weights, line):
    adapt(small_weights, *line, out="whole", **TENSORBOARD)
    with ctrl_c("/masks/Case02"):  # its updates are done
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
    line = {"pipeline": "kather", **TENSORBOARD}
    adapt(tile_weights, out="whole", **line)
    with monkeypatch.context() as patch, ctrl_c("/.state/", 5):  # two files each: in the third batch
        slow_clock(patch, 100)  # so that the state is kept after each batch
        assert adapt(tile_weights, **line) == 130
    assert adapt(tile_weights, "--resume", **line) == 0
    whole, resumed = points(tmp_path / "whole"), points(tmp_path / "out")
    assert len(resumed) == len(set(resumed))
    assert set(resumed) == set(whole)
