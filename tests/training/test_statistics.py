from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tesla_med.config.files import load_pipeline
from tesla_med.config.models import Files, MaskLayer, Section, SiteConfig
from tesla_med.demo.volumes import make_site, preset
from tesla_med.errors import CheckpointError, DataError
from tesla_med.io.files import sha256
from tesla_med.models.base import Network, build_model
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.models.moments import source_statistics
from tesla_med.models.statistics import load_statistics, statistics_path
from tesla_med.training.measure import compute_statistics

PIPELINE = load_pipeline("prostate", ["model.params.width=4", "preprocessing.size=[32,32]"])
SITE = SiteConfig(
    id="P",
    pipeline="prostate",
    institution="Phantom",
    files=Files(image=("Case*.nii.gz",), masks=(MaskLayer(pattern="*_segmentation.nii.gz", write=1),)),
)


class Tiny(Network):
    """Features are fixed functions of the image, so that moments are known."""

    Params = Section
    summary = "test"
    divisor = 8

    def __init__(self, offset: float = 0.0, stride: int = 1) -> None:
        super().__init__()
        self.offset, self.stride = offset, stride
        self.outc = nn.Conv2d(3, 2, 1)
        self.drop = nn.Dropout(0.5)

    @classmethod
    def build(cls, params: Section, channels: int, classes: int) -> Tiny:
        return cls()

    @property
    def head(self) -> nn.Module:
        return self.outc

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        images = images[..., :: self.stride, :: self.stride]
        features = torch.cat([images, images**2, torch.sin(5 * images)], dim=1) + self.offset
        return self.outc(self.drop(features))


