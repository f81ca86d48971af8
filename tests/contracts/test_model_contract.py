"""Every registered network keeps the contract, whatever it is called."""

from __future__ import annotations

import copy

import pytest
import torch

from tesla_med.config.models import LabelClass, ModelConfig, PipelineConfig
from tesla_med.errors import ConfigError
from tesla_med.models import MODELS, Network, build_model
from tesla_med.models.base import parameter_count

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY = pytest.mark.parametrize("name", MODELS.names())


@pytest.fixture
def build():
    def make(name, channels=1, classes=3, **params):
        pipeline = PipelineConfig(
            name="made_up",
            title="made up",
            sites="made_up",
            task=MODELS.get(name).task,
            channels=channels,
            classes=tuple(LabelClass(value=value, name=str(value)) for value in range(classes)),
            model=ModelConfig(name=name, params=MODELS.get(name).example | params),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build_model(pipeline)

    return make


def random_images(count, channels, height, width):
    return torch.rand(count, channels, height, width, generator=torch.Generator().manual_seed(0))


def output_shape(name, count, classes, size):
    """Return the shape of the logits."""
    return (count, classes, *size) if MODELS.get(name).task == "segmentation" else (count, classes)


def test_there_are_models():
    assert {"unet", "monai"} <= set(MODELS.names())


@EVERY
def test_describes_itself(name):
    network = MODELS.get(name)
    assert issubclass(network, Network)
    assert network.summary
    assert "\n" not in network.summary
    assert network.Params.model_validate(network.example)


@EVERY
@pytest.mark.parametrize(("channels", "classes"), [(1, 2), (3, 4)])
def test_forward_and_backward(name, channels, classes, build):
    network = build(name, channels, classes).train()
    logits = network(random_images(2, channels, 32, 48))
    assert logits.shape == output_shape(name, 2, classes, (32, 48))
    assert logits.dtype == torch.float32
    logits.square().mean().backward()
    gradients = [parameter.grad for parameter in network.parameters()]
    assert all(gradient is not None and torch.isfinite(gradient).all() for gradient in gradients)
    assert sum(gradient.abs().sum() for gradient in gradients) > 0


@EVERY
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (2, 3), (17, 1), (20, 23), (33, 47), (32, 32), (65, 40)])
def test_any_size(name, size, build):
    network = build(name)
    images = random_images(2, 1, *size)
    for mode in (True, False):
        logits = network.train(mode)(images)
        assert logits.shape == output_shape(name, 2, 3, size)
        assert torch.isfinite(logits).all()


@EVERY
def test_one_slice_in_batch_mode(name, build):
    assert torch.isfinite(build(name).train()(random_images(1, 1, 1, 1))).all()


@EVERY
def test_eval_is_deterministic_and_slice_by_slice(name, build):
    network = build(name).eval()
    images = random_images(3, 1, 20, 23)
    with torch.no_grad():
        whole = network(images)
        assert torch.equal(whole, network(images))
        single = torch.cat([network(images[[i]]) for i in range(3)])
    assert torch.allclose(whole, single, atol=1e-4)


@EVERY
def test_padding_does_not_change_the_images(name, build):
    network, images = build(name).eval(), random_images(2, 1, 19, 21)
    kept = images.clone()
    network(images)
    assert torch.equal(kept, images)


@EVERY
def test_the_head_is_last_and_small(name, build):
    network = build(name, classes=3).eval()
    parameters = list(network.head.parameters())
    assert parameters
    own = {id(parameter) for parameter in network.parameters()}
    assert all(id(parameter) in own for parameter in parameters)
    assert parameter_count(network.head) < parameter_count(network) / 2
    assert any(parameter.shape[0] == 3 or parameter.shape[1] == 3 for parameter in parameters)
    images = random_images(1, 1, 32, 32)
    with torch.no_grad():
        before = network(images)
        for parameter in parameters:
            parameter.add_(0.5)
        assert not torch.allclose(before, network(images), atol=1e-3)


@EVERY
def test_the_head_is_one_object(name, build):
    network = build(name)
    assert network.head is network.head
    network.head.requires_grad_(False)
    frozen = [value for value in network.parameters() if not value.requires_grad]
    assert len(frozen) == len(list(network.head.parameters()))


@EVERY
def test_copies_share_nothing(name, build):
    network = build(name).eval()
    twin = copy.deepcopy(network)
    images = random_images(1, 1, 32, 32)
    with torch.no_grad():
        before = network(images)
        for parameter in twin.parameters():
            parameter.zero_()
        assert torch.equal(before, network(images))


@EVERY
def test_state_dict_round_trip(name, build):
    network, other = build(name).eval(), build(name).eval()
    images = random_images(1, 1, 32, 32)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
        assert not torch.equal(network(images), other(images))
        other.load_state_dict(network.state_dict())
        assert torch.equal(network(images), other(images))


@EVERY
def test_another_task_is_refused(name, build):
    other = "classification" if MODELS.get(name).task == "segmentation" else "segmentation"
    pipeline = PipelineConfig(
        name="made_up",
        title="made up",
        sites="made_up",
        task=other,
        classes=(LabelClass(value=0, name="0"), LabelClass(value=1, name="1")),
        model=ModelConfig(name=name, params=MODELS.get(name).example),
    )
    with pytest.raises(ConfigError, match=f"is for {MODELS.get(name).task}"):
        build_model(pipeline)


@EVERY
def test_unknown_parameters_are_refused(name, build):
    with pytest.raises(ConfigError, match="'no_such_key'"):
        build(name, no_such_key=1)
