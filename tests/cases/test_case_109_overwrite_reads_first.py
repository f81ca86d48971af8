"""With --overwrite everything is read and checked first: a mistyped folder leaves earlier results whole."""

import pytest
import small_site as small
import tile_site
from lines import adapt, run, sets, work_there, write_site

CASE = 109
pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = ("train.steps=1", "train.validate_every=1", "train.validation_fraction=0.5")


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 2)


def train(*words, volumes="nii"):
    given = ["--pipeline", "prostate", "--sites", "X", "--volumes", volumes, "--out", "out"]
    return run(["train", *given, "--device", "cpu", *sets(*small.SMALL, *SHORT), *words])


@pytest.mark.parametrize("wrong", ["volumes", "model"])
def test_training_replaces_weights_once_everything_was_read(place, capsys, wrong):
    assert train() == 0
    before = {path.name: path.read_bytes() for path in (place / "out").iterdir() if path.is_file()}
    words = sets("model.params.width=-1") if wrong == "model" else []
    capsys.readouterr()
    assert train("--overwrite", *words, volumes="nii/mistyped" if wrong == "volumes" else "nii") == 2
    assert ("mistyped" if wrong == "volumes" else "width") in capsys.readouterr().err
    after = {path.name: path.read_bytes() for path in (place / "out").iterdir() if path.is_file()}
    assert {name: after.get(name) for name in before} == before


@pytest.mark.parametrize("pipeline", ["prostate", "kather"])
def test_a_run_stays_where_its_images_are_not_found(
    tmp_path, monkeypatch, known_weights, tile_weights, capsys, pipeline
):
    weights = known_weights() if pipeline == "prostate" else tile_weights
    if pipeline == "prostate":
        work_there(tmp_path, monkeypatch, 2)
    else:
        tile_site.make_tiles(tmp_path / "nii", 2)
        write_site(tmp_path, "kather")
        monkeypatch.chdir(tmp_path)
    assert adapt(weights, "--method", "source", pipeline=pipeline) == 0
    before = small.files_below(tmp_path / "out")
    (tmp_path / "nii").rename(tmp_path / "elsewhere")
    assert adapt(weights, "--method", "source", "--overwrite", pipeline=pipeline) == 2
    assert "nii" in capsys.readouterr().err
    assert small.files_below(tmp_path / "out") == before
