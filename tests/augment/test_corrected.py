"""Corrected views: noise and receive field go, mean and spread stay, slices do not mix."""

import pytest
import torch

from tesla_med.augment.corrected import corrected

SHAPES = ((3, 2, 32, 24), (2, 1, 5, 32, 24), (1, 1, 5, 7, 3))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("correction", ["smooth", "field", "field_smooth"])
def test_mean_and_spread_of_each_channel_stay(shape, correction):
    images = 0.4 + 0.1 * torch.rand(shape, generator=torch.Generator().manual_seed(0))
    found = corrected(images, correction)
    axes = tuple(range(2, images.dim()))
    assert found.shape == images.shape
    assert not torch.equal(found, images)
    assert torch.allclose(found.mean(axes), images.mean(axes), atol=2e-3)
    assert torch.allclose(found.std(axes), images.std(axes), atol=5e-3)


def test_noise_goes():
    generator = torch.Generator().manual_seed(1)
    clean = torch.zeros(1, 1, 64, 64)
    clean[..., 16:48, 16:48] = 0.5
    noisy = 0.2 + clean + 0.1 * torch.randn(clean.shape, generator=generator).clamp(-2, 2)
    found = corrected(noisy, "smooth")
    inside = (..., slice(24, 40), slice(24, 40))
    assert found[inside].std() < 0.4 * noisy[inside].std()


@pytest.mark.parametrize("correction", ["field", "field_smooth"])
def test_a_receive_field_goes(correction):
    rows = torch.linspace(-1, 1, 64)
    checks = ((torch.arange(64) // 4)[:, None] + (torch.arange(64) // 4)[None]) % 2
    clean = (0.1 + 0.1 * checks.float())[None, None]
    coil = clean * torch.exp(0.8 * rows)[:, None]
    ends = [
        image[..., :12, :].mean() / image[..., -12:, :].mean()
        for image in (coil, corrected(coil, correction))
    ]
    assert ends[0] < 0.4
    assert 0.5 < ends[1] < 2.0


def test_slices_of_a_volume_are_corrected_one_by_one():
    volume = torch.zeros(1, 1, 4, 16, 16)
    volume[:, :, 1, 6:9, 6:9] = 1.0
    found = corrected(volume, "smooth")
    assert found[:, :, 1].std() > 0
    assert float(found[:, :, 2].std()) == 0


def test_an_image_of_one_value_stays():
    flat = torch.full((2, 1, 16, 16), 0.3)
    for correction in ("smooth", "field", "field_smooth"):
        assert torch.allclose(corrected(flat, correction), flat, atol=1e-5)
