"""Patches that networks learn from where whole images are too large."""

from __future__ import annotations

import pytest
import torch

from tesla_med.tta._mechanics.patches import FOREGROUND, drawn_patches

pytestmark = pytest.mark.usefixtures("one_thread")
NOWHERE = torch.empty(0, 4, dtype=torch.long)


def numbered(count=2, *spatial):
    """Images whose voxels hold their own position: index of the image, then along each axis."""
    axes = torch.meshgrid(*[torch.arange(size) for size in (count, *spatial)], indexing="ij")
    return torch.stack(axes, dim=1).float()


def draw(images, patch, count, spots=None, seed=0):
    spots = torch.empty(0, images.dim() - 1, dtype=torch.long) if spots is None else spots
    return drawn_patches(images, patch, count, spots, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("spatial", "patch"), [((20, 30), (8, 9)), ((9, 20, 30), (4, 8, 9))])
def test_patches_are_parts_of_the_images(spatial, patch):
    images = numbered(3, *spatial)
    found = draw(images, patch, 50)
    assert found.shape == (50, 1 + len(spatial), *patch)
    for item in found:
        lows = item.flatten(1).min(1).values.long()
        index, *corner = lows.tolist()
        inside = tuple(slice(low, low + side) for low, side in zip(corner, patch, strict=True))
        assert torch.equal(item, images[(index, slice(None), *inside)])
    lows = found.flatten(2).min(2).values
    assert set(lows[:, 0].tolist()) == {0.0, 1.0, 2.0}
    for axis, (size, side) in enumerate(zip(spatial, patch, strict=True), 1):
        assert lows[:, axis].min() >= 0
        assert lows[:, axis].max() <= size - side
        assert len(set(lows[:, axis].tolist())) > 3


@pytest.mark.parametrize("end", [0, 1])
def test_every_place_can_be_drawn(end):
    lows = draw(numbered(1, 6, 6), (4, 4), 300).flatten(2).min(2).values[:, 1:]
    assert {tuple(item) for item in lows.tolist()} == {
        (float(a), float(b)) for a in range(3) for b in range(3)
    }


def test_axes_that_are_shorter_than_the_patch_are_whole():
    found = draw(numbered(2, 3, 20, 5), (8, 8, 8), 10)
    assert found.shape == (10, 4, 3, 8, 5)


def test_two_of_three_hold_the_foreground_in_their_middle():
    images = numbered(2, 16, 40, 40)
    spot = torch.tensor([[1, 8, 25, 12]])
    found = draw(images, (4, 8, 8), 600, spot)
    corners = found.flatten(2).min(2).values
    about = (corners == torch.tensor([1.0, 6, 21, 8])).all(1)
    assert about.float().mean() == pytest.approx(FOREGROUND, abs=0.06)
    index, *centre = spot[0].tolist()
    for item in found[about][:3]:
        assert torch.equal(item[:, 2, 4, 4], torch.tensor([index, *centre]).float())


def test_patches_about_foreground_at_the_border_stay_inside():
    spots = torch.tensor([[0, 0, 0, 0], [0, 8, 19, 29]])
    corners = draw(numbered(1, 9, 20, 30), (4, 8, 9), 200, spots).flatten(2).min(2).values
    assert {tuple(item) for item in corners.tolist()} >= {(0.0, 0, 0, 0), (0.0, 5, 12, 21)}
    assert (corners[:, 1:] <= torch.tensor([5.0, 12, 21])).all()


def test_draws_repeat_with_the_generator():
    images, spots = numbered(2, 9, 20, 30), torch.tensor([[0, 3, 4, 5], [1, 8, 2, 1]])
    first = draw(images, (4, 8, 9), 20, spots, seed=3)
    assert torch.equal(first, draw(images, (4, 8, 9), 20, spots, seed=3))
    assert not torch.equal(first, draw(images, (4, 8, 9), 20, spots, seed=4))


def test_the_number_of_draws_does_not_depend_on_the_foreground():
    """So that a mask of one voxel more does not change what all later patches are."""
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    for generator, spots in zip(generators, (NOWHERE, torch.tensor([[0, 3, 4, 5]])), strict=True):
        drawn_patches(numbered(2, 9, 20, 30), (4, 8, 9), 7, spots, generator)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
