from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tesla_med.augment.families import FAMILIES, MILD, ROBUST, Family
from tesla_med.augment.randomise import LEVELS, bezier, hot_spot, interpolated, mapped, randomise, restyle
from tesla_med.augment.training import TILE_FAMILIES
from tesla_med.config.models import TrainConfig

STILL = Family(flip=0.0, rotation=0.0, zoom=0.0, shift=0.0)
ALONE: dict[str, Any] = {
    "elastic": (1.0, 0.04),
    "gamma": (1.0, 0.7),
    "inverted_gamma": (1.0, 0.7),
    "bezier": 1.0,
    "inversion": 1.0,
    "convolution": 1.0,
    "random_filter": 1.0,
    "bias": (1.0, 0.5),
    "hot_spot": (1.0, 6.0),
    "clipping": (1.0, 5.0),
    "blur": (1.0, 1.5),
    "sharpen": (1.0, 3.0),
    "coarse": (1.0, 0.4),
    "noise": (1.0, 0.08),
    "contrast": 0.4,
    "brightness": 0.2,
    "flip": 1.0,
    "rotation": 15.0,
    "zoom": 0.3,
    "shift": 0.1,
}
GEOMETRY = ("flip", "rotation", "zoom", "shift", "elastic")


def batch(count: int = 8, channels: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.zeros(count, 40, 32, dtype=torch.int64)
    labels[:, 8:22, 10:24] = 1
    images = (
        0.2 + 0.5 * labels[:, None].float() + 0.1 * torch.rand(count, channels, 40, 32, generator=generator)
    )
    return images, labels


def seeded(seed: int = 0) -> torch.Generator:
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


def test_every_part_of_a_family_is_known_here() -> None:
    assert set(ALONE) == {item.name for item in fields(Family)}


def test_the_configuration_knows_the_families() -> None:
    names = TrainConfig.model_json_schema()["properties"]["augment"]["enum"]
    assert list(FAMILIES) == list(TILE_FAMILIES) == names


def test_a_family_that_does_nothing_changes_nothing() -> None:
    images, labels = batch()
    moved, targets = randomise(images, labels, STILL, seeded())
    assert torch.allclose(moved, images, atol=1e-5)
    assert torch.equal(targets, labels)


@pytest.mark.parametrize("name", list(ALONE))
def test_each_part_alone_changes_what_it_should(name: str) -> None:
    images, labels = batch()
    family = replace(STILL, **{name: ALONE[name]})
    moved, targets = randomise(images, labels, family, seeded())
    assert moved.shape == images.shape
    assert torch.isfinite(moved).all()
    assert moved.min() >= 0
    assert moved.max() <= 1
    assert not torch.allclose(moved, images, atol=1e-3)
    assert torch.equal(targets, labels) == (name not in GEOMETRY)
    again = randomise(images, labels, family, seeded())
    assert torch.equal(again[0], moved)
    assert torch.equal(again[1], targets)


@pytest.mark.parametrize("family", [MILD, ROBUST])
@pytest.mark.parametrize("channels", [1, 3])
def test_families_keep_shape_and_range(family: Family, channels: int) -> None:
    images, labels = batch(channels=channels)
    for seed in range(5):
        moved, targets = randomise(images, labels, family, seeded(seed))
        assert moved.shape == images.shape
        assert torch.isfinite(moved).all()
        assert moved.min() >= 0
        assert moved.max() <= 1
        assert set(targets.unique().tolist()) <= {0, 1}


def test_constant_images_stay_finite() -> None:
    images, labels = torch.full((16, 1, 32, 32), 0.5), torch.zeros(16, 32, 32, dtype=torch.int64)
    for seed in range(3):
        assert torch.isfinite(randomise(images, labels, ROBUST, seeded(seed))[0]).all()


def test_images_and_labels_move_alike() -> None:
    _, labels = batch(32)
    family = replace(STILL, flip=0.5, rotation=15.0, zoom=0.25, shift=0.08, elastic=(0.4, 0.04))
    moved, targets = randomise(labels[:, None].float(), labels, family, seeded())
    assert ((moved[:, 0] > 0.5) == targets.bool()).float().mean() > 0.98


def test_restyling_leaves_the_place_of_things() -> None:
    images, labels = batch()
    family = replace(MILD, rotation=90.0, flip=1.0, shift=0.4, noise=(0.0, 0.0))
    bright = restyle(images, family, seeded())[:, 0] > 0.45
    assert (bright == labels.bool()).float().mean() > 0.9


def test_bezier_maps_rise_from_0_to_1() -> None:
    tables = bezier(torch.rand(50, 2, 2, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(tables[:, 0], torch.zeros(50), atol=1e-4)
    assert torch.allclose(tables[:, -1], torch.ones(50), atol=1e-4)
    straight = bezier(torch.tensor([[[1 / 3, 1 / 3], [2 / 3, 2 / 3]]]))
    assert torch.allclose(straight[0], torch.linspace(0, 1, LEVELS + 1), atol=1e-4)


def test_maps_are_linear_between_their_entries() -> None:
    table = torch.linspace(0, 1, LEVELS + 1)[None] ** 2
    values = torch.linspace(0, 1, 1000)[None]
    assert torch.allclose(interpolated(table, values), values**2, atol=1e-5)
    image = torch.rand(1, 2, 5, 7)
    assert torch.allclose(mapped(image, table), image**2, atol=1e-5)


def test_a_hot_spot_has_its_gain_at_its_centre() -> None:
    spot = hot_spot(33, 33, torch.tensor([[0.0, 0.0]]), torch.tensor([[0.25]]), torch.tensor([[5.0]]))
    assert spot[0, 0, 16, 16] == pytest.approx(6.0)
    assert spot[0, 0, 16, 20] == pytest.approx(1 + 5 * 2.718281828**-0.5)
    assert spot[0, 0, 0, 0] < 1.01
