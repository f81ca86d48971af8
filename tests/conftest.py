"""Shared fixtures: small configurations, small volumes, the development data if present."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: test processes share the cores between them

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of the development data and reference weights; skips where it is absent."""
    if not (SHARED / "reference").is_dir():
        pytest.skip(f"needs the development data at {SHARED}")
    return SHARED


@pytest.fixture(autouse=True)
def _log_of_its_own() -> None:
    """Give each test the package's log as Python has it: a command sends it to its screen."""
    logger = logging.getLogger("tesla_med")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def one_thread() -> None:
    """Compute on one thread: tiny tensors gain nothing from more, and results repeat exactly."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def make_images():
    """Make (count, channels, height, width) smooth images in [0, 1], each with a bright disc."""
    import torch
    from torch.nn import functional

    def make(count=4, height=32, width=32, channels=1, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.rand(count, channels, 5, 5, generator=generator)
        smooth = functional.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
        rows = torch.linspace(-1, 1, height).view(1, 1, -1, 1)
        columns = torch.linspace(-1, 1, width).view(1, 1, 1, -1)
        centre = (torch.rand(2, count, 1, 1, 1, generator=generator) - 0.5) * 0.6
        disc = torch.sigmoid((0.4 - ((rows - centre[0]) ** 2 + (columns - centre[1]) ** 2).sqrt()) * 12)
        return (0.15 + 0.35 * smooth + 0.4 * disc).clamp(0, 1).to(dtype)

    return make


@pytest.fixture
def make_network(one_thread, make_images):
    """Make a small U-Net with settled running statistics; the same seed gives the same weights."""
    import torch

    from tesla_med.models.unet import UNet

    def make(channels=1, classes=2, width=4, seed=0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = UNet(channels, classes, width)
        images = make_images(6, 48, 48, channels, seed=100 + seed)
        with torch.no_grad():
            for _ in range(4):
                network.train()(2 * images - 1)
        return network.eval()

    return make


@pytest.fixture
def make_statistics(make_images):
    """Measure source statistics of a network on smooth images, bright pixels one class, dark ones others."""
    from tesla_med.models.moments import source_statistics

    def make(network, classes, channels=1, size=32):
        images = make_images(4, size, size, channels, seed=50)
        labels = (images.mean(dim=1) * classes).long().clamp(0, classes - 1)
        if network.task == "classification":
            labels = labels.flatten(1).float().mean(dim=1).round().long()
        return source_statistics(network, [(2 * images - 1, labels)], classes)

    return make


@pytest.fixture
def make_tta(make_network, make_statistics):
    """Make a method on a small U-Net (or the given network); keywords are its parameters.

    Methods of the Y protocols get source statistics of the network.
    """
    import torch

    from tesla_med.tta import METHODS, MethodContext, make_method

    def make(method_name, network=None, *, seed=0, precision="float32", channels=1, **params):
        network = make_network(channels) if network is None else network
        knows = any(item.startswith("Y") for item in METHODS.get(method_name).protocols)
        statistics = None
        if knows:
            size, classes = network_sizes(network)
            statistics = make_statistics(network, classes, size)
        context = MethodContext(
            torch.device("cpu"), seed=seed, precision=precision, predict_batch=3, statistics=statistics
        )
        return make_method(method_name, network, params, context)

    return make


def network_sizes(network):
    """Return input channels and classes of a network."""
    import torch

    first = next(item for item in network.parameters() if item.dim() == 4)
    with torch.no_grad():
        probs = network.eval()(torch.zeros(1, first.shape[1], 32, 32))
    return first.shape[1], probs.shape[1]


@pytest.fixture(scope="session")
def same_state():
    """Tell whether two nested states (mappings, lists, tensors, values) are equal bit for bit."""
    import torch

    def same(one, two):
        if isinstance(one, torch.Tensor):
            return isinstance(two, torch.Tensor) and one.dtype == two.dtype and torch.equal(one, two)
        if isinstance(one, dict):
            return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
        if isinstance(one, list | tuple):
            return len(one) == len(two) and all(same(*pair) for pair in zip(one, two, strict=True))
        return one == two

    return same


@pytest.fixture(scope="session")
def batch_mode_probs():
    """Give probabilities of all images in one forward in batch mode, and under the statistics it leaves.

    The two differ a little: a batch is normalised by n / n variances, running ones are n / (n - 1).
    """
    import torch

    from tesla_med.models import norm_layers

    @torch.no_grad()
    def probs(network, images):
        for layer in norm_layers(network.eval()):
            layer.train()
            layer.momentum = 1.0
        batch_mode = network(2 * images - 1).softmax(dim=1)
        return batch_mode, network.eval()(2 * images - 1).softmax(dim=1)

    return probs
