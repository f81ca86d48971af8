"""The choice of precision and layout: what is taken, what is refused, and that it is used."""

from __future__ import annotations

import time

import pytest
import torch

from tesla_med.models.unet import UNet, UNetParams
from tesla_med.tta._mechanics import fastest as module
from tesla_med.tta._mechanics.fastest import Computing, fastest
from tesla_med.tta.base import MethodContext, make_method

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture
def network(monkeypatch):
    monkeypatch.setattr(module, "_FOUND", {})
    monkeypatch.setattr(module, "SIDE", 32)
    torch.manual_seed(0)
    return UNet.build(UNetParams(width=2), 1, 2).eval()


@pytest.mark.parametrize(
    ("seconds", "changed", "wanted"),
    [
        ({}, None, Computing("float32", False)),
        ({("bfloat16", True): 0.3}, None, Computing("bfloat16", True)),
        ({("bfloat16", False): 0.3}, None, Computing("bfloat16", False)),
        ({("bfloat16", True): 0.3, ("float32", True): 0.5}, ("bfloat16", True), Computing("float32", True)),
        ({("float32", True): 0.9}, None, Computing("float32", False)),
    ],
    ids=["all alike", "the fastest", "the fastest as it is", "another result", "too little gain"],
)
def test_the_fastest_is_taken_if_it_says_the_same(network, monkeypatch, seconds, changed, wanted):
    def timed(network, images, how):
        probs = torch.full((1, 2, 4, 4), 0.5)
        probs[:, 0] += 0.1 if how == changed else 0.0
        return seconds.get(tuple(how), 1.0), probs

    monkeypatch.setattr(module, "_timed", timed)
    assert fastest(network, 1, CPU) == wanted


def test_it_is_measured_once_and_nothing_is_changed(network, monkeypatch):
    before = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    found = fastest(network, 1, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert all(item.grad is None for item in network.parameters())
    monkeypatch.setattr(module, "_measured", lambda *_: pytest.fail("measured again"))
    assert fastest(network, 1, CPU) == found


def test_it_is_measured_on_noise_in_the_range_of_the_images(network, monkeypatch):
    given = []
    plain = Computing("float32", channels_last=False)
    monkeypatch.setattr(module, "_measured", lambda _, images: given.append(images) or plain)
    fastest(network, 3, CPU)
    (images,) = given
    assert images.shape == (1, 3, 32, 32)
    assert -1.0 <= float(images.min()) < -0.95
    assert 0.95 < float(images.max()) <= 1.0


@pytest.mark.parametrize("how", [Computing(kind, last) for kind in DTYPES for last in (False, True)])
def test_what_is_timed_is_a_pass_in_the_variant(network, how):
    seen = []

    def note(_, inputs):
        seen.append((inputs[0].dtype, inputs[0].is_contiguous(memory_format=torch.channels_last)))

    second = [layer for layer in network.modules() if isinstance(layer, torch.nn.BatchNorm2d)][1]
    second.register_forward_pre_hook(note)
    images = torch.rand(1, 1, 32, 32)
    start = time.process_time()
    seconds, probs = module._timed(network, images, how)
    assert 0.0 < seconds < time.process_time() - start
    assert set(seen) == {(DTYPES[how.precision], how.channels_last)}
    assert torch.allclose(probs, network(images).softmax(dim=1), atol=0.05)


@pytest.mark.parametrize("how", [Computing("bfloat16", True), Computing("float32", False)])
def test_methods_compute_so(network, monkeypatch, how):
    monkeypatch.setattr("tesla_med.tta._mechanics.execution.fastest", lambda *_: how)
    method = make_method("source", network, {}, MethodContext(CPU, precision="auto"))
    seen = []
    first = next(layer for layer in method.model.modules() if isinstance(layer, torch.nn.BatchNorm2d))
    first.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.rand(2, 1, 32, 32)
    probs = method.predict(images)
    assert seen[0].dtype == getattr(torch, how.precision)
    assert seen[0].is_contiguous(memory_format=torch.channels_last) == how.channels_last
    plain = make_method("source", network, {}, MethodContext(CPU)).predict(images)
    assert torch.allclose(probs, plain, atol=0.05)
    assert torch.equal(probs, plain) == (how == Computing("float32", False))
