"""PL: own hard pseudo-labels. What it shares with others: test_learner.py."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tesla_med.errors import ConfigError
from tesla_med.models.base import norm_layers

pytestmark = pytest.mark.usefixtures("one_thread")


def batch_logits(network, images):
    for layer in norm_layers(network):
        layer.train()
    return network(2 * images - 1)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.6])
def test_the_loss_by_hand(threshold, make_tta, make_network, make_images):
    network, images = make_network(classes=3), make_images(4)
    method = make_tta("pl", network, confidence_threshold=threshold)
    scalars = method.adapt(images)
    logits = batch_logits(network, images)
    confidence, labels = logits.softmax(dim=1).max(dim=1)
    kept = confidence >= threshold
    loss = functional.nll_loss(logits.log_softmax(dim=1), labels, reduction="none")[kept].mean()
    loss.backward()
    share = float(kept.float().mean())
    assert threshold == 0 or 0 < share < 1
    assert float(scalars["loss/pseudo_labels"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert float(scalars["kept"]) == pytest.approx(share, abs=1e-3)
    for ours, layer in zip(norm_layers(method.model), norm_layers(network), strict=True):
        assert torch.allclose(ours.weight.grad, layer.weight.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("adapt", ["affine", "encoder"])
def test_no_pixel_is_confident_enough(adapt, make_tta, make_images, same_state):
    method, images = make_tta("pl", adapt=adapt, confidence_threshold=1.0), make_images(3)
    before = {name: value.clone() for name, value in method.model.named_parameters()}
    scalars = method.adapt(images)
    assert float(scalars["loss/pseudo_labels"]) == float(scalars["kept"]) == 0
    assert same_state(before, dict(method.model.named_parameters()))


def test_labels_grow_firm(make_tta, make_images):
    method, images = make_tta("pl", learning_rate=0.05), make_images(6)
    labels = method.predict(images).argmax(dim=1)
    found = [float(method.adapt(images)["loss/pseudo_labels"]) for _ in range(12)]
    assert found[-1] < 0.7 * found[0]
    probs = method.predict(images)
    assert (probs.argmax(dim=1) == labels).float().mean() > 0.7


def test_what_to_adapt(make_tta):
    with pytest.raises(ConfigError, match=r"methods\.pl: key 'adapt'.*got 'head'"):
        make_tta("pl", adapt="head")
    with pytest.raises(ConfigError, match="confidence_threshold"):
        make_tta("pl", confidence_threshold=1.5)
