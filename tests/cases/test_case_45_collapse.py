"""The guard detects an adaptation that ends in background only, whatever its loss: a mask of the
source model, `collapsed`.
"""

import csv

import numpy as np
import pytest
import small_site as small
from events import values

CASE = 45
TOO_LARGE = ("methods.tent.learning_rate=5", "protocols.N-O.tent={epochs: 20}")


@pytest.fixture
def run_tent(small_weights, tmp_path):
    """Minimise entropy over the norm parameters of one case with far too large steps."""

    def call(out, *overrides, reports=small.BARE):
        small.make_volumes(tmp_path / "nii", 1)
        return small.run(
            tmp_path / "nii",
            small_weights,
            tmp_path / out,
            method="tent",
            overrides=(*TOO_LARGE, *overrides),
            reports=reports,
        )

    return call


def test_a_collapse_is_undone(run_tent):
    result = run_tent("out", "guard.enabled=true", reports=("reports=[table,tensorboard]",))
    entropies = [value.simple_value for tag, _, value in values(result.out) if tag == "loss/entropy"]
    assert len(entropies) == 20
    assert entropies[-1] < 0.1 * entropies[0]  # the loss looks like a success
    (case,) = result.results
    assert (case.status, case.used, case.share) == ("collapsed", "source", 0.0)
    assert case.signals["foreground_source"] > 0.0
    assert case.signals["agreement_source_adapted"] < 0.1
    assert small.labels(result.out, "Case00").any()
    with (result.out / "report/metrics.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert (row["status"], row["used"]) == ("collapsed", "source")
    files = small.masks(result.out)
    assert files["masks/Case00_mask.nii.gz"] == files["source_masks/Case00_mask.nii.gz"]
    assert not list((result.out / "checkpoints").rglob("*.safetensors"))


def test_without_the_guard_the_structure_would_be_lost(run_tent):
    result = run_tent("out", "guard.enabled=false")
    ours, source = (small.labels(result.out, "Case00", part) > 0 for part in ("masks", "source_masks"))
    assert source.any()
    assert np.count_nonzero(ours & source) < 0.1 * np.count_nonzero(source)
