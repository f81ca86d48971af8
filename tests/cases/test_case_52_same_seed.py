"""On a CPU the same seed gives the same bytes, however images are read and whatever else draws random
numbers.
"""

import gzip

import numpy as np
import pytest
import small_site as small
import torch
from lines import adapt, work_there

CASE = 52
STATUS = "on a GPU single voxels may differ between cards; that is not tested here"
PARTS = ("masks", "source_masks", "probs", "checkpoints")


def outputs(out):
    """Return everything that the seed decides, by part."""
    found = {part: small.files_below(out / part) for part in PARTS}
    assert all(found.values())
    return found


@pytest.mark.parametrize(
    "words", [(), ("--protocol", "N-M"), pytest.param(("--reset", "site"), marks=pytest.mark.slow)], ids=str
)
def test_twice(small_weights, tmp_path, monkeypatch, words):
    folder = work_there(tmp_path, monkeypatch, 2)
    words = ("--seed", "3", "--save-probs", *words)
    assert adapt(small_weights, *words, out="first") == 0
    torch.manual_seed(1234)
    torch.rand(7)
    np.random.seed(5)
    for path in (folder / "nii").iterdir():  # reading takes another time
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()), 0))
    assert adapt(small_weights, *words, out="second") == 0
    assert outputs(folder / "first") == outputs(folder / "second")
    assert small.record(folder / "first")["seed"] == 3
    assert small.record(folder / "first")["settings"]["seed"] == 3


def test_another_seed_gives_other_probabilities(small_weights, tmp_path, monkeypatch):
    folder = work_there(tmp_path, monkeypatch, 1)
    for seed in ("0", "1"):
        assert adapt(small_weights, "--seed", seed, "--save-probs", out=seed) == 0
    assert small.files_below(folder / "0/probs") != small.files_below(folder / "1/probs")
