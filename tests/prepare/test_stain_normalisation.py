"""Normalised stains are finite; a white, grey or single-stain tile stays as it was, and that is noted.

A good tile is not made worse, whatever its size.
"""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter

from tesla_med.errors import DataError
from tesla_med.io.tiles import find_tiles
from tesla_med.prepare.stain_normalisation import REFERENCE, normalise_stains
from tesla_med.prepare.tiles import stream

RUIFROK = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11]])


def tile(size=64, *, seed=0, stains=REFERENCE, haematoxylin=1.0, eosin=1.0, noise=0.01):
    """Return a made-up H&E tile (3, H, W): nuclei on a ground of eosin, with the noise of a camera."""
    random = np.random.default_rng(seed)

    def field(width):
        values = gaussian_filter(random.random((size, size)), width)
        return (values - values.min()) / (values.max() - values.min())

    nuclei = haematoxylin * 2.0 * np.clip(2.5 * (field(2) - 0.5), 0, 1)
    ground = eosin * (0.15 + 0.85 * field(6))
    light = np.exp(-np.einsum("sc,shw->chw", stains, np.stack([nuclei, ground])))
    return np.clip(light + noise * random.standard_normal(light.shape), 0, 1).astype(np.float32)


def nearly_white():
    return np.clip(0.97 + 0.01 * np.random.default_rng(0).standard_normal((3, 64, 64)), 0, 1)


UNFIT = {
    "white": (np.ones((3, 64, 64)), "tissue in 0 of 4096 pixels"),
    "nearly white": (nearly_white(), "tissue in 0 of 4096 pixels"),
    "black": (np.zeros((3, 64, 64)), "one stain"),
    "grey": (np.repeat(np.random.default_rng(1).random((1, 64, 64)), 3, axis=0), "one stain"),
    "one colour": (np.full((3, 64, 64), 0.5) * np.array([0.9, 0.5, 0.8])[:, None, None], "one stain"),
    "eosin only": (tile(haematoxylin=0), "one stain"),
    "eosin only, without noise": (tile(haematoxylin=0, noise=0), "one stain"),
    "haematoxylin only": (tile(eosin=0), "one stain"),
    "any colours": (np.random.default_rng(2).random((3, 64, 64)), "not those of haematoxylin and eosin"),
    "four pixels": (tile(2 * 32)[:, :2, :2], "of 4 pixels"),
    "very pale": (tile(stains=REFERENCE * 0.2, noise=0), "tissue in|factor"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", UNFIT)
def test_left_alone_with_the_reason(name):
    array, reason = UNFIT[name]
    given = array.astype(np.float32)
    result = normalise_stains(given)
    assert result.reason.startswith("stains not normalised: ")
    assert any(part in result.reason for part in reason.split("|")), result.reason
    assert np.array_equal(result.array, given)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [24, 64, 224])
def test_a_good_tile_is_not_made_worse(size):
    good = tile(size, seed=3)
    result = normalise_stains(good)
    assert result.reason is None
    assert result.array.dtype == np.float32
    assert np.isfinite(result.array).all()
    assert 0 <= result.array.min() <= result.array.max() <= 1
    assert np.abs(result.array - good).mean() < 0.04
    for stains, strengths in ((REFERENCE, (1.5, 0.7)), (RUIFROK, (1.0, 1.0)), (RUIFROK, (1.4, 1.2))):
        other = tile(size, seed=3, stains=stains, haematoxylin=strengths[0], eosin=strengths[1])
        result = normalise_stains(other)
        assert result.reason is None
        before, after = np.abs(other - good).mean(), np.abs(result.array - good).mean()
        assert after < 0.75 * before, (before, after)


def test_a_stream_notes_it(tmp_path):
    for index, array in enumerate((tile(seed=1), np.ones((3, 64, 64)), tile(haematoxylin=0))):
        pixels = (255 * array.transpose(1, 2, 0)).round().astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{index}.png")
    tiles = find_tiles(tmp_path, {})
    plain = next(stream(tiles, [0, 1, 2], 3, (64, 64)))
    batch = next(stream(tiles, [0, 1, 2], 3, (64, 64), normalise=True))
    assert plain.notes == {}
    assert list(batch.notes) == [1, 2]
    assert all(notes[0].startswith("stains not normalised") for notes in batch.notes.values())
    assert not batch.failed
    assert (batch.images[1:] == plain.images[1:]).all()
    assert (batch.images[0] - plain.images[0]).abs().mean() > 1e-3


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones((64, 64, 3), np.float32), r"RGB \(3, H, W\); got the shape \(64, 64, 3\)"),
        (np.full((3, 8, 8), np.nan, np.float32), "NaN or infinite"),
    ],
)
def test_what_is_no_tile_is_refused(array, message):
    with pytest.raises(DataError, match=message):
        normalise_stains(array)
