"""On a CPU the same seed gives the same bytes, however images are read and whatever else draws random
numbers.
"""

import pytest
import small_site as small
import torch

from tesla_med import adapt as adapt_module
from tesla_med.errors import TeslaMedError
from tesla_med.types import Failure

CASE = 52
STATUS = "on a GPU single voxels may differ between cards; that is not tested here"


def in_turn(refs, load, count):
    """Read each case when it is wanted, on the main thread: what no worker at all would do."""
    for ref in refs:
        try:
            yield load(ref)
        except TeslaMedError as error:
            yield Failure(ref, error)


@pytest.mark.parametrize("options", [{}, {"reset": "site"}, {"protocol": "N-M"}], ids=str)
def test_twice_and_read_in_another_way(small_weights, tmp_path, monkeypatch, options):
    small.make_volumes(tmp_path / "nii", 2)
    options = {"seed": 3, "save_probs": True} | options
    first = small.run(tmp_path / "nii", small_weights, tmp_path / "first", **options)
    monkeypatch.setattr(adapt_module, "read_ahead", in_turn)
    torch.manual_seed(1234)
    torch.rand(7)
    second = small.run(tmp_path / "nii", small_weights, tmp_path / "second", **options)
    for part in ("masks", "source_masks", "probs", "checkpoints"):
        assert small.files_below(first.out / part) == small.files_below(second.out / part) != {}
    assert small.record(first.out)["seed"] == 3
    assert small.record(first.out)["settings"]["seed"] == 3


def test_another_seed_gives_other_probabilities(small_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 1)
    runs = [
        small.run(tmp_path / "nii", small_weights, tmp_path / str(seed), seed=seed, save_probs=True)
        for seed in (0, 1)
    ]
    assert small.files_below(runs[0].out / "probs") != small.files_below(runs[1].out / "probs")
