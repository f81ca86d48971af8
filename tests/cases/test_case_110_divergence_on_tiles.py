"""A batch of tiles whose update diverges is taken back and counted; a run in which all diverge fails."""

import csv

import numpy as np
import pytest
import tile_site
import torch

CASE = 110
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return tile_site.train_weights(tmp_path_factory.mktemp("tiles"))


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "tiles"
    tile_site.make_tiles(folder, 6, seed=3, shift=0.6)
    return folder


def run(tiles, weights, out, overrides):
    texts = (*tile_site.SMALL, *overrides)
    return tile_site.adapt_tiles(
        tile_site.site(), tiles, weights=weights, out=out, overrides=texts, pipeline="kather", device="cpu"
    )


def rows(out):
    with (out / "predictions.csv").open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_values_that_are_not_finite_leave_the_source(tiles, weights, tmp_path):
    """Every batch falls back, which is counted, said, and a failure when it is all of them."""
    texts = ("methods.tesla.learning_rate=1e30", "reports=[table]", "methods.tesla.batch_slices=8")
    result = run(tiles, weights, tmp_path / "out", texts)
    assert (result.diverged, result.units) == (3, 3)
    assert not result.complete
    assert any("not finite" in note and "3 of 3 batches" in note for note in result.notes)
    assert all(np.isfinite(float(row["entropy"])) for row in rows(result.out))
    assert {item.status for item in result.results} == {"collapsed"}
    assert {item.used for item in result.results} == {"source"}
    assert not (result.out / "checkpoints").exists()


def test_a_batch_that_diverges_leaves_no_trace(tiles, weights, tmp_path, monkeypatch):
    """The stream goes on from before the batch, and only its own tiles keep the source's classes."""
    adapt, calls = TeSLA.adapt, []

    def broken_once(self, images):
        calls.append(1)
        scalars = adapt(self, images)
        return {name: torch.tensor(float("nan")) for name in scalars} if len(calls) == 2 else scalars

    monkeypatch.setattr(TeSLA, "adapt", broken_once)
    texts = ("methods.tesla.batch_slices=8", "reports=[table]")
    result = run(tiles, weights, tmp_path / "out", texts)
    assert (result.diverged, result.units) == (1, 3)
    assert result.complete
    collapsed = [item for item in result.results if item.status == "collapsed"]
    assert len(collapsed) == 8
    assert all(np.array_equal(item.probs, item.probs_source) for item in collapsed)
    others = [item for item in result.results if item.status == "ok"]
    assert not any(np.array_equal(item.probs, item.probs_source) for item in others)
    assert (result.out / "checkpoints/adapted.safetensors").exists()
