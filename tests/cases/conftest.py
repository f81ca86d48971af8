"""Networks whose masks are known beforehand, and quickly trained weights."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import small_site as small
import tile_site
import torch
from safetensors.torch import save_file

WIDTH = 4
SIZES = {  # inputs, middle and outputs of every pair of convolutions
    "inc": (1, WIDTH, WIDTH),
    **{
        f"down{level}.maxpool_conv.1": (WIDTH * size[0], WIDTH * size[1], WIDTH * size[1])
        for level, size in enumerate(((1, 2), (2, 4), (4, 8), (8, 8)), 1)
    },
    **{
        f"up{level}.conv": tuple(WIDTH * size for size in sizes)
        for level, sizes in enumerate(((16, 8, 4), (8, 4, 2), (4, 2, 1), (2, 1, 1)), 1)
    },
}
EPSILON = np.float32(1e-5)


def known_state(classes, empty=False):
    """Return weights of a U-Net in which brightness decides.

    The scaled image, in [-1, 1], is cut into one band of brightness for each class. With ``empty``,
    everything is background. Two channels carry what is above 0 and what is below along the first level.
    """
    state = {}
    for name, sizes in SIZES.items():
        for number, (inputs, outputs) in zip((0, 3), itertools.pairwise(sizes), strict=True):
            weight = torch.zeros(outputs, inputs, 3, 3)
            if name == "inc" and number == 0:
                weight[0, 0, 1, 1], weight[1, 0, 1, 1] = 1, -1
            elif name in ("inc", "up4.conv"):
                weight[0, 0, 1, 1] = weight[1, 1, 1, 1] = 1
            layers = f"{name}.double_conv"
            state[f"{layers}.{number}.weight"] = weight
            state[f"{layers}.{number}.bias"] = torch.zeros(outputs)
            norm = f"{layers}.{number + 1}"
            state[f"{norm}.weight"], state[f"{norm}.bias"] = torch.ones(outputs), torch.zeros(outputs)
            state[f"{norm}.running_mean"] = torch.zeros(outputs)
            state[f"{norm}.running_var"] = torch.full((outputs,), float(np.float32(1) - EPSILON))
            state[f"{norm}.num_batches_tracked"] = torch.tensor(1)
    centres = torch.linspace(-1, 1, classes)
    weight = torch.zeros(classes, WIDTH, 1, 1)
    if not empty:
        weight[:, 0, 0, 0], weight[:, 1, 0, 0] = 100 * centres, -100 * centres
    state["outc.conv.weight"] = weight
    state["outc.conv.bias"] = 100.0 * (torch.arange(classes) == 0) if empty else -50 * centres**2
    return state


@pytest.fixture
def known_weights(one_thread, tmp_path):
    """Make weights of a U-Net of width 4; with two classes: foreground above half of the range."""

    def make(*, classes=2, empty=False):
        path = tmp_path / "known.safetensors"
        save_file(known_state(classes, empty), path)
        return path

    return make


@pytest.fixture(scope="session")
def small_weights(one_thread, tmp_path_factory):
    """Weights of a width-4 U-Net, trained once a session, with source statistics beside them."""
    return small.weights_with_statistics(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def tile_weights(one_thread, tmp_path_factory):
    """Weights of a small classifier of tiles, trained once a session."""
    return tile_site.train_weights(tmp_path_factory.mktemp("tile_weights"))
