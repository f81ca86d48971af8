"""Augmentation ops one by one: values against other libraries, and gradients in the magnitude."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from torchvision.transforms import functional as vision

from tesla_med.augment import intensity
from tesla_med.augment.ops import OPS

pytestmark = pytest.mark.usefixtures("one_thread")


def names(**wanted):
    found = [name for name, op in OPS.items() if all(getattr(op, key) == wanted[key] for key in wanted)]
    assert found
    return found


def full(value, count=1):
    return torch.full((count,), float(value))


def draw_for(op, shape, seed=0, dtype=torch.float32):
    """Noise, alternating signs, or nothing."""
    if op.signed:
        return torch.tensor([1.0, -1.0]).repeat(shape[0])[: shape[0]].to(dtype)
    if op.noise is None:
        return None
    return torch.randn(op.noise(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------ gradients


@pytest.mark.parametrize("name", names(kind="intensity", gradient="exact"))
def test_exact_gradient_of_an_intensity_op(name, make_images):
    op = OPS.get(name)
    images = (0.2 + 0.2 * make_images(2, 9, 11, 3)).double()  # the clamp to [0, 1] stays out of it
    images *= torch.tensor([0.9, 0.6, 1.0]).view(1, 3, 1, 1)  # some colour, that of both stains
    draw = draw_for(op, (2, 3, 9, 11), dtype=torch.float64)
    magnitude = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)

    def apply(strength):
        return op.intensities(images, strength, draw)

    assert torch.autograd.gradcheck(apply, magnitude)
    apply(magnitude).square().sum().backward()
    assert (magnitude.grad.abs() > 1e-4).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", names(kind="geometric"))
def test_gradient_of_a_theta(name, sign, make_images):
    op = OPS.get(name)
    assert op.gradient == "exact"
    images = make_images(2, 8, 8).double()
    magnitude = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    signs = full(sign, 2).double()
    assert torch.autograd.gradcheck(lambda strength: op.theta(images, strength, signs), magnitude)
    (op.theta(images, magnitude, signs) * torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])).sum().backward()
    assert (magnitude.grad.abs() > 1e-2).all()


@pytest.mark.parametrize("name", names(kind="geometric"))
def test_gradient_through_the_resampling(name, make_images):
    op = OPS.get(name)
    images = make_images(1, 24, 24, seed=3)
    weights = torch.rand(24, 24, generator=torch.Generator().manual_seed(1))

    def score(magnitude):
        return (op(images, magnitude)[0] * weights).sum()

    magnitude = full(0.62).requires_grad_()
    score(magnitude).backward()
    step = 4e-3
    slope = (score(full(0.62 + step)) - score(full(0.62 - step))) / (2 * step)
    assert slope.abs() > 0.1
    assert magnitude.grad.item() == pytest.approx(slope.item(), rel=0.1, abs=0.1)


@pytest.mark.parametrize("strengths", [(0.0, 0.5), (0.13, 0.77), (0.3, 1.0)])
@pytest.mark.parametrize("name", names(gradient="straight-through"))
def test_straight_through_is_one_at_every_pixel(name, strengths, make_images):
    op = OPS.get(name)
    images = make_images(2, 9, 7, 3)
    images[:, :, 0, 0], images[:, :, 0, 1] = 0.0, 1.0
    magnitude = torch.tensor(strengths, requires_grad=True)
    result = op.intensities(images, magnitude)
    for image in range(2):
        for pixel in result[image].flatten():
            (slope,) = torch.autograd.grad(pixel, magnitude, retain_graph=True)
            assert slope[image] == 1.0
            assert slope[1 - image] == 0.0


@pytest.mark.parametrize("name", names(gradient="straight-through"))
def test_straight_through_leaves_the_values_alone(name, make_images):
    op = OPS.get(name)
    images = make_images(2, 9, 7, 3)
    plain = op.intensities(images, torch.tensor([0.3, 0.8]))
    tracked = op.intensities(images, torch.tensor([0.3, 0.8], requires_grad=True)).detach()
    assert torch.equal(plain, tracked)
    assert torch.equal(intensity.straight_through(images, torch.tensor([0.3, 0.8])), images)


# ------------------------------------------------------------ geometry

THETAS = {
    "ShearX": lambda s: [[1, 0.6 * s - 0.3, 0], [0, 1, 0]],
    "ShearY": lambda s: [[1, 0, 0], [0.6 * s - 0.3, 1, 0]],
    "TranslateX": lambda s: [[1, 0, 0.9 * s - 0.45], [0, 1, 0]],
    "TranslateY": lambda s: [[1, 0, 0], [0, 1, 0.9 * s - 0.45]],
    "Rotate": lambda s: _turn(math.pi / 3 * s - math.pi / 6),
    "MildRotate": lambda s: _turn(math.pi / 18 * s),
    "MildShift": lambda s: [[1, 0, 0.1 * s], [0, 1, 0]],
    "MildShear": lambda s: [[1, 0.1 * s, 0], [0, 1, 0]],
    "MildScale": lambda s: [[1.15**s, 0, 0], [0, 1.15**s, 0]],
}


def _turn(angle):
    return [[math.cos(angle), math.sin(angle), 0], [-math.sin(angle), math.cos(angle), 0]]


@pytest.mark.parametrize("name", THETAS)
def test_theta_is_in_the_stated_range(name, make_images):
    magnitude = torch.tensor([0.0, 0.2, 0.5, 1.0])
    theta = OPS.get(name).theta(make_images(4, 8, 8), magnitude)
    want = torch.tensor([THETAS[name](s) for s in magnitude.tolist()], dtype=torch.float32)
    assert torch.allclose(theta, want, atol=1e-6)


@pytest.mark.parametrize("name", ["ShearX", "TranslateY", "Rotate", "MildShift"])
def test_a_sign_mirrors_the_displacement(name, make_images):
    op, images = OPS.get(name), make_images(1, 8, 8)
    assert torch.allclose(op.theta(images, full(0.8)), THETAS_AT(name, 0.8), atol=1e-6)
    mirrored = op.theta(images, full(0.8), full(-1))
    want = 2 * torch.eye(2, 3) - THETAS_AT(name, 0.8)
    if name == "Rotate":
        want = THETAS_AT(name, 0.2)
    assert torch.allclose(mirrored, want, atol=1e-6)


def THETAS_AT(name, strength):
    return torch.tensor([THETAS[name](strength)], dtype=torch.float32)


def test_scale_goes_both_ways(make_images):
    op, images = OPS.get("MildScale"), make_images(2, 8, 8)
    theta = op.theta(images, full(1, 2), torch.tensor([1.0, -1.0]))
    assert theta[:, 0, 0].tolist() == pytest.approx([1.15, 1 / 1.15])


# ------------------------------------------------------------ intensity, against other libraries


def bytes_of(images):
    return (images * 255).round().to(torch.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strength", [0.0, 0.3, 0.8, 1.0])
def test_factors_match_torchvision(strength, channels, make_images):
    images = make_images(2, 17, 19, channels)
    factor = 0.1 + 1.8 * strength
    bright = OPS.get("Brightness").intensities(images, full(strength, 2))
    assert torch.allclose(bright, vision.adjust_brightness(images, factor), atol=1e-5)
    contrast = OPS.get("Contrast").intensities(images, full(strength, 2))
    assert torch.allclose(contrast, vision.adjust_contrast(images, factor), atol=2e-3)
    color = OPS.get("Color").intensities(images, full(strength, 2))
    want = vision.adjust_saturation(images, factor) if channels == 3 else images
    assert torch.allclose(color, want, atol=2e-3)  # 0.2989 and 0.299 are both in use for red
    sharp = OPS.get("Sharpness").intensities(images, full(strength, 2))[..., 1:-1, 1:-1]
    assert torch.allclose(sharp, vision.adjust_sharpness(images, factor)[..., 1:-1, 1:-1], atol=1e-5)


def test_contrast_is_about_each_images_own_mean(make_images):
    images = make_images(2, 9, 9) * torch.tensor([0.3, 1.0]).view(2, 1, 1, 1)
    flat = intensity.contrast(images, torch.zeros(2, 1, 1, 1))
    for image in range(2):
        assert torch.allclose(flat[image], images[image].mean().expand_as(flat[image]), atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_autocontrast_matches_torchvision(channels, make_images):
    images = make_images(2, 17, 19, channels)
    result = OPS.get("AutoContrast").intensities(images, full(0.4, 2))
    assert torch.allclose(result, vision.autocontrast(images), atol=1e-5)
    constant = torch.full((1, channels, 5, 5), 0.3)
    assert torch.equal(OPS.get("AutoContrast").intensities(constant, full(0.4)), constant)


@pytest.mark.parametrize("channels", [1, 3])
def test_equalize_follows_the_rule_of_pil(channels, make_images):
    from PIL import Image, ImageOps

    images = bytes_of(make_images(1, 33, 35, channels))
    result = bytes_of(OPS.get("Equalize").intensities(images / 255.0, full(0.4)))[0]
    planes = [ImageOps.equalize(Image.fromarray(plane.numpy())) for plane in images[0]]
    want = torch.stack([torch.from_numpy(np.array(plane)) for plane in planes])
    assert (result.int() - want.int()).abs().max() <= 1


@pytest.mark.parametrize(("strength", "bits"), [(0.0, 4), (0.2, 4), (0.25, 5), (0.6, 6), (0.99, 7), (1.0, 8)])
def test_posterize_keeps_bits(strength, bits, make_images):
    images = bytes_of(make_images(1, 17, 19))
    result = OPS.get("Posterize").intensities((images + 0.25) / 255.0, full(strength))
    assert torch.equal(bytes_of(result), vision.posterize(images, bits))


@pytest.mark.parametrize("strength", [0.0, 0.4, 0.7])
def test_solarize_matches_torchvision(strength, make_images):
    images = make_images(1, 17, 19)
    result = OPS.get("Solarize").intensities(images, full(strength))
    assert torch.allclose(result, vision.solarize(images, strength), atol=1e-6)


def test_invert(make_images):
    images = make_images(2, 9, 9)
    assert torch.allclose(OPS.get("Invert").intensities(images, full(0.4, 2)), 1 - images, atol=1e-6)


@pytest.mark.parametrize(
    ("strength", "sign", "power"), [(0, 1, 1), (1, 1, 2), (1, -1, 0.5), (0.5, 1, 2**0.5)]
)
def test_gamma_gain_and_tissue_contrast(strength, sign, power, make_images):
    images, signs = 0.6 * make_images(1, 9, 9), full(sign)
    result = OPS.get("Gamma").intensities(images, full(strength), signs)
    assert torch.allclose(result, images**power, atol=1e-5)
    result = OPS.get("Gain").intensities(images, full(strength), signs)
    assert torch.allclose(result, images * power**0.5, atol=1e-5)
    result = OPS.get("TissueContrast").intensities(images, full(strength), signs)
    want = (images.mean() + (images - images.mean()) * power).clamp(0, 1)
    assert torch.allclose(result, want, atol=1e-5)


def test_unit_range():
    values = torch.tensor([-0.5, 0.0, 0.4, 1.0, 1.5], requires_grad=True)
    result = intensity.unit_range(values)
    assert result.tolist() == pytest.approx([0, 0, 0.4, 1, 1])
    (slopes,) = torch.autograd.grad(result.sum(), values)
    assert slopes.tolist() == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("strength", [0.2, 0.5, 1.0])
def test_blur_matches_scipy(strength, make_images):
    images = make_images(2, 24, 20)
    result = OPS.get("GaussianBlur").intensities(images, torch.tensor([strength, 0.1]))[0, 0]
    want = ndimage.gaussian_filter(images[0, 0].numpy(), 2 * strength, mode="mirror", radius=6)
    assert np.abs(result.numpy() - want).max() < 1e-5


def test_rician_noise_has_the_stated_spread():
    op = OPS.get("RicianNoise")
    dark, grey = torch.zeros(1, 1, 128, 128), torch.full((1, 1, 128, 128), 0.5)
    draw = draw_for(op, (1, 1, 128, 128))
    floor = op.intensities(dark, full(1), draw)
    assert floor.mean().item() == pytest.approx(0.1 * math.sqrt(math.pi / 2), rel=0.02)
    bright = op.intensities(grey, full(0.5), draw)
    assert bright.std().item() == pytest.approx(0.05, rel=0.03)


def test_bias_field_is_smooth_and_no_stronger_than_stated():
    op, images = OPS.get("BiasField"), torch.full((3, 1, 40, 30), 0.4)
    field = (op.intensities(images, torch.tensor([1.0, 0.5, 1.0]), draw_for(op, images.shape)) / 0.4).log()
    assert field.abs().amax(dim=(1, 2, 3)).tolist() == pytest.approx([0.6, 0.3, 0.6], rel=1e-4)
    third = field.diff(n=4, dim=2)
    assert third.abs().max() < 1e-4  # a cubic along either axis
    assert not torch.allclose(field[0], field[2], atol=0.1)


def test_ghost_is_half_a_field_away():
    images = torch.zeros(1, 1, 8, 6)
    images[0, 0, 1, 2] = 0.5
    result = OPS.get("Ghosting").intensities(images, full(1))
    assert result[0, 0, 5, 2].item() == pytest.approx(0.15)
    assert result.sum().item() == pytest.approx(0.65)


def test_spike_is_one_wave():
    op, images = OPS.get("Spike"), torch.full((1, 1, 32, 32), 0.5)
    result = op.intensities(images, full(1), torch.tensor([[0.53, 0.22, 0.0]]))
    assert (result - 0.5).abs().max().item() == pytest.approx(0.15, rel=1e-3)
    assert torch.allclose(result[..., 0, :], result[..., -1, :], atol=1e-4)  # whole periods
    assert torch.allclose(result[..., 0], result[..., -1], atol=1e-4)
    spectrum = torch.fft.fft2((result - 0.5)[0, 0]).abs()
    strongest = divmod(int(spectrum.flatten().argmax()), 32)
    assert strongest in {(4, 2), (28, 30)}


# ------------------------------------------------------------ noise that is not given


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.noise is not None])
def test_without_a_draw_a_random_op_does_nothing(name, make_images):
    images = make_images(2, 9, 9)
    assert torch.allclose(OPS.get(name).intensities(images, full(1, 2)), images, atol=1e-6)
