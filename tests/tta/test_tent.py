"""Tent: entropy minimisation on norm layers. What it shares with others: test_learner.py."""

from __future__ import annotations

import math

import pytest
import torch

from tesla_med import losses
from tesla_med.models.base import norm_layers

pytestmark = pytest.mark.usefixtures("one_thread")


def test_one_update_by_hand(make_tta, make_network, make_images):
    network, images = make_network(), make_images(4)
    method = make_tta("tent", network)
    scalars = method.adapt(images)
    for layer in norm_layers(network):
        layer.train()
    affine = [value for layer in norm_layers(network) for value in layer.parameters()]
    optimizer = torch.optim.Adam(affine, lr=1e-3, betas=(0.9, 0.999), weight_decay=0)
    probs = network(2 * images - 1).softmax(dim=1)
    entropy = -(probs * probs.log()).sum(dim=1).mean()
    entropy.backward()
    gradients = {name: value.grad for name, value in network.named_parameters()}
    optimizer.step()
    assert float(scalars["loss/entropy"]) == pytest.approx(float(entropy.detach()), rel=1e-5)
    compared = 0
    for name, value in network.named_parameters():
        clear = gradients[name].abs() > 1e-5  # Adam makes a whole step of rounding
        compared += int(clear.sum())
        assert torch.allclose(method.model.get_parameter(name)[clear], value[clear], atol=1e-5), name
    assert compared > 100


def test_predictions_become_certain(make_tta, make_images):
    method, images = make_tta("tent", learning_rate=0.05), make_images(6)
    entropies = [float(method.adapt(images)["loss/entropy"]) for _ in range(20)]
    assert entropies[-1] < 0.6 * entropies[0]
    before = losses.normalised_entropy(make_tta("tent").predict(images)).mean()
    assert losses.normalised_entropy(method.predict(images)).mean() < 0.6 * before


def test_moments_of_adam_carry_over_to_the_next_batch(make_tta, make_images):
    images = make_images(8)
    one, two = make_tta("tent"), make_tta("tent")
    for method in (one, two):
        method.adapt(images[:4])
    two.optimizer.state.clear()
    for method in (one, two):
        method.adapt(images[4:])
    assert not torch.equal(one.predict(images), two.predict(images))


@pytest.mark.parametrize("shape", [(6, 3), (2, 3, 5, 4), (2, 3, 2, 5, 4)], ids=["tiles", "slices", "volumes"])
def test_entropy(shape):
    logits = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    probs = logits.double().softmax(dim=1)
    want = -(probs * probs.log()).sum(dim=1).mean()
    assert float(losses.entropy(logits)) == pytest.approx(float(want), rel=1e-5)
    assert float(losses.entropy(torch.zeros(shape))) == pytest.approx(math.log(3), rel=1e-6)


def test_entropy_of_huge_logits_is_finite():
    logits = torch.tensor([[200.0, -200.0], [-200.0, 200.0]], requires_grad=True)
    value = losses.entropy(logits)
    value.backward()
    assert float(value.detach()) == pytest.approx(0, abs=1e-6)
    assert torch.isfinite(logits.grad).all()
    assert losses.entropy(logits.bfloat16()).dtype == torch.float32
