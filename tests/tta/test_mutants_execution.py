"""Batches in order: every slice once, none left out."""

import pytest
import torch


@pytest.mark.parametrize("size", [None, 1, 2, 5, 9])
def test_ordered_batches_hold_every_slice_once(size, make_tta, make_images):
    method, images = make_tta("tent", draw="ordered", batch_slices=size), make_images(5)
    batches = list(method.batches(images))
    assert torch.equal(torch.cat(batches), images)
    assert len(batches) == method.updates(len(images))
