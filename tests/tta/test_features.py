"""Features of pixels and tiles: in the frame of the logits, whatever the network does with its images."""

from __future__ import annotations

import pytest
import torch

from tesla_med.tta._shared.features import in_frame_of

pytestmark = pytest.mark.usefixtures("one_thread")


def numbered(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def test_features_of_padded_images_are_cropped_as_the_logits_were():
    features = numbered(2, 3, 8, 8)
    found = in_frame_of(torch.zeros(2, 5, 6, 7), features)
    assert torch.equal(found, features[:, :, :6, :7])


def test_features_of_another_size_are_resampled():
    features = numbered(2, 3, 4, 4)
    found = in_frame_of(torch.zeros(2, 5, 8, 8), features)
    assert torch.equal(found, features.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3))
    assert torch.equal(in_frame_of(torch.zeros(2, 5, 4, 4), features), features)


def test_features_of_tiles_have_no_frame():
    features = numbered(2, 3)
    assert torch.equal(in_frame_of(torch.zeros(2, 5), features), features)
