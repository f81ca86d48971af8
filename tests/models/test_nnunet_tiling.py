"""Tiles of a prediction: where they begin, how they weigh, mirroring, padding."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tesla_med.models import tiling
from tesla_med.models.tiling import importance, mirrored, starts, tiled, tiles

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("size", "patch", "expected"),
    [
        (64, 64, [0]),
        (65, 64, [0, 1]),
        (96, 64, [0, 32]),
        (97, 64, [0, 16, 33]),  # two steps of 16.5: halves go to the even number
        (110, 64, [0, 23, 46]),
        (100, 33, [0, 13, 27, 40, 54, 67]),
        (7, 3, [0, 1, 3, 4]),
        (1, 1, [0]),
    ],
)
def test_where_tiles_begin(size, patch, expected):
    assert starts(size, patch) == expected


@given(st.integers(2, 80), st.integers(0, 200))
def test_tiles_cover_an_axis_and_overlap_by_half(patch, more):
    found = starts(patch + more, patch)
    assert found[0] == 0
    assert found[-1] == more
    assert all(0 < b - a <= math.ceil(patch / 2) for a, b in itertools.pairwise(found))


def test_the_weight_of_a_position_is_a_gaussian():
    patch = (8, 16)
    found = importance(patch).numpy()
    rows, columns = np.meshgrid(np.arange(8), np.arange(16), indexing="ij")
    expected = 10 * np.exp(-0.5 * (((rows - 4) / 1) ** 2 + ((columns - 8) / 2) ** 2))
    assert found.shape == patch
    assert found.max() == pytest.approx(10)
    assert np.unravel_index(found.argmax(), patch) == (4, 8)
    near = expected > 1e-2  # the filter is cut off at four standard deviations
    assert np.allclose(found[near], expected[near], rtol=2e-2)


def test_no_position_weighs_nothing():
    found = importance((4, 160))
    assert found.min() > 0
    assert found.dtype == torch.float32


def plus_position(images):
    """One output, which is the input."""
    return images[:, :1] * 1.0


@pytest.mark.parametrize(("shape", "patch"), [((9, 21), (6, 8)), ((6, 9, 21), (4, 6, 8)), ((3, 5), (4, 8))])
def test_what_looks_at_pixels_alone_is_the_same_in_tiles(shape, patch):
    images = torch.randn(2, 1, *shape, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(tiled(plus_position, images, patch, range(len(shape))), images, atol=1e-5)


def test_tiles_are_averaged_by_their_weights():
    patch, seen = (4, 6), []

    def numbered(images):
        seen.append(images)
        return torch.full_like(images, float(len(seen)))

    found = tiled(numbered, torch.zeros(1, 1, 4, 9), patch, ())[0, 0]
    weight = importance(patch)
    assert len(seen) == 2
    assert torch.equal(found[:, :3], torch.full((4, 3), 1.0))
    assert torch.allclose(found[:, 6:], torch.full((4, 3), 2.0))
    first, second = weight[:, 3:6], weight[:, 0:3]
    assert torch.allclose(found[:, 3:6], (first + 2 * second) / (first + second), atol=1e-5)


def test_logits_in_half_precision_are_finite_and_near(monkeypatch):
    """Far from the centre of a patch of three axes, weights are too small for half precision."""
    images = torch.randn(1, 1, 24, 24, 24, generator=torch.Generator().manual_seed(0)) * 8
    exact = tiled(plus_position, images, (16, 16, 16), ())
    monkeypatch.setattr(tiling, "LARGE", 0)
    half = tiled(plus_position, images, (16, 16, 16), ())
    assert half.dtype == torch.float16
    assert torch.isfinite(half).all()
    assert (half.float() - exact).abs().max() < 0.05


def test_smaller_images_are_padded_with_zeros_evenly():
    seen = []

    def keep(images):
        seen.append(images)
        return images

    found = tiled(keep, torch.ones(1, 1, 3, 5), (6, 8), ())
    assert found.shape == (1, 1, 3, 5)
    assert (found == 1).all()
    padded = seen[0][0, 0]
    assert padded.shape == (6, 8)
    assert padded.sum() == 15
    assert padded[1:4, 1:6].eq(1).all()  # the odd one behind


@pytest.mark.parametrize("mirror", [(), (0,), (1,), (0, 1)])
def test_mirroring_is_the_mean_over_all_combinations(mirror):
    images = torch.randn(1, 1, 5, 6, generator=torch.Generator().manual_seed(0))
    ramp = torch.arange(30.0).view(1, 1, 5, 6)
    calls = []

    def network(view):
        calls.append(view)
        return view * ramp  # of position, so that mirroring matters

    found = mirrored(network, images, mirror)
    combinations = [
        some for count in range(len(mirror) + 1) for some in itertools.combinations(mirror, count)
    ]
    assert len(calls) == len(combinations)
    ramps = [ramp.flip([axis + 2 for axis in some]) if some else ramp for some in combinations]
    assert torch.allclose(found, images * sum(ramps) / len(ramps), atol=1e-5)


def test_mirroring_leaves_what_the_network_gave_alone():
    kept = torch.ones(1, 1, 2, 2)
    mirrored(lambda _: kept, torch.zeros(1, 1, 2, 2), (0, 1))
    assert (kept == 1).all()


def test_the_number_of_tiles():
    assert tiles((64, 97), (64, 64)) == 3
    assert tiles((3, 3), (64, 64)) == 1
