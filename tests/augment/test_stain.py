"""Stain operations: separation and mixing against scikit-image, and what they leave alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from skimage.color import hed2rgb, hed_from_rgb, rgb2hed, rgb_from_hed

from tesla_med.augment.ops import OP_SETS, OPS
from tesla_med.augment.stain import ABSORPTIONS, DARKEST, coloured, scale_stain, separate

pytestmark = pytest.mark.usefixtures("one_thread")

UNIT = -math.log(DARKEST)
"""scikit-image counts concentrations in this density."""


def random_rgb(count=2, seed=0):
    return torch.rand(count, 3, 24, 20, generator=torch.Generator().manual_seed(seed))


def stained(seed=0, count=2):
    """Pictures (n, 3, H, W) mixed by scikit-image, and their concentrations (n, H, W, 3)."""
    held = 0.09 * np.random.default_rng(seed).random((count, 24, 20, 3))
    return torch.from_numpy(hed2rgb(held)).permute(0, 3, 1, 2).float(), held


def last(images):
    return images.permute(0, 2, 3, 1).double().numpy()


def test_the_absorptions_are_those_of_scikit_image():
    assert np.allclose(ABSORPTIONS, rgb_from_hed)
    assert np.allclose(np.linalg.inv(ABSORPTIONS), hed_from_rgb)


@pytest.mark.parametrize("seed", range(3))
def test_separation(seed):
    images = random_rgb(seed=seed)
    images[0, :, 0, 0], images[0, :, 0, 1] = 0.0, 1.0
    ours = separate(images)
    assert (ours < -0.1).any()  # any colour, not only those of stains
    assert np.allclose(last(ours.clamp_min(0)) / UNIT, rgb2hed(last(images)), atol=1e-5)
    images, held = stained(seed)
    assert np.allclose(last(separate(images)) / UNIT, held, atol=1e-5)


@pytest.mark.parametrize("stain", [0, 1])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0, 1.3, 2.0])
def test_scaling_is_separation_scaled_and_mixed_again(stain, factor):
    images, held = stained(stain)
    scaled = held.copy()
    scaled[..., stain] *= factor
    ours = scale_stain(images, torch.full((2, 1, 1, 1), factor), stain)
    assert np.allclose(last(ours), hed2rgb(scaled), atol=1e-5)


@pytest.mark.parametrize(("name", "stain"), [("Haematoxylin", 0), ("Eosin", 1)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_op_scales_its_stain_alone(name, stain, sign):
    images, held = stained()
    magnitude, signs = torch.tensor([0.3, 0.9]), torch.tensor([sign, sign])
    result, _ = OPS.get(name)(images, magnitude, signs)
    found = rgb2hed(last(result))
    inside = (last(result) < 0.999).all(axis=-1)
    assert inside.mean() > 0.8
    for index, strength in enumerate((0.3, 0.9)):
        want = held[index].copy()
        want[..., stain] *= 2 ** (sign * strength)
        assert np.allclose(found[index][inside[index]], want[inside[index]], atol=1e-4)


@pytest.mark.parametrize("stain", [0, 1])
def test_what_holds_no_stain_stays(stain):
    factor = torch.full((3, 1, 1, 1), 1.7)
    images = 0.1 + 0.9 * torch.rand(3, 1, 9, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(scale_stain(images, factor, stain), images)
    grey = images.expand(3, 3, 9, 8).clone()
    grey[2, 1, 4, 4] *= 0.5  # a picture with any colour is no grey one
    result = scale_stain(grey, factor, stain)
    assert coloured(grey).flatten().tolist() == [False, False, True]
    assert torch.equal(result[:2], grey[:2])
    assert (result[2] - grey[2])[:, 4, 4].abs().max() > 0.02
    white = torch.ones(3, 3, 9, 8)
    white[:, 1, 0, 0] = 0.3
    assert torch.equal(scale_stain(white, factor, stain)[..., 1:, :], white[..., 1:, :])
    opposed = separate(random_rgb(3))[:, stain] < 0
    assert opposed.any()
    kept = scale_stain(random_rgb(3), factor, stain) - random_rgb(3)
    assert not kept.permute(0, 2, 3, 1)[opposed].any()


@pytest.mark.parametrize("name", ["Haematoxylin", "Eosin"])
def test_gradient_by_differences(name):
    images, _ = stained()
    op, signs = OPS.get(name), torch.tensor([1.0, -1.0])
    weights = torch.rand(images.shape, generator=torch.Generator().manual_seed(1))
    weights[(op(images, torch.full((2,), 0.45), signs)[0] > 0.99)] = 0  # clamped there

    def total(magnitude):
        return (weights * op(images, magnitude, signs)[0]).sum(dim=(1, 2, 3))

    magnitude = torch.tensor([0.4, 0.4], requires_grad=True)
    (gradient,) = torch.autograd.grad(total(magnitude).sum(), magnitude)
    step = 0.01
    with torch.no_grad():
        differences = (total(magnitude + step) - total(magnitude - step)) / (2 * step)
    assert torch.allclose(gradient, differences, rtol=0.01)
    assert gradient[0] < 0 < gradient[1]  # more stain is darker


@pytest.mark.parametrize("value", [0.0, 1e-7, 1e-3, 1.0])
def test_extreme_pixels_stay_finite(value):
    images = torch.full((2, 3, 4, 4), value)
    images[:, 0] = 0.5
    images[1, 2] = 1.0
    images.requires_grad_()
    magnitude = torch.ones(2, requires_grad=True)
    for name in ("Haematoxylin", "Eosin"):
        for sign in (1.0, -1.0):
            result, _ = OPS.get(name)(images, magnitude, torch.full((2,), sign))
            assert torch.isfinite(result).all()
            gradients = torch.autograd.grad(result.sum(), (images, magnitude))
            assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_the_set_is_the_papers_with_the_stains():
    assert OP_SETS["stain"] == (*OP_SETS["generic"], "Haematoxylin", "Eosin")
