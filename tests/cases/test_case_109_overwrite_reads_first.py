"""With --overwrite everything is read and checked first: a mistyped folder leaves earlier results whole."""

import pytest
import small_site as small
import tile_site

from tesla_med.config.files import load_pipeline
from tesla_med.errors import TeslaMedError
from tesla_med.training.train import train_source

CASE = 109
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes")
    small.make_volumes(folder, 2)
    return folder


def short(*texts):
    steps = ("train.steps=1", "train.validate_every=1", "train.validation_fraction=0.5")
    return load_pipeline("prostate", (*small.SMALL, *steps, *texts))


@pytest.mark.parametrize("wrong", ["volumes", "model"])
def test_training_replaces_weights_once_everything_was_read(volumes, tmp_path, wrong):
    out = tmp_path / "out"
    train_source(short(), [small.site()], volumes, out, device="cpu")
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    pipeline = short(*(("model.params.width=-1",) if wrong == "model" else ()))
    folder = volumes / "mistyped" if wrong == "volumes" else volumes
    with pytest.raises(TeslaMedError, match="mistyped" if wrong == "volumes" else "width"):
        train_source(pipeline, [small.site()], folder, out, device="cpu", overwrite=True)
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("task", ["volumes", "tiles"])
def test_a_run_stays_where_its_images_are_not_found(volumes, tmp_path, task):
    def adapt(folder, **options):
        if task == "volumes":
            return small.run(folder, small.train_weights(tmp_path), out, method="source", **options)
        weights, texts = tile_site.train_weights(tmp_path / "trained"), (*tile_site.SMALL, *small.BARE)
        options |= {"method": "source", "device": "cpu", "overrides": texts}
        return tile_site.adapt_tiles(tile_site.site(), folder, weights=weights, out=out, **options)

    out = tmp_path / "out"
    if task == "tiles":
        tile_site.make_tiles(tmp_path / "target", 2)
    adapt(volumes if task == "volumes" else tmp_path / "target")
    before = small.files_below(out)
    with pytest.raises(TeslaMedError, match="mistyped"):
        adapt(tmp_path / "mistyped", overwrite=True)
    assert small.files_below(out) == before
