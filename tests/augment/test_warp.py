"""Warps: direction, border rule, inverse and composition."""

from __future__ import annotations

import math

import pytest
import torch

from tesla_med.augment import warp

pytestmark = pytest.mark.usefixtures("one_thread")


def rotation(degrees):
    angle = math.radians(degrees)
    return torch.tensor([[[math.cos(angle), math.sin(angle), 0.0], [-math.sin(angle), math.cos(angle), 0.0]]])


def random_thetas(count, seed=0, strength=0.2):
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(2, 3) + strength * (2 * torch.rand(count, 2, 3, generator=generator) - 1)


def smooth(height=48, width=48):
    rows = torch.linspace(-1, 1, height)[:, None]
    columns = torch.linspace(-1, 1, width)[None]
    return (0.5 + 0.4 * torch.sin(2 * rows + 1) * torch.cos(2.5 * columns))[None, None]


def test_identity():
    images = torch.rand(3, 2, 9, 7, generator=torch.Generator().manual_seed(0))
    theta = warp.identity(3)
    assert theta.shape == (3, 2, 3)
    assert torch.allclose(warp.to_view(images, theta), images, atol=1e-6)
    assert torch.allclose(warp.from_view(images, theta), images, atol=1e-6)


def test_theta_maps_output_to_input_in_half_fields():
    images = torch.arange(48.0).view(1, 1, 6, 8)
    theta = warp.identity(1).clone()
    theta[0, 0, 2] = 2 / 8  # one pixel along W
    view = warp.to_view(images, theta)
    assert torch.allclose(view[..., :-1], images[..., 1:], atol=1e-4)
    theta = warp.identity(1).clone()
    theta[0, 1, 2] = -2 / 6  # one pixel along H, the other way
    view = warp.to_view(images, theta)
    assert torch.allclose(view[..., 1:, :], images[..., :-1, :], atol=1e-4)


def test_views_reflect_at_the_border_and_what_comes_back_has_zeros():
    images = torch.arange(1.0, 9.0).view(1, 1, 1, 8).expand(1, 1, 4, 8)
    theta = warp.identity(1).clone()
    theta[0, 0, 2] = 2 * 3 / 8
    view = warp.to_view(images, theta)
    assert torch.allclose(view[0, 0, 1], torch.tensor([4.0, 5, 6, 7, 8, 8, 7, 6]), atol=1e-4)
    back = warp.from_view(images, theta)
    assert torch.allclose(back[0, 0, 1], torch.tensor([0.0, 0, 0, 1, 2, 3, 4, 5]), atol=1e-4)


def test_quarter_turn_is_rot90():
    images = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(warp.to_view(images, rotation(90)), torch.rot90(images, -1, (2, 3)), atol=1e-5)


def test_invert_undoes_theta():
    thetas = random_thetas(20)
    for both in (
        warp.compose(thetas, warp.invert(thetas)),
        warp.compose(warp.invert(thetas), thetas),
    ):
        assert torch.allclose(both, warp.identity(20), atol=1e-5)


def test_invert_matches_the_matrix_inverse():
    thetas = random_thetas(20, seed=3, strength=0.4)
    last = torch.tensor([[[0.0, 0.0, 1.0]]]).expand(20, 1, 3)
    want = torch.linalg.inv(torch.cat([thetas, last], dim=1).double())[:, :2]
    assert torch.allclose(warp.invert(thetas).double(), want, atol=1e-5)


def test_a_singular_theta_does_not_raise():
    assert not torch.isfinite(warp.invert(torch.zeros(1, 2, 3))).all()


def test_invert_has_gradients():
    thetas = random_thetas(2).double().requires_grad_()
    assert torch.autograd.gradcheck(warp.invert, thetas)


def test_compose_is_first_then_second():
    images = smooth()
    first, second = rotation(12), torch.tensor([[[1.0, 0.1, 0.1], [0.0, 1.0, -0.05]]])
    in_turn = warp.to_view(warp.to_view(images, first), second)
    once = warp.to_view(images, warp.compose(first, second))
    swapped = warp.to_view(images, warp.compose(second, first))
    inside = (..., slice(12, -12), slice(12, -12))
    assert (once - in_turn)[inside].abs().max() < 2e-3
    assert (swapped - in_turn)[inside].abs().max() > 1e-2


@pytest.mark.parametrize("size", [(48, 48), (40, 56), (33, 47)])
def test_round_trip_away_from_the_border(size):
    images = smooth(*size).expand(6, 1, *size)
    thetas = random_thetas(6, seed=5, strength=0.12)
    back = warp.from_view(warp.to_view(images, thetas), thetas)
    height, width = size
    inside = (..., slice(height // 3, -height // 3), slice(width // 3, -width // 3))
    assert (back - images)[inside].abs().max() < 5e-3


def test_images_are_warped_on_their_own():
    images = torch.rand(4, 2, 10, 12, generator=torch.Generator().manual_seed(2))
    thetas = random_thetas(4, seed=6)
    whole = warp.to_view(images, thetas)
    single = torch.cat([warp.to_view(images[[i]], thetas[[i]]) for i in range(4)])
    assert torch.allclose(whole, single, atol=1e-6)


def test_half_precision_is_resampled_in_float32():
    assert warp.to_view(smooth().half(), warp.identity(1)).dtype == torch.float32


def test_normalise():
    probs = torch.tensor([[[0.2, 0.0, 1.0], [0.6, 0.0, 0.0]]])
    result = warp.normalise(probs)
    assert torch.allclose(result, torch.tensor([[[0.25, 0.5, 1.0], [0.75, 0.5, 0.0]]]))
