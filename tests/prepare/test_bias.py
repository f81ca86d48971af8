"""Division by the receive field: by hand, and through the whole preparation and back."""

import numpy as np
import pytest
import small_site as small
import torch

from tesla_med.config.models import Intensity, Preprocessing, Region
from tesla_med.io.volumes import read_volume
from tesla_med.prepare.bias import divided
from tesla_med.prepare.transforms import Preprocessor


@pytest.mark.parametrize("shape", [(1, 64, 48, 3), (2, 33, 20, 1), (1, 8, 8, 2)])
def test_a_slow_field_goes_and_the_structure_stays(shape):
    rows = torch.linspace(0.5, 3.0, shape[1])[None, :, None, None]
    structure = 1.0 + 0.2 * (torch.arange(shape[2]) % 2)[None, None, :, None]
    plain = divided(structure.expand(shape).clone())
    bright = divided((rows * structure).expand(shape).clone())
    assert plain.shape == shape
    assert torch.isfinite(bright).all()
    change = bright.mean(dim=2).std(dim=1) / bright.mean(dim=(1, 2))
    assert (change < 0.5 * rows.std() / rows.mean()).all()
    contrast = bright[:, :, 1] / bright[:, :, 0]
    assert torch.allclose(contrast, torch.full_like(contrast, 1.2), atol=0.08)


def test_nothing_is_divided_by_zero():
    assert torch.equal(divided(torch.zeros(1, 16, 16, 2)), torch.zeros(1, 16, 16, 2))


@pytest.mark.parametrize("scaling", ["minmax", "percentile"])
def test_a_corrected_volume_is_prepared_and_comes_back(scaling, tmp_path):
    (path,) = small.make_volumes(tmp_path, 1)
    intensity = Intensity(scaling=scaling, bias_correction=True)
    prepared = Preprocessor(Preprocessing(intensity=intensity, size=(48, 48)), Region(), 2)(read_volume(path))
    assert prepared.images.shape == (small.SLICES, 1, 48, 48)
    assert float(prepared.images.min()) >= 0
    assert 0.8 < float(prepared.images.max()) <= 1
    mask = torch.zeros(small.SLICES, 48, 48)
    mask[:, 12:30, 15:33] = 1
    native = prepared.restore(torch.stack([1 - mask, mask], dim=1)).argmax(0)
    assert native.shape == read_volume(path).shape
    assert native.mean() == pytest.approx(18 * 18 / 48**2, rel=0.05)
    assert np.array_equal(native, (native > 0).astype(native.dtype))


def test_words():
    assert str(Intensity()) == "min-max"
    assert str(Intensity(scaling="percentile")) == "percentiles 0.5 to 99.5"
    assert str(Intensity(bias_correction=True)) == "min-max, receive field divided out"
