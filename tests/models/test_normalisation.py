"""Which statistics batch norms use, and which of them move."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tesla_med.models.base import norm_layers
from tesla_med.models.normalisation import (
    batch_statistics,
    blend_running_statistics,
    copied,
    evenly_spaced,
    kept_running_statistics,
    mixed_with,
    running_statistics,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def buffers(model):
    return {name: value.clone() for name, value in model.named_buffers()}


def equal(one, two):
    return all(torch.equal(one[name], two[name]) for name in one)


def running(state):
    return {name: value for name, value in state.items() if "running" in name}


def one_norm(features=3):
    layer = nn.BatchNorm2d(features)
    with torch.no_grad():
        layer.running_mean.copy_(torch.tensor([1.0, -2.0, 0.5]))
        layer.running_var.copy_(torch.tensor([2.0, 0.5, 1.0]))
    return layer.eval()


def random_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(4, 3, 5, 5, generator=generator) + torch.tensor([3.0, 0, -3]).view(1, 3, 1, 1)


def test_momentum_none_leaves_running_statistics_and_normalises_by_the_batch(make_network, make_images):
    model, images = make_network(), make_images(4)
    before, plain = buffers(model), model(images)
    with torch.no_grad(), batch_statistics(model, momentum=None):
        result = model(images)
    assert equal(running(before), running(buffers(model)))
    reference = copy.deepcopy(model).train()
    assert torch.allclose(result, reference(images), atol=1e-5)
    assert (result - plain).abs().max() > 1e-3


def test_a_batch_is_normalised_to_zero_mean_and_unit_variance():
    layer, batch = one_norm(), random_batch()
    with torch.no_grad(), batch_statistics(layer, momentum=None):
        result = layer(batch)
    assert torch.allclose(result.mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5)
    assert torch.allclose(result.var(dim=(0, 2, 3), unbiased=False), torch.ones(3), atol=1e-3)


@pytest.mark.parametrize("momentum", [0.1, 0.5, 1.0])
def test_momentum_is_the_share_of_the_batch(momentum):
    layer, batch = one_norm(), random_batch()
    mean, variance = layer.running_mean.clone(), layer.running_var.clone()
    with torch.no_grad(), batch_statistics(layer, momentum=momentum):
        layer(batch)
    want_mean = (1 - momentum) * mean + momentum * batch.mean(dim=(0, 2, 3))
    want_variance = (1 - momentum) * variance + momentum * batch.var(dim=(0, 2, 3))
    assert torch.allclose(layer.running_mean, want_mean, atol=1e-5)
    assert torch.allclose(layer.running_var, want_variance, atol=1e-4)


def test_modes_and_momenta_are_put_back_even_after_an_error(make_network):
    model = make_network()
    norm_layers(model)[0].train()
    norm_layers(model)[1].momentum = 0.3
    before = [(module.training, getattr(module, "momentum", None)) for module in model.modules()]

    def fail():
        with batch_statistics(model, momentum=0.7):
            assert all(layer.training and layer.momentum == 0.7 for layer in norm_layers(model))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert before == [(module.training, getattr(module, "momentum", None)) for module in model.modules()]


def test_other_layers_keep_their_mode():
    model = nn.Sequential(nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.9)).eval()
    with batch_statistics(model, momentum=None):
        assert model[1].training
        assert not model[2].training


def test_kept_running_statistics_restores_everything(make_network, make_images):
    model, images = make_network(), make_images(4)
    before = buffers(model)
    with torch.no_grad(), kept_running_statistics(model), batch_statistics(model, momentum=1.0):
        model(images)
        assert not equal(before, buffers(model))
        assert not equal(running(before), running(buffers(model)))
    assert equal(before, buffers(model))
    assert any("num_batches_tracked" in name for name in before)


def test_kept_running_statistics_restores_after_an_error(make_network, make_images):
    model = make_network()
    before = buffers(model)

    def fail():
        with torch.no_grad(), kept_running_statistics(model):
            with batch_statistics(model, momentum=1.0):
                model(make_images(2))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert equal(before, buffers(model))


def test_running_statistics_are_live_and_copies_are_not(make_network):
    model = make_network()
    live, kept = running_statistics(model), copied(running_statistics(model))
    assert len(live) == len(norm_layers(model)) == 18
    with torch.no_grad():
        norm_layers(model)[0].running_mean.add_(1)
    assert torch.equal(live[0][0], norm_layers(model)[0].running_mean)
    assert torch.allclose(kept[0][0] + 1, live[0][0])


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_blend(share):
    layer = one_norm()
    source = [(torch.zeros(3), torch.full((3,), 4.0))]
    before = copied(running_statistics(layer))
    blend_running_statistics(layer, source, share)
    assert torch.allclose(layer.running_mean, share * before[0][0], atol=1e-6)
    assert torch.allclose(layer.running_var, share * before[0][1] + (1 - share) * 4, atol=1e-6)


@pytest.mark.parametrize(
    ("count", "limit", "want"),
    [(4, 8, [0, 1, 2, 3]), (4, 4, [0, 1, 2, 3]), (9, 3, [0, 4, 8]), (5, 1, [0]), (10, 4, [0, 3, 6, 9])],
)
def test_evenly_spaced(count, limit, want):
    images = torch.arange(float(count)).view(count, 1, 1, 1)
    assert evenly_spaced(images, limit).flatten().tolist() == want


# ------------------------------------------------------------ mixtures


def mixed(network, images, share, *, grad=False):
    rest = copied(running_statistics(network))
    by_batch = batch_statistics(network, momentum=None)
    with torch.set_grad_enabled(grad), by_batch, mixed_with(network, rest, share):
        return network(images)


def with_statistics(network):
    """Give every batch norm its own affine parameters and running statistics."""
    with torch.no_grad():
        for layer in norm_layers(network):
            layer.weight.uniform_(0.5, 1.5)
            layer.bias.uniform_(-1, 1)
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    return network.eval()


def test_a_mixture_by_hand():
    layer = with_statistics(one_norm())
    images = torch.rand(4, 3, 5, 5) * 3
    mean, variance = images.mean((0, 2, 3)), images.var((0, 2, 3), correction=0)
    found = mixed(layer, images, 0.3).detach()
    m = (0.3 * mean + 0.7 * layer.running_mean)[:, None, None]
    v = (0.3 * variance + 0.7 * layer.running_var)[:, None, None]
    want = (images - m) / (v + layer.eps).sqrt() * layer.weight[:, None, None] + layer.bias[:, None, None]
    assert torch.allclose(found, want.detach(), atol=1e-5)


def test_the_ends_of_a_mixture_are_batch_and_running_statistics(make_network, make_images):
    network, images = with_statistics(make_network()), make_images(4)
    with torch.no_grad():
        running_only = network(images)
        with batch_statistics(network, momentum=None):
            batch_only = network(images)
    assert torch.allclose(mixed(network, images, 1.0), batch_only, atol=1e-5)
    assert torch.allclose(mixed(network, images, 0.0), running_only, atol=1e-4)
    assert not torch.allclose(mixed(network, images, 0.5), batch_only, atol=1e-2)


def test_a_mixture_has_gradients_and_leaves_nothing_behind(make_network, make_images):
    network, images = with_statistics(make_network()), make_images(4)
    before = network(images).detach()
    mixed(network, images, 0.5, grad=True).square().mean().backward()
    gradients = [item.grad for item in network.parameters() if item.grad is not None]
    assert all(torch.isfinite(item).all() for item in gradients)
    assert any(bool(item.any()) for item in gradients)
    assert torch.equal(network(images).detach(), before)


def test_layers_that_use_running_statistics_are_not_mixed(make_network, make_images):
    network, images = with_statistics(make_network()), make_images(4)
    other = [(mean + 1, variance * 2) for mean, variance in running_statistics(network)]
    with torch.no_grad():
        want = network(images)
        with mixed_with(network, other, 0.5):
            assert torch.equal(network(images), want)
