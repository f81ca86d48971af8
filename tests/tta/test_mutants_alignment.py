"""Widths of heads: of tiles, of slices and of volumes."""

from types import SimpleNamespace

import pytest
from torch import nn

from tesla_med.tta._shared.alignment import head_inputs


@pytest.mark.parametrize(
    ("head", "width"),
    [(nn.Linear(5, 3), 5), (nn.Conv2d(6, 2, 1), 6), (nn.Conv3d(7, 2, 1), 7), (nn.BatchNorm2d(4), None)],
)
def test_the_width_of_a_head(head, width):
    assert head_inputs(SimpleNamespace(head=head)) == width
