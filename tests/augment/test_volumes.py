"""Augmentation of volumes (N, C, D, H, W): all slices of one alike."""

from __future__ import annotations

import pytest
import torch

from tesla_med.augment import warp
from tesla_med.augment.ops import OPS
from tesla_med.augment.policy import AdversarialPolicy
from tesla_med.augment.static import RandAugment

pytestmark = pytest.mark.usefixtures("one_thread")
INTENSITY = [name for name, op in OPS.items() if op.kind == "intensity"]
IN_PLANE = [name for name in INTENSITY if OPS.get(name).in_plane]
OVER_ALL = [name for name in INTENSITY if not OPS.get(name).in_plane]


def volumes(count=2, channels=1, depth=4, height=11, width=13, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(count, channels, depth, height, width, generator=generator)
    return images * torch.linspace(0.5, 1, depth).view(1, 1, -1, 1, 1)


def draw_for(op, shape, seed=0):
    if op.signed:
        return 2.0 * torch.randint(2, shape[:1], generator=torch.Generator().manual_seed(seed)) - 1
    if op.noise is not None:
        return torch.randn(op.noise(shape), generator=torch.Generator().manual_seed(seed))
    return None


def thetas(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.eye(2, 3) + 0.3 * (2 * torch.rand(count, 2, 3, generator=generator) - 1)


def test_there_are_ops_of_both_kinds():
    assert {"Sharpness", "GaussianBlur", "BiasField", "Ghosting"} <= set(IN_PLANE)
    assert {"Contrast", "Gamma", "GaussianNoise"} & set(OVER_ALL)


@pytest.mark.parametrize("name", IN_PLANE)
@pytest.mark.parametrize("channels", [1, 3])
def test_ops_that_look_at_neighbours_change_slice_by_slice(name, channels):
    op, images = OPS.get(name), volumes(channels=channels)
    magnitude, draw = torch.tensor([0.2, 0.9]), draw_for(op, images.shape)
    found = op.intensities(images, magnitude, draw)
    assert found.shape == images.shape
    assert (found - images).abs().max() > 1e-3
    for index in range(images.shape[2]):
        assert torch.allclose(
            found[:, :, index], op.intensities(images[:, :, index], magnitude, draw), atol=1e-5
        )


@pytest.mark.parametrize("name", OVER_ALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_other_ops_look_at_the_whole_volume(name, channels):
    """As at one image of its slices below each other: means and histograms are those of the volume."""
    op, images = OPS.get(name), volumes(channels=channels)
    count, _, depth, height, width = images.shape
    magnitude, draw = torch.tensor([0.2, 0.9]), draw_for(op, images.shape)
    found = op.intensities(images, magnitude, draw)
    below = draw
    if draw is not None and draw.dim() >= 5:
        below = draw.reshape(*draw.shape[:-3], depth * height, width)
    tall = images.reshape(count, channels, depth * height, width)
    assert torch.allclose(found, op.intensities(tall, magnitude, below).view_as(images), atol=1e-5)


@pytest.mark.parametrize("name", INTENSITY)
def test_a_volume_of_equal_slices_keeps_them_equal_but_for_noise(name):
    op = OPS.get(name)
    images = volumes(depth=1).expand(-1, -1, 3, -1, -1).contiguous()
    found = op.intensities(images, torch.tensor([0.3, 0.8]), draw_for(op, images.shape))
    apart = (found - found[:, :, :1]).abs().max()
    noisy = op.noise is not None and not op.in_plane and len(op.noise(images.shape)) >= 5
    assert (apart > 1e-3) == noisy


@pytest.mark.parametrize("name", INTENSITY)
def test_volumes_of_a_batch_are_independent(name):
    op, images = OPS.get(name), volumes()
    magnitude, draw = torch.tensor([0.2, 0.9]), draw_for(op, images.shape)
    found = op.intensities(images, magnitude, draw)
    for index in range(2):
        own = None if draw is None else draw[[index]]
        alone = op.intensities(images[[index]], magnitude[[index]], own)
        assert torch.allclose(alone[0], found[index], atol=1e-5)


@pytest.mark.parametrize("name", INTENSITY)
def test_a_volume_of_one_slice_is_that_slice(name):
    op, images = OPS.get(name), volumes(depth=1)
    magnitude, draw = torch.tensor([0.2, 0.9]), draw_for(op, images.shape)
    flat = draw[..., 0, :, :] if draw is not None and draw.dim() >= 5 else draw
    found = op.intensities(images, magnitude, draw)
    assert torch.allclose(found[:, :, 0], op.intensities(images[:, :, 0], magnitude, flat), atol=1e-5)


# ------------------------------------------------------------ warps


@pytest.mark.parametrize("move", [warp.to_view, warp.from_view])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_volume_is_warped_slice_by_slice(move, channels):
    images, theta = volumes(channels=channels), thetas(2)
    found = move(images, theta)
    assert found.shape == images.shape
    for index in range(images.shape[2]):
        assert torch.allclose(found[:, :, index], move(images[:, :, index], theta), atol=1e-6)
    assert not torch.allclose(found, images, atol=1e-2)


def test_slices_and_volumes():
    images = volumes(2, 3, 4, 5, 6)
    slices = warp.as_slices(images)
    assert slices.shape == (8, 3, 5, 6)
    assert torch.equal(slices[5], images[1, :, 1])  # volume by volume
    assert torch.equal(warp.as_volumes(slices, [4]), images)


def test_the_identity_of_volumes():
    images = volumes()
    assert torch.allclose(warp.to_view(images, warp.identity(2)), images, atol=1e-6)


def test_gradients_reach_volume_and_theta():
    images, theta = volumes().requires_grad_(), thetas(2).requires_grad_()
    warp.to_view(images, theta).square().sum().backward()
    for leaf in (images, theta):
        assert torch.isfinite(leaf.grad).all()
        assert leaf.grad.abs().max() > 0


def test_probabilities_of_volumes_add_up_to_one_after_a_warp():
    probs = torch.randn(2, 3, 4, 8, 9, generator=torch.Generator().manual_seed(0)).softmax(1)
    found = warp.normalise(warp.from_view(warp.to_view(probs, thetas(2)), thetas(2)))
    assert torch.allclose(found.sum(1), torch.ones(2, 4, 8, 9), atol=1e-5)


def test_regions_beside_each_other_are_warped_like_slices():
    generator = torch.Generator().manual_seed(3)
    maps = torch.rand(2, 2, 3, 4, 16, 12, generator=generator)  # of three regions of volumes
    theta = torch.tensor([[[0.9, 0.1, 0.05], [-0.1, 0.9, 0.0]]]).repeat(2, 1, 1)
    found = warp.to_view(maps, theta)
    assert torch.allclose(found[:, :, 1], warp.to_view(maps[:, :, 1], theta))
    assert torch.equal(warp.as_volumes(warp.as_slices(maps), [3, 4]), maps)


def make_policy(kind):
    generators = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    if kind == "learned":
        return AdversarialPolicy("released_mri", 3, *generators)
    return RandAugment("released_mri", 3, 0.8, *generators)


@pytest.mark.parametrize("kind", ["learned", "static"])
def test_views_of_volumes_are_warped_in_all_planes_if_asked_for(kind):
    """A theta per volume, with which labels go to the view and come back as the images do."""
    policy, images = make_policy(kind), volumes(count=12, depth=9, height=9, width=9)
    policy.all_planes = True
    drawn = policy.draw(tuple(images.shape), "uniform")
    assert set(drawn.planes.tolist()) == {0, 1, 2}
    view = policy.apply_draw(images, drawn)
    assert view.images.shape == images.shape
    assert view.theta.shape == (12, 3, 4)
    moved = (view.theta - torch.eye(3, 4)).abs().amax(dim=(1, 2)) > 1e-3
    through = (view.theta - torch.eye(3, 4))[:, 2].abs().amax(dim=1) > 1e-3
    assert (moved & through).any()
    assert not through[drawn.planes == 0].any()
    assert warp.from_view(view.images, view.theta).shape == images.shape


@pytest.mark.parametrize("kind", ["learned", "static"])
def test_otherwise_slices_of_a_volume_stay_slices(kind):
    policy, images = make_policy(kind), volumes(count=12)
    drawn = policy.draw(tuple(images.shape), "uniform")
    assert drawn.planes is None
    assert policy.apply_draw(images, drawn).theta.shape == (12, 2, 3)
    policy.all_planes = True
    assert policy.draw((12, 1, 8, 8), "uniform").planes is None


def test_magnitudes_of_warps_in_all_planes_are_learned():
    policy, images = make_policy("learned"), volumes(count=12, depth=9, height=9, width=9)
    policy.all_planes = True
    view = policy.apply_draw(images, policy.draw(tuple(images.shape), "uniform"))
    view.images.square().mean().backward()
    assert policy.raw_magnitudes.grad.abs().sum() > 0
