"""Losses, statistics and metrics are summed in float32 or higher, whatever the precision of the input."""

import numpy as np
import pytest
import small_site as small
from events import values
from small_volumes import diagonal, noise, write

import tesla_med

CASE = 48
SIDE = 320  # a sum over so many pixels is beyond the range of half precision


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_figures_of_a_large_mask(tmp_path, dtype):
    mask = np.ones((SIDE, SIDE, 1), dtype)
    for folder in ("masks", "references"):
        write(tmp_path / folder / "Case00.nii.gz", mask, diagonal(1, 1, 1))
    (case,) = tesla_med.evaluate(tmp_path / "masks", tmp_path / "references").cases
    assert case.scores[0].dice == 1.0
    assert case.scores[0].volume_ml == pytest.approx(SIDE * SIDE / 1000)


@pytest.mark.slow
def test_losses_of_large_slices(small_weights, tmp_path):
    write(tmp_path / "nii/Case00.nii.gz", noise((SIDE, SIDE, 1)))
    overrides = (
        *("preprocessing.size=null", "methods.tesla.weak_views=1"),
        "protocols.N-O.tesla.updates_per_case=1",
    )
    found = []
    for precision in ("float32", "bfloat16"):
        result = small.run(
            tmp_path / "nii",
            small_weights,
            tmp_path / precision,
            overrides=(*overrides, f"precision={precision}"),
            reports=("reports=[tensorboard]",),
        )
        assert result.results[0].used == "adapted"
        points = values(result.out)
        found.append({tag: value.simple_value for tag, _, value in points if tag.startswith("loss/")})
    full, half = found
    for name in ("loss/flipped_cross_entropy", "loss/class_marginal"):
        assert half[name] == pytest.approx(full[name], rel=0.02)
