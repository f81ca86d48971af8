"""Normalised stains are finite; a white, grey or single-stain tile stays as it was, and that is noted.

A good tile is not made worse, whatever its size.
"""

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import gaussian_filter
from tile_files import classify, probabilities, tiles

CASE = 93
MACENKO = np.array([[0.5626, 0.7201, 0.4062], [0.2159, 0.8012, 0.5581]])
ON = "--set", "preprocessing.stain_normalisation=true"
ALL = "--set", "preprocessing.least_tissue=0"


def tile(size=64, *, haematoxylin=1.0, eosin=1.0, seed=3):
    """Return a made-up H&E tile (H, W, 3): nuclei on a ground of eosin, with the noise of a camera."""
    random = np.random.default_rng(seed)

    def field(width):
        values = gaussian_filter(random.random((size, size)), width)
        return (values - values.min()) / (values.max() - values.min())

    nuclei = haematoxylin * 2.0 * np.clip(2.5 * (field(2) - 0.5), 0, 1)
    ground = eosin * (0.15 + 0.85 * field(6))
    light = np.exp(-np.einsum("sc,shw->hwc", MACENKO, np.stack([nuclei, ground])))
    return np.clip(255 * light + 2 * random.standard_normal(light.shape), 0, 255).astype(np.uint8)


UNFIT = {
    "white": np.full((64, 64, 3), 255, np.uint8),
    "nearly_white": np.random.default_rng(0).integers(245, 252, (64, 64, 3)).astype(np.uint8),
    "black": np.zeros((64, 64, 3), np.uint8),
    "grey": np.repeat(np.random.default_rng(1).integers(0, 256, (64, 64, 1)), 3, axis=2).astype(np.uint8),
    "eosin": tile(haematoxylin=0),
    "haematoxylin": tile(eosin=0),
}
FIT = {"small": tile(24), "stained_more": tile(haematoxylin=1.5, eosin=0.7), "whole": tile(96)}


@pytest.mark.filterwarnings("error")
def test_unfit_tiles_stay_as_they_were(tmp_path, tile_weights, monkeypatch, capsys):
    folder = tiles(tmp_path)
    for name, array in (UNFIT | FIT).items():
        Image.fromarray(array).save(folder / f"{name}.png")
    assert classify(tmp_path, tile_weights, monkeypatch, *ALL)[0] == 0
    (tmp_path / "out").rename(tmp_path / "plain")
    capsys.readouterr()
    code, rows = classify(tmp_path, tile_weights, monkeypatch, *ALL, *ON)
    assert code == 0
    assert all(np.isfinite(probabilities(row)).all() for row in rows.values())
    said = " ".join(capsys.readouterr().err.split())
    assert "stains not normalised" in said
    (tmp_path / "out").rename(tmp_path / "normalised")
    (tmp_path / "plain").rename(tmp_path / "out")
    _, before = classify(tmp_path, tile_weights, monkeypatch, *ALL, "--resume")
    for name in UNFIT:
        assert np.array_equal(*(probabilities(table[f"{name}.png"]) for table in (before, rows))), name
    for name in FIT:
        assert not np.array_equal(*(probabilities(table[f"{name}.png"]) for table in (before, rows))), name


def test_tiles_are_brought_nearer_to_one_stain(tmp_path, tile_weights, monkeypatch):
    """What two copies of a tile, one strong in each stain, are taken for differs less, over twelve tiles."""
    folder = tiles(tmp_path)
    for seed in range(12):
        for name, strength in (("nuclei", (1.5, 0.7)), ("ground", (0.6, 1.6))):
            array = tile(haematoxylin=strength[0], eosin=strength[1], seed=seed)
            Image.fromarray(array).save(folder / f"{name}{seed}.png")
    apart = []
    for words in ((), ON):
        _, rows = classify(tmp_path, tile_weights, monkeypatch, *words, "--overwrite")
        found = [[probabilities(rows[f"{name}{i}.png"]) for i in range(12)] for name in ("nuclei", "ground")]
        apart.append(np.abs(np.subtract(*found)).sum())
    assert apart[1] < 0.8 * apart[0]
