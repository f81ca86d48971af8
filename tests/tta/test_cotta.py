"""CoTTA: teacher, averaged labels, stochastic restoration."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from tesla_med.augment.ops import OPS
from tesla_med.errors import ConfigError
from tesla_med.models.base import norm_layers
from tesla_med.models.torchvision import MobileNetV2, MobileNetV2Params
from tesla_med.tta._shared.passes import Output

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"batch_slices": 4, "views": 3}


@pytest.fixture
def make_cotta(make_tta):
    def make(network=None, *, seed=0, **params):
        return make_tta("cotta", network, seed=seed, **(QUICK | params))

    return make


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def running(model):
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name}


def moved(before, after):
    return [name for name in before if not torch.equal(before[name], after[name])]


def batch_logits(network, images):
    """Logits normalised by the statistics of the batch, which leave no trace."""
    model = copy.deepcopy(network)
    for layer in norm_layers(model):
        layer.train()
    return model, model(2 * images - 1)


class Calls:
    """Count the images that a network is asked for."""

    def __init__(self, network):
        self.images = 0
        network.register_forward_pre_hook(self)

    def __call__(self, _, inputs):
        self.images += len(inputs[0])


def test_one_update_by_hand(make_cotta, make_network, make_images):
    network, images = make_network(), make_images(4)
    method = make_cotta(network, views=1, restore=0, teacher_momentum=0.9)
    scalars = method.adapt(images)
    with torch.no_grad():
        labels = batch_logits(network, images)[1].softmax(dim=1)
    model, logits = batch_logits(network.requires_grad_(True), images)
    loss = -(labels * functional.log_softmax(logits, dim=1)).sum(dim=1).mean()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss.backward()
    optimizer.step()
    assert float(scalars["loss/consistency"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    before, want = weights(network), weights(model)
    for name, value in method.teacher.named_parameters():
        if name.endswith(("conv.0.bias", "conv.3.bias")):
            continue  # no gradient under batch statistics but rounding, of which Adam makes a step
        student = method.student.get_parameter(name)
        assert torch.allclose(value, 0.9 * before[name] + 0.1 * student, atol=1e-6), name
    head = [name for name in want if name.startswith("outc")]
    assert len(head) == 2
    for name in head:
        assert torch.allclose(method.student.get_parameter(name), want[name], atol=1e-5)
        assert not torch.equal(want[name], before[name])


def test_labels_are_averaged_where_the_source_is_not_confident(make_cotta, make_images):
    images = make_images(4)
    confidence = float(make_cotta().adapt(images)["source_confidence"])
    assert 0.5 < confidence < 1
    for threshold, views in ((confidence + 0.01, 5), (confidence - 0.01, 1)):
        method = make_cotta(views=5, confidence_threshold=threshold)
        calls = Calls(method.teacher)
        method.adapt(images)
        assert calls.images == 4 * views


@pytest.mark.parametrize("threshold", [0.0, 0.75, 1.0])
def test_pixels_that_the_source_is_sure_of_keep_their_label(threshold, make_cotta, make_network, make_images):
    network, images = make_network(), make_images(4)
    method = make_cotta(network, views=5, confidence_of="pixel", confidence_threshold=threshold)
    labels, _ = method._pseudo_labels(images)
    with torch.no_grad():
        plain = batch_logits(network, images)[1].softmax(dim=1)  # of source and teacher alike
    sure = plain.amax(dim=1) >= threshold
    share = {0.0: (1, 1), 0.75: (0.05, 0.95), 1.0: (0, 0)}[threshold]
    assert share[0] <= sure.float().mean() <= share[1]
    kept = (labels - plain).abs().amax(dim=1) < 1e-5
    assert kept[sure].all()
    assert (~kept[~sure]).sum() >= 0.5 * (~sure).sum()  # all but those that no crop shows
    assert torch.allclose(labels.sum(dim=1), torch.ones_like(labels[:, 0]), atol=1e-5)


def test_the_source_gives_the_confidence_and_never_moves(make_cotta, make_network, make_images, same_state):
    network, images = make_network(), make_images(4)
    method = make_cotta(network, learning_rate=0.05, teacher_momentum=0.5)
    seen = [float(method.adapt(images)["source_confidence"]) for _ in range(3)]
    assert len(set(seen)) == 1
    assert same_state(dict(network.state_dict()), dict(method.source.state_dict()))
    with torch.no_grad():
        probs = batch_logits(network, images)[1].softmax(dim=1)
    assert seen[0] == pytest.approx(float(probs.amax(dim=1).mean()), abs=1e-5)


def bright(images):
    """A made-up teacher without spatial context, which gives logits alone."""
    return Output(torch.cat([8 * (0.6 - images), 8 * (images - 0.6)], dim=1), [], None)


def alike(one, two):
    return float(torch.corrcoef(torch.stack([one[:, 1].flatten(), two[:, 1].flatten()]))[0, 1])


def test_averaged_labels_stay_in_the_frame(make_cotta, make_images):
    images = make_images(4, 48, 48)
    method = make_cotta(static_magnitude=0.3, views=12, confidence_threshold=1)
    method._clean = method._augmented = bright
    labels, _ = method._pseudo_labels(images)
    plain = bright(images).logits.softmax(dim=1)
    assert torch.allclose(labels.sum(dim=1), torch.ones_like(labels[:, 0]), atol=1e-5)
    assert not torch.equal(labels, plain)
    assert alike(labels, plain) > 0.9 > alike(labels, plain.flip(2))


def test_labels_of_turned_views_are_turned_back(make_cotta, make_images):
    images = make_images(4, 48, 48)
    method = make_cotta(static_magnitude=1, policy_size=1)
    method.augmentation.ops = (OPS.get("Rotate"),)  # by 30 degrees, either way
    method._augmented = bright
    inside = (..., slice(8, -8), slice(8, -8))
    labels, plain = method._label_view(images)[inside], bright(images).logits.softmax(dim=1)[inside]
    assert (labels - plain).abs().mean() < 0.02


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_restoration(share, make_cotta, make_network, make_images):
    network, images = make_network(), make_images(4)
    plain = make_cotta(network, restore=0, learning_rate=0.01)
    method = make_cotta(network, restore=share, learning_rate=0.01)
    for item in (plain, method):
        item.adapt(images)
    back = count = 0
    for source, free, ours in zip(
        network.parameters(), plain.student.parameters(), method.student.parameters(), strict=True
    ):
        restored = ours == source
        assert torch.equal(ours[~restored], free[~restored])
        stuck = free == source
        back += int((restored & ~stuck).sum())
        count += int((~stuck).sum())
    assert count > 1000
    assert back / count == pytest.approx(share, abs=0.03)
    assert not moved(weights(plain.teacher), weights(method.teacher))  # which had moved before


def test_restoration_draws_anew_each_time(make_cotta, make_images):
    method, images = make_cotta(restore=0.3, learning_rate=0.01), make_images(4)
    source = method.source.get_parameter("inc.double_conv.3.weight")
    drawn = []
    for _ in range(2):
        method.adapt(images)
        drawn.append(method.student.get_parameter("inc.double_conv.3.weight") == source)
    assert not torch.equal(*drawn)


def test_learns_nothing_at_learning_rate_0(make_cotta, make_images):
    method, images = make_cotta(learning_rate=0), make_images(4)
    before, statistics = weights(method.student), running(method.student)
    for _ in range(2):
        method.adapt(images)
    assert not moved(before, weights(method.student))
    assert not moved(before, weights(method.teacher))
    assert moved(statistics, running(method.teacher)) == list(statistics)


def test_every_parameter_of_the_student_learns(make_cotta, make_images):
    method = make_cotta(restore=0)
    before = weights(method.student)
    method.adapt(make_images(4))
    learned = moved(before, weights(method.student))
    # batch statistics take the bias of a convolution before a norm out again
    free = [name for name in before if not name.endswith(("conv.0.bias", "conv.3.bias"))]
    assert set(free) <= set(learned)
    assert any(name.startswith("outc") for name in learned)


@pytest.mark.parametrize("statistics", ["running", "volume"])
def test_the_teacher_predicts_and_prediction_leaves_no_trace(
    statistics, make_cotta, make_images, batch_mode_probs, same_state
):
    method, images = make_cotta(predict_statistics=statistics, learning_rate=0.01), make_images(6)
    method.adapt(images[:4])
    state = method.state_dict()
    probs = method.predict(images)
    assert same_state(state, method.state_dict())
    assert method.predictor is method.teacher
    teacher = copy.deepcopy(method.teacher)
    with torch.no_grad():
        want = teacher(2 * images - 1).softmax(dim=1)
    if statistics == "volume":
        want = batch_mode_probs(teacher, images)[1]
    assert torch.allclose(probs, want, atol=1e-5)


def test_state_in_the_middle(make_cotta, make_images, same_state):
    images = make_images(6)
    one, two = make_cotta(restore=0.2), make_cotta(restore=0.2, seed=5)
    one.adapt(images[:4])
    two.load_state_dict(one.state_dict())
    for method in (one, two):
        method.adapt(images[2:])
    assert same_state(one.state_dict(), two.state_dict())
    one.reset()
    assert same_state(one.state_dict(), make_cotta(restore=0.2).state_dict())


def test_tiles(make_cotta):
    torch.manual_seed(0)
    network = MobileNetV2.build(MobileNetV2Params(width=0.25), 3, 4).eval()
    images = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    method = make_cotta(network, confidence_threshold=1)
    before = weights(method.teacher)
    scalars = method.adapt(images)
    assert torch.isfinite(scalars["loss/consistency"])
    assert moved(before, weights(method.teacher))
    for part in (images, images[:1]):
        probs = method.predict(part)
        assert probs.shape == (len(part), 4)
        assert torch.allclose(probs.sum(dim=1), torch.ones(len(part)), atol=1e-5)


def test_unknown_ops_are_refused(make_cotta):
    with pytest.raises(ConfigError, match="unknown op set 'none_such'"):
        make_cotta(op_set="none_such")


def test_cost_counts_every_view(make_cotta):
    assert make_cotta(views=9).passes(8) - make_cotta(views=4).passes(8) == 8 * 5
