"""Passes through a network: what they return and move, and that graphs change neither."""

import gc
import weakref

import pytest
import torch

from tesla_med.models.base import norm_layers
from tesla_med.models.normalisation import copied, running_statistics
from tesla_med.models.unet import UNet
from tesla_med.tta._mechanics.graphs import GraphPool
from tesla_med.tta._shared.passes import NetworkPass
from tesla_med.tta.base import MethodContext, make_method

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")


def network(seed=0):
    torch.manual_seed(seed)
    return UNet(1, 2, 4).eval()


def forward(model, images):
    return model(2 * images - 1).float()


def means(model):
    return torch.cat([layer.running_mean for layer in norm_layers(model)])


def test_a_pass_returns_logits_and_taps(make_images):
    model, images = network(), make_images(3, 32, 32)
    plain = NetworkPass(model, forward, momentum=None)(images)
    tapped = NetworkPass(model, forward, momentum=None, tap=True)(images)
    assert plain.activations == []
    assert torch.equal(plain.logits, tapped.logits)
    shapes = [item.shape for item in tapped.activations]
    assert shapes == [(3, layer.num_features) for layer in norm_layers(model)]
    assert not plain.logits.requires_grad


@pytest.mark.parametrize("tap", [False, True])
def test_a_pass_hands_out_what_enters_the_head(tap, make_images):
    model, images = network(), make_images(3, 32, 32)
    run = NetworkPass(model, forward, momentum=None, tap=tap, features=True)
    logits, seen, features = run(images)
    assert len(seen) == (len(norm_layers(model)) if tap else 0)
    assert features.dtype == torch.float32
    with torch.no_grad():
        assert torch.allclose(model.head(features), logits, atol=1e-5)
    assert NetworkPass(model, forward, momentum=None, tap=tap)(images).features is None


@pytest.mark.parametrize("momentum", [None, 0.1, 1.0])
def test_a_pass_moves_statistics_by_its_momentum(momentum, make_images):
    model, images = network(), make_images(3, 32, 32)
    before = means(model)
    NetworkPass(model, forward, momentum=1.0)(images)
    whole = means(model)
    model = network()
    NetworkPass(model, forward, momentum=momentum)(images)
    assert torch.allclose(means(model), torch.lerp(before, whole, momentum or 0.0), atol=1e-6)


def test_a_pass_is_normalised_by_a_mixture_where_there_is_one(make_network, make_images):
    model, images = make_network(), 0.2 + 0.5 * make_images(3, 32, 32)
    rest = copied(running_statistics(model))
    found = {
        share: NetworkPass(model, forward, momentum=None, rest=rest, share=share)(images).logits
        for share in (0.001, 0.5, 1.0)
    }
    alone = NetworkPass(model, forward, momentum=None)(images).logits
    assert torch.allclose(found[1.0], alone, atol=1e-5)
    assert torch.equal(NetworkPass(model, forward, momentum=None, share=0.5)(images).logits, alone)
    with torch.no_grad():
        without = forward(model, images)
    assert torch.allclose(found[0.001], without, atol=0.05)
    assert min((found[0.5] - other).abs().mean() for other in (alone, without)) > 0.01


def test_the_taps_of_the_encoder_are_those_of_its_norms(make_images):
    model, images = network(), make_images(3, 32, 32)
    encoder = [layer for part in model.encoder for layer in norm_layers(part)]
    seen = NetworkPass(model, forward, momentum=None, tap="encoder")(images).activations
    every = NetworkPass(model, forward, momentum=None, tap=True)(images).activations
    assert [item.shape[1] for item in seen] == [layer.num_features for layer in encoder]
    assert 0 < len(seen) < len(every)
    assert all(torch.allclose(*pair) for pair in zip(seen, every, strict=False))


def test_gradient_flows_where_asked_for(make_images):
    model = network()
    images = make_images(2, 32, 32).requires_grad_()
    logits, seen, _ = NetworkPass(model, forward, momentum=None, tap=True, gradient=True)(images)
    (logits.mean() + sum(item.sum() for item in seen)).backward()
    assert images.grad.abs().sum() > 0


def test_the_cpu_never_captures(make_images):
    images = make_images(2, 32, 32)
    run = NetworkPass(network(), forward, momentum=0.1, pool=GraphPool(True))
    for _ in range(3):
        run(images)
    assert not run.graph.captured


def test_a_method_is_freed_when_nothing_holds_it(make_images):
    method = make_method("tesla", network(), {"batch_slices": 2}, MethodContext(torch.device("cpu")))
    method.adapt(make_images(2, 32, 32))
    alive = weakref.ref(method)
    gc.collect()
    gc.disable()
    try:
        del method
        assert alive() is None
    finally:
        gc.enable()


@cuda
@pytest.mark.parametrize("gradient", [False, True])
def test_a_replay_gives_what_the_kernels_give(gradient, make_images):
    images = make_images(4, 32, 32).cuda()
    results = []
    for wanted in (False, True):
        model = network().cuda()
        run = NetworkPass(model, forward, momentum=0.1, tap=True, gradient=gradient, pool=GraphPool(wanted))
        for factor in (1.0, 0.9, 0.8, 0.7):
            logits, seen = None, None  # what they hold on to of the last pass would spoil a capture
            given = (images * factor).requires_grad_(gradient)
            logits, seen, _ = run(given)
            if gradient:
                model.zero_grad(set_to_none=True)
                (logits.square().mean() + sum(item.square().sum() for item in seen)).backward()
        assert run.graph.captured == wanted
        grads = [given.grad, model.inc.double_conv[0].weight.grad] if gradient else []
        results.append([logits.detach(), *seen, means(model), *grads])
    for one, two in zip(*results, strict=True):
        assert (one - two).norm() < 0.02 * one.norm()  # TF32 and atomic sums round differently


@cuda
def test_features_of_a_replay_outlive_the_next(make_images):
    images, results = make_images(4, 32, 32).cuda(), []
    for wanted in (False, True):
        model, pool = network().cuda(), GraphPool(wanted)
        run = NetworkPass(model, forward, momentum=None, tap=True, features=True, pool=pool)
        found = [run(images * factor).features for factor in (1.0, 0.9, 0.8, 0.7)]
        assert run.graph.captured == wanted
        results.append(found)
    for one, two in zip(*results, strict=True):
        assert (one - two).norm() < 0.02 * one.norm()
    assert not torch.equal(results[1][2], results[1][3])


@cuda
def test_updates_with_and_without_graphs_agree(make_images):
    images = make_images(4, 32, 32)
    sums = []
    for graphs in (False, True):
        context = MethodContext(torch.device("cuda"), seed=1, cuda_graphs=graphs)
        method = make_method("tesla", network(), {"batch_slices": 4}, context)
        losses = [method.adapt(images) for _ in range(6)]
        sums.append([float(value) for row in losses for value in row.values()])
    assert sums[0] == pytest.approx(sums[1], rel=1e-2, abs=1e-4)


@cuda
def test_graphs_give_their_memory_back():
    images = torch.rand(4, 1, 256, 256)
    torch.manual_seed(0)
    wide = UNet(1, 2, 16).eval()
    held = []
    for _ in range(4):
        method = make_method("tesla", wide, {"batch_slices": 4}, MethodContext(torch.device("cuda")))
        for _ in range(3):
            method.adapt(images)
        peak = torch.cuda.memory_reserved()
        del method
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    # What libraries keep for each stream, 32 MiB on recent cards, comes with the first captures and stays.
    assert held[-1] - held[0] < 0.5 * (peak - held[-1])
