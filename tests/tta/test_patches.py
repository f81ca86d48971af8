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


def test_foreground_that_is_not_known_is_none():
    images = numbered(2, 9, 20, 30)
    found = [
        drawn_patches(images, (4, 8, 9), 12, spots, torch.Generator().manual_seed(0))
        for spots in (None, NOWHERE)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("known", [True, False])
def test_batches_are_patches_about_what_the_network_finds(known, make_tta, monkeypatch):
    method = make_tta("tent", batch_slices=3, draw="replacement", updates_per_case=100)
    method.model.patch = (8, 8)
    images = numbered(2, 40, 40)
    found = torch.zeros(2, 40, 40, dtype=torch.bool)
    found[1, 25, 12] = True
    monkeypatch.setattr(method, "centres", lambda _: found if known else None)
    batches = list(method.batches(images))
    assert len(batches) == 100
    corners = torch.cat(batches).flatten(2).min(2).values
    about = (corners == torch.tensor([1.0, 21, 8])).all(1).float().mean()
    assert about == pytest.approx(FOREGROUND if known else 0.0, abs=0.08)


def test_what_a_network_finds_is_every_class_but_the_first(make_tta, make_network, make_images, monkeypatch):
    method, images = make_tta("tesla", make_network(classes=3)), 1.1 * make_images(5)
    lines = [(0.0, 0.0), (0.4, 4.0), (0.6, 8.0)]  # background below 0.4, the last class above 0.8
    monkeypatch.setattr(
        method, "logits", lambda _, seen: torch.cat([rise * (seen - low) for low, rise in lines], dim=1)
    )
    assert method.predict(images).argmax(dim=1).unique().tolist() == [0, 1, 2]
    assert torch.equal(method.centres(images), images[:, 0] > 0.4)


def test_the_number_of_draws_does_not_depend_on_the_foreground():
    """So that a mask of one voxel more does not change what all later patches are."""
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    for generator, spots in zip(generators, (NOWHERE, torch.tensor([[0, 3, 4, 5]])), strict=True):
        drawn_patches(numbered(2, 9, 20, 30), (4, 8, 9), 7, spots, generator)
    assert torch.equal(generators[0].get_state(), generators[1].get_state())