def expected(
    images: torch.Tensor, labels: torch.Tensor, offset: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    pixels = images.flatten().double().numpy()
    features = np.stack([pixels, pixels**2, np.sin(5 * pixels)], axis=1) + offset
    return features, labels.flatten().numpy()


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_moments_are_those_of_all_pixels(offset: float) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(
        5, 1, 20, 12, generator=generator
    )  # not a multiple of the divisor: padding is cropped
    labels = (torch.rand(5, 20, 12, generator=generator) < 0.3).long()
    model = Tiny(offset).train()
    batches = [(images[:2], labels[:2]), (images[2:], labels[2:])]
    result = source_statistics(model, batches, 3, pixels_per_slice=None)
    assert model.training
    features, targets = expected(images, labels, offset)
    tolerance = {"rtol": 1e-4, "atol": 1e-6 if offset == 0 else 1e-4}
    np.testing.assert_allclose(result.mean, features.mean(0), **tolerance)
    np.testing.assert_allclose(result.covariance, np.cov(features.T, bias=True), **tolerance)
    for index in (0, 1):
        part = features[targets == index]
        np.testing.assert_allclose(result.class_mean[index], part.mean(0), **tolerance)
        np.testing.assert_allclose(result.class_covariance[index], np.cov(part.T, bias=True), **tolerance)
        assert result.class_pixels[index] == len(part)
    assert result.class_pixels[2] == 0
    assert not result.class_mean[2].any()
    assert not result.class_covariance[2].any()
    np.testing.assert_allclose(result.class_ratio, [np.mean(targets == k) for k in range(3)], rtol=1e-6)


def test_pixel_draw_is_seeded_and_close() -> None:
    images = torch.rand(4, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    labels = (images[:, 0] > 0.6).long()
    runs = [
        source_statistics(
            Tiny(), [(images, labels)], 2, pixels_per_slice=500, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    ]
    assert int(runs[0].class_pixels.sum()) == 4 * 500
    assert torch.equal(runs[0].covariance, runs[1].covariance)
    assert not torch.equal(runs[0].covariance, runs[2].covariance)
    full = source_statistics(Tiny(), [(images, labels)], 2, pixels_per_slice=None)
    torch.testing.assert_close(runs[0].mean, full.mean, rtol=0.1, atol=0.05)


def test_coarse_features_take_the_nearest_label() -> None:
    images = torch.rand(1, 1, 16, 16)
    labels = torch.zeros(1, 16, 16, dtype=torch.int64)
    labels[:, :8] = 1
    result = source_statistics(Tiny(stride=2), [(images, labels)], 2, pixels_per_slice=None)
    assert result.class_pixels.tolist() == [32, 32]


class TinyOfVolumes(Network):
    """Two networks of volumes whose features are the image and its square, each with a head."""

    Params = Section
    summary = "test"

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv3d(1, 2, 1) for _ in range(2))

    @classmethod
    def build(cls, params: Section, channels: int, classes: int) -> TinyOfVolumes:
        return cls()

    @property
    def head(self) -> nn.Module:
        return self.heads

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(images, (0, 1, 0, 2, 0, 1))  # as networks do that need legal sizes
        return self.heads[0](padded) + self.heads[1](padded**2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits(images)


def test_moments_of_volumes_of_an_ensemble() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(2, 1, 3, 4, 5, generator=generator)
    labels = torch.randint(2, (2, 3, 4, 5), generator=generator)
    found = source_statistics(TinyOfVolumes(), [(images, labels)], 2)
    vectors = torch.cat([images, images**2], dim=1).movedim(1, -1).reshape(-1, 2)
    assert torch.allclose(found.mean, vectors.mean(0), atol=1e-5)
    assert torch.allclose(found.covariance, torch.cov(vectors.T, correction=0), atol=1e-5)
    for index in range(2):
        assert torch.allclose(found.class_mean[index], vectors[labels.flatten() == index].mean(0), atol=1e-5)
    assert found.class_pixels.sum() == 120
    again = source_statistics(TinyOfVolumes(), [(images, labels)] * 2, 2)  # the batch before is forgotten
    assert torch.allclose(again.mean, found.mean, atol=1e-5)


def test_no_batch_and_no_feature_map() -> None:
    with pytest.raises(DataError, match="at least one"):
        source_statistics(Tiny(), [], 2)

    class Flat(Tiny):
        def logits(self, images: torch.Tensor) -> torch.Tensor:
            return self.drop(images)

    with pytest.raises(CheckpointError, match="nothing"):
        source_statistics(Flat(), [(torch.rand(1, 1, 8, 8), torch.zeros(1, 8, 8).long())], 2)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.v1.safetensors"
    save_checkpoint(path, build_model(PIPELINE), make_card(PIPELINE, ("P",)))
    return path


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    settings = preset("prostate").model_copy(update={"matrix": 32, "slices": 4})
    make_site(tmp_path / "volumes" / "Phantom", "prostate", settings, 2, seed=1)
    return tmp_path / "volumes"


def test_compute_saves_beside_the_weights_and_loads(weights: Path, volumes: Path) -> None:
    path = compute_statistics(weights, PIPELINE, [SITE], volumes, device="cpu")
    assert path == statistics_path(weights)
    assert path.name == "model.v1.statistics.safetensors"
    statistics, card = load_statistics(path)
    assert card.weights_sha256 == sha256(weights)
    assert card.sites == ("P",)
    assert (card.cases, card.slices, card.features) == (2, 8, 4)
    assert card.pixels == 8 * 32 * 32 == int(statistics.class_pixels.sum())
    assert statistics.class_ratio.sum() == pytest.approx(1)
    assert 0 < statistics.class_ratio[1] < 0.5
    assert torch.linalg.eigvalsh(statistics.covariance).min() > -1e-5
    elsewhere = compute_statistics(
        weights, PIPELINE, [SITE], volumes, out=weights.parent / "s" / "o.safetensors"
    )
    torch.testing.assert_close(load_statistics(elsewhere)[0].covariance, statistics.covariance)


def test_load_says_what_is_wrong(weights: Path, volumes: Path) -> None:
    with pytest.raises(CheckpointError, match="tesla-med statistics"):
        load_statistics(statistics_path(weights))
    path = compute_statistics(weights, PIPELINE, [SITE], volumes, device="cpu")
    card = path.with_suffix(".json")
    text = card.read_text()
    card.write_text(text.replace('"features": 4', '"features": 5'))
    with pytest.raises(CheckpointError, match="mean should be"):
        load_statistics(path)
    card.write_text("{}")
    with pytest.raises(CheckpointError, match="not source statistics"):
        load_statistics(path)
    card.write_text(text)
    path.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="not source statistics"):
        load_statistics(path)
