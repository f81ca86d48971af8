"""BN: statistics of the test images in place of the source's."""

from __future__ import annotations

import copy

import pytest
import torch

from tesla_med.errors import AdaptationError
from tesla_med.models.base import norm_layers
from tesla_med.tta import MethodContext, make_method

pytestmark = pytest.mark.usefixtures("one_thread")


def running(model):
    return [(layer.running_mean.clone(), layer.running_var.clone()) for layer in norm_layers(model)]


def close(one, two, tolerance=1e-5):
    pairs = zip(one, two, strict=True)
    return all(
        torch.allclose(a, b, atol=tolerance, rtol=1e-4) for x in pairs for a, b in zip(*x, strict=True)
    )


def statistics_of(network, images):
    """Running statistics after one forward of all images in train mode with momentum 1."""
    model = copy.deepcopy(network)
    for layer in norm_layers(model):
        layer.train()
        layer.momentum = 1.0
    with torch.no_grad():
        model(2 * images - 1)
    return running(model)


def mixed(one, two, share):
    return [
        tuple(share * a + (1 - share) * b for a, b in zip(*pair, strict=True))
        for pair in zip(one, two, strict=True)
    ]


def test_the_case_replaces_the_source(make_tta, make_network, make_images):
    network, images = make_network(), make_images(6)
    method = make_tta("bn", network)
    weights = {name: value.clone() for name, value in method.model.named_parameters()}
    (batch,) = method.batches(images)
    assert torch.equal(batch, images)
    method.adapt(batch)
    assert close(running(method.model), statistics_of(network, images))
    assert all(torch.equal(value, weights[name]) for name, value in method.model.named_parameters())
    assert not close(running(network), running(method.model))


def test_prediction_is_one_forward_in_batch_mode(make_tta, make_network, make_images, batch_mode_probs):
    network, images = make_network(), make_images(7, 48, 48)
    method = make_tta("bn", network)
    method.adapt(images)
    with torch.no_grad():
        source = network(2 * images - 1).softmax(dim=1)
    in_batch_mode, under_its_statistics = batch_mode_probs(network, images)
    result = method.predict(images)
    assert torch.allclose(result, under_its_statistics, atol=1e-5)
    assert (result - in_batch_mode).abs().mean() < 0.2 * (source - in_batch_mode).abs().mean()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_mixing_with_the_source(share, make_tta, make_network, make_images):
    network, images = make_network(), make_images(6)
    method = make_tta("bn", network, target_share=share)
    method.adapt(images)
    want = mixed(statistics_of(network, images), running(network), share)
    assert close(running(method.model), want)


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_several_batches_give_their_mean(share, make_tta, make_network, make_images):
    network, images = make_network(), make_images(9)
    method = make_tta("bn", network, target_share=share, batch_slices=3)
    method.start_epoch(0, [])
    batches = list(method.batches(images))
    assert len(batches) == 3
    for batch in batches:
        method.adapt(batch)
    single = [statistics_of(network, batch) for batch in batches]
    mean = [tuple(sum(s[i][j] for s in single) / 3 for j in range(2)) for i in range(len(single[0]))]
    assert close(running(method.model), mixed(mean, running(network), share), 1e-4)


def test_a_pass_forgets_the_one_before(make_tta, make_network, make_images):
    network = make_network()
    first, second = make_images(4, seed=1), make_images(4, seed=2)
    method = make_tta("bn", network)
    for images in (first, second):
        method.start_epoch(0, [])
        method.adapt(images)
    assert close(running(method.model), statistics_of(network, second))


def test_at_most_so_many_slices(make_tta, make_network, make_images):
    network, images = make_network(), make_images(9)
    method = make_tta("bn", network, max_slices=3)
    method.adapt(images)
    assert close(running(method.model), statistics_of(network, images[[0, 4, 8]]))


def test_state_in_the_middle_of_a_pass(make_tta, make_network, make_images):
    network, images = make_network(), make_images(6)
    one, two = (make_tta("bn", network, batch_slices=2, target_share=0.5) for _ in range(2))
    batches = list(one.batches(images))
    one.adapt(batches[0])
    one.adapt(batches[1])
    two.load_state_dict(one.state_dict())
    for method in (one, two):
        method.adapt(batches[2])
    assert torch.equal(one.predict(images), two.predict(images))


def test_the_network_it_deploys_repeats_the_prediction(make_tta, make_network, make_images):
    network, images = make_network(), make_images(5)
    method = make_tta("bn", network)
    method.adapt(images)
    with method.deployed(images) as model:
        network.load_state_dict(model.state_dict())
    with torch.no_grad():
        probs = network.eval()(2 * images - 1).softmax(dim=1)
    assert torch.allclose(probs, method.predict(images), atol=1e-6)


def test_a_model_without_batch_norm(make_tta):
    from tesla_med.models.monai import MonaiNetwork, MonaiParams

    arguments = {"channels": [4, 8], "strides": [2]}
    network = MonaiNetwork.build(MonaiParams(class_name="UNet", arguments=arguments, divisor=2), 1, 2)
    with pytest.raises(AdaptationError, match=r"'bn'.*has 0 \(\d+ norm layers of other kinds\).*norm: batch"):
        make_tta("bn", network)


@pytest.mark.parametrize(
    "params",
    [
        {"statistics_share": 0.5},
        {"statistics_share": 1.0},
        {"predict_views": 3, "weak_scale": 0.7},
        {"neighbour_share": 0.3},
        {"predict_views": 2, "neighbour_share": 0.1},
    ],
)
def test_source_predicts_as_tesla_before_any_update(params, make_tta, make_network, make_images):
    network, images = make_network(), 0.2 + 0.6 * make_images(6)
    found = make_tta("source", network, statistics="volume", **params).predict(images)
    want = make_tta("tesla", network, predict_statistics="volume", **params).predict(images)
    assert torch.allclose(found, want, atol=1e-5)
    plain = make_tta("source", network, statistics="volume").predict(images)
    assert torch.allclose(found, plain, atol=1e-3) == (params == {"statistics_share": 1.0})


def test_source_is_the_frozen_model(make_network, make_images):
    network, images = make_network(), make_images(5)
    context = MethodContext(torch.device("cpu"), predict_batch=2)
    method = make_method("source", network, {}, context)
    assert method.adapt(images) == {}
    with torch.no_grad():
        want = network(2 * images - 1).softmax(dim=1)
    assert torch.allclose(method.predict(images), want, atol=1e-6)
    assert not type(method).adapts


def test_the_mean_over_batches_weighs_images_alike(make_tta, make_network, make_images):
    """A single image in the last batch counts as one of five, not as half of the statistics."""
    network, images = make_network(), make_images(5)
    images[4] = 1.0 - images[4]
    method = make_tta("bn", network)
    method.start_epoch(0, ())
    first, last = statistics_of(network, images[:4]), statistics_of(network, images[4:])
    method.adapt(images[:4])
    method.adapt(images[4:])
    assert close(running(method.model), mixed(last, first, 0.2))
    assert not close(running(method.model), mixed(last, first, 0.5))
