from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError
from skimage.color import combine_stains, hed_from_rgb, rgb_from_hed, separate_stains

from tesla_med.config.files import load_site
from tesla_med.demo.tiles import (
    FOLDERS,
    TISSUE_CLASSES,
    StainSettings,
    concentrations,
    make_tile,
    make_tile_site,
    render,
    stain_preset,
)
from tesla_med.errors import ConfigError, OutputError
from tesla_med.io import tiles

CLEAN = StainSettings(variation=0, brightness=1, blur_um=0, noise=0)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("tissue", TISSUE_CLASSES)
def test_a_tile_repeats_and_seeds_differ(tissue):
    first, second, other = (make_tile(tissue, stain_preset(), rng(seed), 32) for seed in (1, 1, 2))
    assert first.shape == (32, 32, 3)
    assert first.dtype == np.uint8
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("tissue", TISSUE_CLASSES)
def test_tissue_reaches_every_edge(tissue):
    amounts = np.mean([concentrations(tissue, rng(seed), 64) for seed in range(24)], axis=0)[..., 0]
    inside = amounts[16:-16, 16:-16].mean()
    for edge in (amounts[:6], amounts[-6:], amounts[:, :6], amounts[:, -6:]):
        assert edge.mean() > 0.6 * inside


def test_stains_are_those_of_scikit_image():
    amounts = concentrations("mucosa", rng(), 48)
    picture = render(amounts, CLEAN, rng())
    lengths = np.linalg.norm(rgb_from_hed[:2], axis=1)
    # Beer-Lambert there: light = exp(ln(1e-6) * stains @ matrix)
    scale = np.log(10) / -np.log(1e-6)
    stains = np.concatenate([amounts / lengths * scale, np.zeros((48, 48, 1))], axis=-1)
    expected = combine_stains(stains, rgb_from_hed)
    np.testing.assert_allclose(picture / 255, expected, atol=0.5 / 255 + 1e-9)
    back = separate_stains(picture / 255, hed_from_rgb)[..., :2] / scale * lengths
    assert np.abs(back - amounts)[picture.min(axis=-1) > 20].max() < 0.1


def test_classes_differ_by_texture_not_by_stain_alone():
    def nuclei(tissue):
        return np.mean([(concentrations(tissue, rng(s), 64)[..., 0] > 0.35).mean() for s in range(6)])

    assert nuclei("lymphocytes") > 0.35
    assert nuclei("tumour") > 0.35
    assert nuclei("stroma") < 0.2
    assert nuclei("mucosa") < 0.3
    pale = {
        t: np.mean([(concentrations(t, rng(s), 64).sum(-1) < 0.12).mean() for s in range(6)])
        for t in TISSUE_CLASSES
    }
    assert pale["mucosa"] > 3 * pale["stroma"]


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"haematoxylin": 1.5}, "darker"),
        ({"eosin": 1.5}, "darker"),
        ({"gamma": 1.5}, "darker"),
        ({"brightness": 0.7}, "darker"),
        ({"haematoxylin": 0.5}, "lighter"),
    ],
)
def test_settings_move_the_light(change, moves):
    amounts = concentrations("tumour", rng(), 32)
    before = render(amounts, CLEAN, rng()).astype(float)
    after = render(amounts, CLEAN.model_copy(update=change), rng()).astype(float)
    assert (after.mean() < before.mean()) == (moves == "darker")


def test_blur_noise_and_hue():
    amounts = concentrations("lymphocytes", rng(), 64)
    sharp, blurred, noisy, turned = (
        render(amounts, CLEAN.model_copy(update=change), rng()).astype(float)
        for change in ({}, {"blur_um": 3.0}, {"noise": 0.05}, {"haematoxylin_mix": 0.5})
    )
    assert blurred.std() < 0.7 * sharp.std()
    assert 8 < (noisy - sharp).std() < 13  # 0.05 of 255, some of it cut off at white and black
    share = [picture[..., 0].mean() / picture[..., 1].mean() for picture in (sharp, turned)]
    assert share[1] > 1.2 * share[0]  # eosin lets red through
    np.testing.assert_allclose(np.linalg.norm(StainSettings(eosin_mix=0.4).vectors, axis=1), 1)


def test_presets_and_shift():
    assert stain_preset("hard", shift=0) == stain_preset("source") == StainSettings()
    half, whole = stain_preset("hard", shift=0.5), stain_preset("hard")
    assert StainSettings().gamma < half.gamma < whole.gamma
    with pytest.raises(ConfigError, match="hrad"):
        stain_preset("hrad")
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        stain_preset("hard", shift=1.5)
    with pytest.raises(ValidationError):
        StainSettings(gamma=0)


@pytest.mark.parametrize("name", FOLDERS)
def test_a_site_is_found_under_the_names_of_the_real_one(name, tmp_path: Path):
    paths = make_tile_site(tmp_path, stain_preset(), 2, size=32, folders=FOLDERS[name])
    found = tiles.find_tiles(tmp_path, load_site(f"kather/{name}").tiles)
    assert sorted(paths) == sorted(found.paths)
    order = {folder: place for place, folder in enumerate(FOLDERS[name].values())}
    assert found.labels.tolist() == [order[path.parent.name] for path in found.paths]
    assert not found.skipped
    assert tiles.read_tile(paths[0]).notes == ()


def test_a_tile_does_not_depend_on_how_many_there_are(tmp_path: Path):
    few = make_tile_site(tmp_path / "a", stain_preset(), 1, seed=3, size=32)
    many = make_tile_site(tmp_path / "b", stain_preset(), 2, seed=3, size=32)
    assert [path.read_bytes() for path in few] == [path.read_bytes() for path in many[::2]]


def test_what_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="tumor"):
        concentrations("tumor", rng())
    with pytest.raises(ConfigError, match="16 pixels"):
        concentrations("tumour", rng(), 8)
    with pytest.raises(ConfigError, match="at least one"):
        make_tile_site(tmp_path, stain_preset(), 0)
    with pytest.raises(ConfigError, match="distinct folder"):
        make_tile_site(tmp_path, stain_preset(), 1, folders={"tumour": "TUM"})
    (tmp_path / "TUM").mkdir()
    with pytest.raises(OutputError, match="TUM"):
        make_tile_site(tmp_path, stain_preset(), 1)
