"""The share of a case's own statistics: that under which the mask stays, without fill and other bodies."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from tesla_med.engine import shares


class Made:
    """A method whose mask depends on the share, and under some shares on the size of the slices."""

    def __init__(self, masks):
        self.masks, self.share, self.used = masks, 1.0, []

    @property
    def shares(self):
        return tuple(self.masks)

    def use_share(self, share):
        self.share = share
        self.used.append(share)

    @contextmanager
    def deployed(self, images):
        yield None

    def probabilities(self, network, images):
        steady, mask = self.masks[self.share]
        changed = images.shape[-1] != mask.shape[-1]
        size = images.shape[-2:]
        found = torch.nn.functional.interpolate(mask[:, None].float(), size, mode="nearest")
        if changed and not steady:
            found = torch.zeros_like(found)
        return torch.cat([1 - found, found], dim=1)


def block(rows, columns=slice(8, 24), count=3, size=32):
    mask = torch.zeros(count, size, size)
    mask[:, rows, columns] = 1
    return mask


IMAGES = torch.zeros(3, 1, 32, 32)


@pytest.mark.parametrize("best", [0.25, 1.0])
def test_the_steadiest_is_taken(best):
    method = Made({share: (share == best, block(slice(8, 24))) for share in (0.25, 1.0)})
    found = shares.choose_share(method, IMAGES)
    assert method.share == found["statistics_share"] == best
    assert found[f"consistency_at_share_{best:g}"] > 0.9
    assert found[f"consistency_at_share_{1.25 - best:g}"] == 0


def test_equal_ones_leave_the_first(monkeypatch):
    method = Made(dict.fromkeys((0.5, 1.0), (True, block(slice(8, 24)))))
    assert shares.choose_share(method, IMAGES)["statistics_share"] == 0.5


def test_a_single_share_is_no_choice():
    method = Made({1.0: (True, block(slice(8, 24)))})
    assert shares.choose_share(method, IMAGES) == {}
    assert method.used == []


def test_fill_and_smaller_bodies_do_not_count():
    unsteady = (False, block(slice(8, 24)))
    beside = block(slice(0, 6), slice(0, 6))
    method = Made({0.5: (True, beside + block(slice(8, 24))), 1.0: unsteady})
    fill = torch.zeros(3, 32, 32, dtype=torch.bool)
    fill[:, :7, :7] = True
    plain = shares.choose_share(method, IMAGES)
    hidden = shares.choose_share(method, IMAGES, fill)
    largest = shares.choose_share(method, IMAGES, largest=True)
    assert hidden["consistency_at_share_0.5"] == largest["consistency_at_share_0.5"]
    assert plain["consistency_at_share_0.5"] != hidden["consistency_at_share_0.5"]
