"""Every registered op and every registered method on volumes: it works, or is refused with a way out."""

from __future__ import annotations

import pytest
import torch
from nnunet_folder import load, make_folder
from test_method_contract import check_probs, drive, few_steps

from tesla_med.augment.ops import OPS
from tesla_med.errors import AdaptationError
from tesla_med.tta import METHODS, MethodContext, make_method

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = 3
PAIRS = [(name, protocol) for name, method in METHODS.items() for protocol in method.protocols]
EVERY_PAIR = pytest.mark.parametrize(
    ("name", "protocol"),
    [
        pytest.param(*pair, id="-".join(pair), marks=[] if pair[1].endswith("O") else pytest.mark.slow)
        for pair in PAIRS
    ],
)
NORMS = pytest.mark.parametrize("norm", ["InstanceNorm", "BatchNorm"])


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """Networks of three axes and of two, by norm and number of axes."""
    parent, found = tmp_path_factory.mktemp("nnunet"), {}
    for norm in ("InstanceNorm", "BatchNorm"):
        for axes in (2, 3):
            folder = make_folder(parent / f"{norm}{axes}", axes, norm=norm, mirror=(0,))
            found[norm, axes] = load(folder).model.eval()
    return found


def images_of(axes, count=1):
    shape = (count, 1, 9, 18, 17) if axes == 3 else (count, 1, 18, 17)
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def make(name, network, protocol, seed=0):
    statistics = None
    if protocol.startswith("Y"):
        from tesla_med.models.moments import source_statistics

        images = images_of(len(network.patch), 2)
        labels = (images[:, 0] * CLASSES).long().clamp(0, CLASSES - 1)
        statistics = source_statistics(network, [(8 * images - 3, labels)], CLASSES)
    context = MethodContext(
        torch.device("cpu"), seed=seed, model_range=(-3.0, 5.0), predict_batch=2, statistics=statistics
    )
    return make_method(name, network, few_steps(name, protocol), context)


def check(name, protocol, network, same_state):
    """Adapt and predict, twice with a reset between; return the words of a refusal, or ''."""
    axes = len(network.patch)
    images = images_of(axes, 1 if axes == 3 else 3)
    kept = images.clone()
    try:
        method = make(name, network, protocol)
        start = method.state_dict()
        first = drive(method, protocol, images)
    except AdaptationError as error:
        return str(error)
    check_probs(first, images, CLASSES)
    assert torch.equal(images, kept)
    method.reset()
    assert same_state(start, method.state_dict())
    assert torch.equal(first, drive(method, protocol, images))
    return ""


@NORMS
@EVERY_PAIR
def test_volumes(name, protocol, norm, networks, same_state):
    refusal = check(name, protocol, networks[norm, 3], same_state)
    assert not refusal or f"{name!r}" in refusal
    assert not refusal or "tesla" in refusal or "source" in refusal, refusal
    if name in {"source", "tesla", "tesla_s", "pl", "tent"} and norm == "BatchNorm":
        assert not refusal


@pytest.mark.slow
@NORMS
@EVERY_PAIR
def test_slices(name, protocol, norm, networks, same_state):
    refusal = check(name, protocol, networks[norm, 2], same_state)
    assert not refusal or f"{name!r}" in refusal


@pytest.mark.parametrize("name", OPS.names())
@pytest.mark.parametrize("shape", [(2, 1, 4, 9, 7), (1, 3, 1, 8, 8), (2, 1, 3, 2, 3)])
@pytest.mark.parametrize("magnitude", [0.0, 0.5, 1.0])
def test_ops_stay_in_range(name, shape, magnitude):
    op = OPS.get(name)
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(shape, generator=generator)
    draw = None
    if op.signed:
        draw = torch.ones(shape[0])
    elif op.noise is not None:
        draw = torch.randn(op.noise(shape), generator=generator)
    strength = torch.full(shape[:1], magnitude, requires_grad=True)
    result, theta = op(images, strength, draw)
    assert result.shape == images.shape
    assert torch.isfinite(result).all()
    assert result.min() >= 0
    assert result.max() <= 1
    assert theta.shape == (shape[0], 2, 3)
    (result.sum() + theta.sum() + strength.sum()).backward()
    assert torch.isfinite(strength.grad).all()
