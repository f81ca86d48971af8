"""Warps: direction, border rule, inverse and composition."""

from __future__ import annotations

import math

import pytest
import torch

from tesla_med.augment import ranges, warp

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


def test_a_rotation_keeps_angles_on_a_field_that_is_not_square():
    """A quarter turn of a wide field: what lay right of the middle lies as many pixels above or below it."""
    height, width = 41, 81
    image = torch.zeros(1, 1, height, width)
    image[..., height // 2, width // 2 + 10] = 1.0
    turned = ranges.rotation(0.0, math.pi / 2)(image, torch.ones(1), None)
    row, column = (warp.to_view(image, turned)[0, 0] == 1.0).nonzero()[0].tolist()
    assert (abs(row - height // 2), column) == (10, width // 2)


def test_views_of_answers_about_volumes_are_those_of_each_answer():
    generator = torch.Generator().manual_seed(0)
    answers = torch.rand(2, 2, 3, 6, 8, 8, generator=generator)
    theta = warp.in_planes(random_thetas(2, seed=3), torch.tensor([0, 2]))
    found = warp.to_view(answers, theta)
    assert found.shape == answers.shape
    for index in range(3):
        assert torch.allclose(found[:, :, index], warp.to_view(answers[:, :, index], theta), atol=1e-6)


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


# ---------------------------------------------------------------- planes of volumes

AXES_OF_PLANES = ((-1, -2), (-1, -3), (-2, -3))
"""Axes of (N, C, D, H, W) that a plane's columns and rows are."""


def volumes(count=1, size=10):
    grid = torch.linspace(-1, 1, size)
    z, y, x = torch.meshgrid(grid, grid, grid, indexing="ij")
    image = 0.5 + 0.2 * torch.sin(2 * x + 0.5) + 0.1 * torch.cos(3 * y) + 0.15 * torch.sin(1.5 * z + y)
    return image.expand(count, 1, size, size, size).contiguous()


@pytest.mark.parametrize("plane", [0, 1, 2])
def test_a_volume_is_warped_in_a_plane_as_a_slice_would_be(plane):
    """Moved so that the plane is that of the slices, warped slice by slice, and moved back."""
    images, theta = volumes(), random_thetas(1)
    whole = warp.in_planes(theta, torch.tensor([plane]))
    assert whole.shape == (1, 3, 4)
    columns, rows = AXES_OF_PLANES[plane]
    (rest,) = {-1, -2, -3} - {columns, rows}
    order = (0, 1, *(5 + axis for axis in (rest, rows, columns)))
    moved = warp.to_view(images.permute(order), theta)
    expected = moved.permute([order.index(axis) for axis in range(5)])
    assert torch.allclose(warp.to_view(images, whole), expected, atol=1e-5)


def test_every_volume_has_its_plane():
    images, theta = volumes(3), random_thetas(3)
    planes = torch.tensor([2, 0, 1])
    together = warp.to_view(images, warp.in_planes(theta, planes))
    for index in range(3):
        alone = warp.in_planes(theta[index : index + 1], planes[index : index + 1])
        assert torch.allclose(together[index], warp.to_view(images[index : index + 1], alone)[0], atol=1e-6)
    assert torch.allclose(together[1:2], warp.to_view(images[1:2], theta[1:2]), atol=1e-5)


def test_the_inverse_of_a_volumes_theta():
    theta = warp.in_planes(random_thetas(6), torch.tensor([0, 1, 2, 0, 1, 2]))
    bottom = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(6, 1, 4)
    product = torch.cat([warp.invert(theta), bottom], dim=1) @ torch.cat([theta, bottom], dim=1)
    assert torch.allclose(product, torch.eye(4).expand(6, 4, 4), atol=1e-5)


def test_a_volume_comes_back_from_its_view():
    images, theta = volumes(3), random_thetas(3, strength=0.1)
    theta = warp.in_planes(theta, torch.tensor([0, 1, 2]))
    back = warp.from_view(warp.to_view(images, theta), theta)
    inside = (slice(None), slice(None), *(slice(3, 7),) * 3)
    assert torch.allclose(back[inside], images[inside], atol=0.02)


def test_magnitudes_have_gradients_through_planes():
    theta = random_thetas(2).requires_grad_()
    warp.to_view(volumes(2), warp.in_planes(theta, torch.tensor([1, 2]))).square().mean().backward()
    assert (theta.grad.abs().amax(dim=(1, 2)) > 0).all()


def test_planes_are_drawn_alike():
    found = warp.drawn_planes((3000, 1, 4, 4, 4), torch.Generator().manual_seed(0))
    shares = torch.bincount(found, minlength=3) / 3000
    assert found.shape == (3000,)
    assert torch.allclose(shares, torch.full((3,), 1 / 3), atol=0.03)
