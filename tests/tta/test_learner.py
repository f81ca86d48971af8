"""What Tent, pseudo-labels and SHOT share: one network that learns under batch statistics and predicts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tesla_med.errors import AdaptationError, ConfigError
from tesla_med.models.base import norm_layers
from tesla_med.models.monai import MonaiNetwork, MonaiParams
from tesla_med.models.torchvision import MobileNetV2, MobileNetV2Params, ViT, ViTParams
from tesla_med.tta.base import choose_protocol

pytestmark = pytest.mark.usefixtures("one_thread")

AFFINE = [("tent", {}), ("pl", {})]
ENCODER = [("pl", {"adapt": "encoder"}), ("shot", {}), ("shot", {"pseudo_label_weight": 0.0})]
KINDS = [*AFFINE, *ENCODER]
NAMES = ["tent", "pl", "pl-encoder", "shot", "shot-im"]
EVERY = pytest.mark.parametrize(("name", "params"), KINDS, ids=NAMES)


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def running(model):
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name}


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def norm_names(model):
    names = {id(value): name for name, value in model.named_parameters()}
    return {names[id(value)] for layer in norm_layers(model) for value in layer.parameters()}


def tiles(count=4, seed=1):
    return torch.rand(count, 3, 64, 64, generator=torch.Generator().manual_seed(seed))


def monai_unet(norm):
    arguments = {"channels": [4, 8], "strides": [2], "norm": norm}
    return MonaiNetwork.build(MonaiParams(class_name="UNet", arguments=arguments, divisor=2), 1, 2)


@EVERY
def test_learns_nothing_at_learning_rate_0(name, params, make_tta, make_images):
    method, images = make_tta(name, **params, learning_rate=0), make_images(4)
    before, statistics = weights(method.model), running(method.model)
    for _ in range(2):
        method.adapt(images)
    assert not moved(before, weights(method.model))
    assert moved(statistics, running(method.model)) == set(statistics)


@pytest.mark.parametrize(("name", "params"), AFFINE, ids=NAMES[:2])
def test_scale_and_shift_of_every_norm_learn_and_nothing_else(name, params, make_tta, make_images):
    method = make_tta(name, **params)
    before = weights(method.model)
    method.adapt(make_images(4))
    assert moved(before, weights(method.model)) == norm_names(method.model)


@pytest.mark.parametrize(("name", "params"), ENCODER, ids=NAMES[2:])
def test_everything_but_the_head_learns(name, params, make_tta, make_images):
    method = make_tta(name, **params)
    before = weights(method.model)
    method.adapt(make_images(4))
    learned = moved(before, weights(method.model))
    free = {
        key for key in before if not key.endswith(("conv.0.bias", "conv.3.bias"))
    }  # batch norms undo these
    head = {key for key in before if key.startswith("outc")}
    assert len(head) == 2
    assert free - head <= learned
    assert not learned & head


@EVERY
def test_running_statistics_move_by_their_momentum(name, params, make_tta, make_network, make_images):
    network, images = make_network(), make_images(4)
    method = make_tta(name, network, **params, statistics_momentum=0.3, learning_rate=0)
    method.start_epoch(0, [images, images])  # a look ahead moves none
    method.adapt(images)
    for layer in norm_layers(network):
        layer.train()
        layer.momentum = 0.3
    with torch.no_grad():
        network(2 * images - 1)
    ours, want = running(method.model), running(network)
    assert all(torch.allclose(ours[key], want[key], atol=1e-5) for key in want)


@EVERY
@pytest.mark.parametrize("statistics", ["running", "volume"])
def test_a_prediction_leaves_no_trace(
    name, params, statistics, make_tta, make_images, batch_mode_probs, same_state
):
    images = make_images(6)
    method = make_tta(name, **params, predict_statistics=statistics, learning_rate=0.01)
    method.adapt(images[:4])
    state = method.state_dict()
    probs = method.predict(images)
    assert same_state(state, method.state_dict())
    model = copy.deepcopy(method.model)
    with torch.no_grad():
        want = model(2 * images - 1).softmax(dim=1)
    if statistics == "volume":
        assert not torch.allclose(probs, want, atol=1e-3)
        want = batch_mode_probs(model, images)[1]
    assert torch.allclose(probs, want, atol=1e-5)


@EVERY
def test_state_in_the_middle(name, params, make_tta, make_images, same_state):
    images = make_images(6)
    one, two = make_tta(name, **params), make_tta(name, **params, seed=5)
    one.start_epoch(0, [images[:3], images[3:]])
    one.adapt(images[:3])
    two.load_state_dict(one.state_dict())
    one.adapt(images[3:])  # must not reach into what the other restored
    two.adapt(images[3:])
    assert same_state(one.state_dict(), two.state_dict())
    one.reset()
    assert same_state(one.state_dict(), make_tta(name, **params).state_dict())


@EVERY
def test_tiles(name, params, make_tta):
    torch.manual_seed(0)
    network = MobileNetV2.build(MobileNetV2Params(width=0.25), 3, 4).eval()
    method, images = make_tta(name, network, **params), tiles()
    before = weights(method.model)
    method.start_epoch(0, [images])
    scalars = method.adapt(images)
    assert all(torch.isfinite(value) for value in scalars.values())
    assert moved(before, weights(method.model))
    method.adapt(images[:1])
    for part in (images, images[:1]):
        probs = method.predict(part)
        assert probs.shape == (len(part), 4)
        assert torch.allclose(probs.sum(dim=1), torch.ones(len(part)), atol=1e-5)


@pytest.mark.parametrize(("name", "params"), AFFINE, ids=NAMES[:2])
@pytest.mark.parametrize(
    "norm", [["group", {"num_groups": 2}], ["instance", {"affine": True}]], ids=["group", "instance"]
)
def test_other_norms_learn_too(name, params, norm, make_tta, make_images):
    method = make_tta(name, monai_unet(norm), **params)
    before, layers = weights(method.model), method.model.modules()
    count = sum(isinstance(layer, nn.GroupNorm | nn.InstanceNorm2d) for layer in layers)
    method.adapt(make_images(3))
    assert len(moved(before, weights(method.model))) == 2 * count > 0


@pytest.mark.parametrize(("name", "params"), AFFINE, ids=NAMES[:2])
def test_layer_norms_of_a_transformer_learn(name, params, make_tta):
    torch.manual_seed(0)
    network = ViT.build(ViTParams(**ViT.example), 3, 4).eval()
    method = make_tta(name, network, **params)
    before = weights(method.model)
    method.adapt(tiles())
    learned = moved(before, weights(method.model))
    assert learned
    assert all(".ln" in key for key in learned)


@pytest.mark.parametrize(("name", "params"), AFFINE, ids=NAMES[:2])
def test_norms_without_scale_and_shift_are_refused(name, params, make_tta):
    with pytest.raises(AdaptationError, match=rf"'{name}' adapts scale and shift.*has 0 \(2 norm layers"):
        make_tta(name, monai_unet("instance"), **params)


@pytest.mark.parametrize(("name", "params"), ENCODER, ids=NAMES[2:])
def test_a_model_that_is_all_head_is_refused(name, params, make_tta, make_network):
    class AllHead(type(make_network())):
        @property
        def head(self):
            return self

    network = make_network()
    network.__class__ = AllHead
    with pytest.raises(AdaptationError, match=rf"'{name}' adapts every parameter.*has 0 \(it is all head"):
        make_tta(name, network, **params)


@pytest.mark.parametrize(
    ("method", "asked", "default", "taken"),
    [
        ("tent", None, "N-M", "N-M"),
        ("tent", "N-M", "N-O", "N-M"),
        ("ttac", None, "N-O", "Y-O"),
        ("ttac", None, "N-M", "Y-M"),
        ("tent", None, "Y-M", "N-M"),
        ("ttac", "Y-O", "N-M", "Y-O"),
    ],
)
def test_the_protocol_is_what_is_asked_for_or_the_nearest_to_the_pipelines(method, asked, default, taken):
    assert choose_protocol(method, asked, default) == taken


def test_a_protocol_that_is_asked_for_must_be_there():
    with pytest.raises(ConfigError, match=r"'ttac' has no protocol 'N-O'. Known: Y-O, Y-M"):
        choose_protocol("ttac", "N-O", "Y-O")


def test_steps_are_fused_on_a_gpu_alone(make_tta):
    (group,) = make_tta("tent").optimizer.param_groups
    assert not group["fused"]


def test_cost(make_tta):
    assert make_tta("tent").passes(8) == 8 * 3 + 8 + 8
    assert make_tta("tent", predict_statistics="running").passes(8) == 8 * 3 + 8
    assert make_tta("pl", epochs=2).passes(8) == 2 * 8 * 3 + 8 + 8
    assert make_tta("shot").passes(8) - make_tta("shot", pseudo_label_weight=0).passes(8) == 8
    drawn = {"draw": "replacement", "updates_per_case": 5, "batch_slices": 4}
    assert make_tta("tent", **drawn).passes(8) == 20 * 3 + 8 + 8
