"""The layout of weights on a GPU."""

import pytest
import torch
from torch import nn

from tesla_med.tta._mechanics.execution import LAYOUTS, layout_of


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)), torch.channels_last),
        (nn.Sequential(nn.Conv3d(2, 3, 3), nn.InstanceNorm3d(3, affine=True)), torch.channels_last_3d),
        (nn.Sequential(nn.Conv3d(2, 3, 3), nn.Conv2d(2, 3, 3)), None),
        (nn.Linear(2, 2), None),
    ],
)
def test_layout_by_the_rank_of_the_weights(model, layout):
    assert layout_of(model) is layout
    if layout is not None:  # the other one is refused by torch
        model.to(memory_format=layout)
        other = next(item for item in LAYOUTS.values() if item is not layout)
        with pytest.raises(RuntimeError, match="rank"):
            model.to(memory_format=other)
