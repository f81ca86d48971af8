"""SHOT: information maximisation and prototypes. What it shares with others: test_learner.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tesla_med.models.base import norm_layers
from tesla_med.tta.shot import class_prototypes, nearest_prototype

pytestmark = pytest.mark.usefixtures("one_thread")


def random_features(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def prototypes_by_hand(features, probs):
    """Both rounds, pixel by pixel in plain loops: None for a class that holds none."""
    count, classes = probs.shape

    def nearest(vector, prototypes):
        scores = [
            -math.inf if item is None else float(functional.cosine_similarity(vector, item, dim=0))
            for item in prototypes
        ]
        return scores.index(max(scores))

    first = []
    for index in range(classes):
        total = sum(float(probs[row, index]) * features[row] for row in range(count))
        first.append(total / float(probs[:, index].sum()))
    labels = [nearest(features[row], first) for row in range(count)]
    second = []
    for index in range(classes):
        mine = [features[row] for row in range(count) if labels[row] == index]
        second.append(torch.stack(mine).mean(dim=0) if mine else None)
    return second, [nearest(features[row], second) for row in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_two_rounds_by_hand(seed):
    features = random_features(60, 5, seed) + 0.3
    probs = (2 * random_features(60, 4, seed + 50)).softmax(dim=1)
    want, labels = prototypes_by_hand(features, probs)
    found = class_prototypes(features, probs)
    for ours, theirs in zip(found, want, strict=True):
        assert torch.allclose(
            ours, torch.zeros(5) if theirs is None else functional.normalize(theirs, dim=0), atol=1e-5
        )
    assert nearest_prototype(features, found).tolist() == labels


def test_a_class_that_no_pixel_is_near_labels_none():
    features = torch.tensor([[1.0, 0.0], [0.9, 0.1], [-1.0, 0.0], [-0.9, 0.1]])
    probs = torch.tensor([[0.9, 0.0, 0.1], [0.8, 0.0, 0.2], [0.0, 0.9, 0.1], [0.1, 0.8, 0.1]])
    probs = torch.cat([probs, torch.zeros(4, 1)], dim=1)  # and a class of no probability at all
    found = class_prototypes(features, probs)
    assert torch.equal(found[3], torch.zeros(2))
    opposite = torch.tensor([[-1.0, -5.0]])  # every cosine is negative but that to the second
    assert nearest_prototype(opposite, found[[0, 3]]).item() == 0
    assert set(nearest_prototype(random_features(50, 2), found).tolist()) <= {0, 1, 2}


def test_labels_of_slices_are_those_of_their_pixels():
    maps, prototypes = torch.randn(2, 5, 3, 4), functional.normalize(random_features(3, 5), dim=1)
    labels = nearest_prototype(maps, prototypes)
    assert labels.shape == (2, 3, 4)
    for image, row, column in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        one = nearest_prototype(maps[image, :, row, column][None], prototypes)
        assert labels[image, row, column] == one.item()
    assert torch.equal(labels, nearest_prototype(7 * maps, prototypes))  # cosine


def look(network, images):
    """Logits and the input of the head under the statistics of the batch."""
    for layer in norm_layers(network):
        layer.train()
        layer.momentum = 0.0
    found = []
    handle = network.head.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    logits = network(2 * images - 1)
    handle.remove()
    return logits, found[0].detach()


def pixels(maps):
    return maps.flatten(2).transpose(1, 2).flatten(0, 1)


@pytest.mark.parametrize("weight", [0.0, 0.3, 2.0])
def test_one_update_by_hand(weight, make_tta, make_network, make_images):
    network, images = make_network(classes=3), make_images(8)
    method = make_tta(
        "shot", network, pseudo_label_weight=weight, prototype_pixels=10**6, marginal_weight=0.7
    )
    network.requires_grad_(True).head.requires_grad_(False)
    with torch.no_grad():
        looks = [look(network, part) for part in (images[:4], images[4:])]
    method.start_epoch(0, iter([images[:4], images[4:]]))
    scalars = method.adapt(images[:4])
    logits, features = look(network, images[:4])
    probs = logits.softmax(dim=1)
    marginal = probs.mean(dim=(0, 2, 3))
    entropy = -(probs * probs.log()).sum(dim=1).mean()
    loss = entropy + 0.7 * (marginal * marginal.log()).sum()
    if weight > 0:
        seen = torch.cat([pixels(item[1]) for item in looks])
        prototypes = class_prototypes(seen, torch.cat([pixels(item[0]) for item in looks]).softmax(dim=1))
        assert torch.allclose(method.prototypes, prototypes, atol=1e-4)
        labels = nearest_prototype(features, method.prototypes)
        assert (labels != probs.argmax(dim=1)).any()
        trained = functional.cross_entropy(logits, labels)
        assert float(scalars["loss/pseudo_labels"]) == pytest.approx(float(trained.detach()), rel=1e-3)
        loss = loss + weight * trained
    else:
        assert method.prototypes is None
        assert "loss/pseudo_labels" not in scalars
    loss.backward()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-3, nesterov=True)
    optimizer.step()
    assert float(scalars["loss/entropy"]) == pytest.approx(float(entropy.detach()), rel=1e-4)
    for name, value in network.named_parameters():
        if not name.endswith(("conv.0.bias", "conv.3.bias")):  # which batch statistics take out again
            assert torch.allclose(method.model.get_parameter(name), value, atol=2e-5), name


def test_information_maximisation_makes_predictions_certain_and_diverse(make_tta, make_images):
    images = make_images(6)
    found = {}
    for weight in (0.0, 1.0):
        params = {"pseudo_label_weight": 0.0, "learning_rate": 0.3, "marginal_weight": weight}
        method = make_tta("shot", **params)
        found[weight] = [method.adapt(images) for _ in range(20)]
    entropies = [float(step["loss/entropy"]) for step in found[1.0]]
    assert entropies[-1] < 0.5 * entropies[0]
    assert found[1.0][-1]["loss/class_marginal"] < found[0.0][-1]["loss/class_marginal"] - 0.005


def test_prototypes_are_of_the_pass_ahead_and_stay_for_it(make_tta, make_images):
    one, two = make_images(4, seed=1), make_images(4, seed=2)
    method = make_tta("shot", learning_rate=0.01)
    method.start_epoch(0, [one])
    first = method.prototypes.clone()
    method.adapt(one)
    assert torch.equal(method.prototypes, first)
    method.start_epoch(1, [two])
    assert not torch.equal(method.prototypes, first)


def test_so_many_pixels_of_a_slice_make_prototypes(make_tta, make_images, monkeypatch):
    from tesla_med.tta import shot

    seen = []

    def count(features, probs):
        seen.append((tuple(features.shape), tuple(probs.shape)))
        return class_prototypes(features, probs)

    monkeypatch.setattr(shot, "class_prototypes", count)
    method, images = make_tta("shot", prototype_pixels=50), make_images(6)
    method.start_epoch(0, [images[:4], images[4:]])
    assert seen == [((300, 4), (300, 2))]
    make_tta("shot").adapt(images)  # without a look ahead, the batch gives them
    assert seen[1] == ((6 * 256, 4), (6 * 256, 2))


def test_odd_sizes_and_a_single_slice(make_tta, make_images):
    images = make_images(1, 21, 35)
    method = make_tta("shot")
    method.start_epoch(0, [images])
    method.adapt(images)
    assert method.predict(images).shape == (1, 2, 21, 35)


def test_features_are_looked_up_without_leaving_hooks(make_tta, make_images):
    method, images = make_tta("shot"), make_images(3)
    method.start_epoch(0, [images])
    method.adapt(images)
    assert not method.model.head._forward_hooks
    assert not method.model.head._forward_pre_hooks


@pytest.mark.parametrize("target", ["uniform", "source"])
def test_the_marginal_is_pulled_to_equal_shares_or_to_the_sources(
    target, make_tta, make_network, make_images, same_state
):
    network, images = make_network(classes=3), make_images(4)
    params = {"pseudo_label_weight": 0, "marginal_weight": 30.0, "momentum": 0, "learning_rate": 2e-3}
    method = make_tta("shot", network, marginal_target=target, **params)
    wanted = look(make_network(classes=3), images)[0].detach().softmax(dim=1).mean(dim=(0, 2, 3))
    if target == "uniform":
        assert method.source is None
        wanted = torch.full((3,), 1 / 3)
    loss, scalars = method.objective(images)
    shares = look(make_network(classes=3), images)[0].detach().softmax(dim=1).mean(dim=(0, 2, 3))
    marginal = (shares * (shares / wanted).log()).sum() - (math.log(3) if target == "uniform" else 0.0)
    assert float(scalars["loss/class_marginal"]) == pytest.approx(float(marginal), abs=1e-4)
    total = float(scalars["loss/entropy"]) + 30.0 * float(marginal)
    assert float(loss.detach()) == pytest.approx(total, abs=1e-2)
    for _ in range(10):
        method.adapt(images)
    after = look(method.model, images)[0].detach().softmax(dim=1).mean(dim=(0, 2, 3))
    gap = [float((item - wanted).abs().max()) for item in (shares, after)]
    assert gap[1] < (0.7 * gap[0] if target == "uniform" else 0.05)
    if target == "source":
        assert same_state(dict(network.state_dict()), dict(method.source.state_dict()))
        assert method.passes_per_update() == make_tta("shot", pseudo_label_weight=0).passes_per_update() + 1
