"""OptTTA: views of sub-policies, the search, and predictions averaged over views."""

from __future__ import annotations

import itertools

import pytest
import torch

from tesla_med.augment import warp
from tesla_med.errors import AdaptationError
from tesla_med.models.base import norm_layers
from tesla_med.models.torchvision import MobileNetV2, MobileNetV2Params
from tesla_med.tta._shared.opttta_views import OPERATIONS, Draw, apply_draw, draw_views, norm_distance

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"batch_slices": 4, "first_steps": 2, "later_steps": 3, "views": 2}
PHOTOMETRIC = ("gamma", "blur", "contrast", "brightness")


@pytest.fixture
def make_opttta(make_tta):
    def make(network=None, *, seed=0, **params):
        return make_tta("opttta", network, seed=seed, **(QUICK | params))

    return make


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def full_draw(count, *, sign=1.0, flip=1.0, shift=0.0):
    """The draw with every strength at its largest."""
    width = len(OPERATIONS)
    return Draw(
        torch.ones(count, width),
        torch.full((count, width), sign),
        torch.full((count, 2), flip),
        torch.full((count, 2), shift),
    )


class Calls:
    """Note the sizes of the batches that a network is given."""

    def __init__(self, network):
        self.sizes = []
        network.register_forward_pre_hook(self)

    def __call__(self, _, inputs):
        self.sizes.append(len(inputs[0]))


# ------------------------------------------------------------ views


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation(name, make_images):
    images = make_images(4)
    zero, one = torch.zeros(7), torch.ones(7)
    unturned = full_draw(4)
    nothing = apply_draw(images, (name,), zero, unturned)
    assert torch.allclose(nothing.images, images, atol=1e-4)
    view = apply_draw(images, (name,), one, unturned)
    changed = (view.images - images).abs().mean()
    assert changed == 0 if name == "identity" else changed > 0.005
    assert view.images.min() >= 0
    assert view.images.max() <= 1
    moves = name in ("crop", "flip_rotate")
    assert moves != torch.equal(view.theta, warp.identity(4))
    assert torch.allclose(warp.to_view(images, view.theta), view.images, atol=1e-5) or not moves


@pytest.mark.parametrize("name", ["gamma", "contrast", "brightness", "flip_rotate"])
def test_both_ways(name, make_images):
    images = make_images(4)
    up, down = (apply_draw(images, (name,), torch.ones(7), full_draw(4, sign=sign)) for sign in (1.0, -1.0))
    assert not torch.allclose(up.images, down.images, atol=1e-3)
    if name == "flip_rotate":
        assert torch.allclose(warp.compose(up.theta, down.theta), warp.identity(4), atol=1e-5)
        assert up.theta[0, 0, 0] == pytest.approx(3**0.5 / 2, abs=1e-5)  # 30 degrees


def test_flips(make_images):
    images = make_images(3)
    view = apply_draw(images, ("flip_rotate",), torch.zeros(7), full_draw(3, flip=-1.0))
    assert torch.allclose(view.images, images.flip((2, 3)), atol=1e-5)
    half = full_draw(3)
    half.flips[:, 0] = -1.0
    view = apply_draw(images, ("flip_rotate",), torch.zeros(7), half)
    assert torch.allclose(view.images, images.flip(3), atol=1e-5)


@pytest.mark.parametrize("shift", [-1.0, 0.3, 1.0])
def test_crops_stay_inside_the_field(shift):
    theta = apply_draw(torch.rand(2, 1, 16, 16), ("crop",), torch.ones(7), full_draw(2, shift=shift)).theta
    assert theta[0, 0, 0] == theta[0, 1, 1] == 0.5
    for corner in itertools.product((-1.0, 1.0), repeat=2):
        reached = theta @ torch.tensor([*corner, 1.0])
        assert reached.abs().max() <= 1 + 1e-6


def test_draws_come_from_the_generator_and_span_their_ranges():
    one, two, other = (
        draw_views(500, generator(1)),
        draw_views(500, generator(1)),
        draw_views(500, generator(2)),
    )
    for field in ("shares", "signs", "flips", "shifts"):
        values = getattr(one, field)
        assert torch.equal(values, getattr(two, field))
        assert not torch.equal(values, getattr(other, field))
        assert values.float().std() > 0.25
    assert one.shares.min() >= 0
    assert one.shares.max() <= 1
    assert set(one.signs.unique().tolist()) == set(one.flips.unique().tolist()) == {-1.0, 1.0}
    assert one.shifts.min() < -0.9
    assert one.shifts.max() > 0.9


def test_gradients_reach_the_members_only(make_images):
    members = ("gamma", "contrast", "identity", "crop", "flip_rotate")
    magnitudes = torch.full((7,), 0.5, requires_grad=True)
    view = apply_draw(make_images(4), members, magnitudes, draw_views(4, generator()))
    (gradient,) = torch.autograd.grad((view.images**2).mean(), magnitudes)
    for name, value in zip(OPERATIONS, gradient.tolist(), strict=True):
        assert (value != 0) == (name in members and name != "identity"), name


# ------------------------------------------------------------ the objective


def test_distance_of_norm_statistics_by_hand(make_network, make_images):
    network, images = make_network(), make_images(3)
    inputs = 2 * images - 1
    with norm_distance(network) as distances:
        network(inputs)
    assert len(distances) == len(norm_layers(network))
    first = norm_layers(network)[0]
    features = network.inc.double_conv[0](inputs)
    mean, variance = features.mean(dim=(0, 2, 3)), features.var(dim=(0, 2, 3), correction=0)
    want = ((mean - first.running_mean) ** 2).mean() + ((variance - first.running_var) ** 2).mean()
    assert float(distances[0].detach()) == pytest.approx(float(want.detach()), rel=1e-4)
    with torch.no_grad():
        network(inputs)
    assert len(distances) == len(norm_layers(network))  # nothing is collected outside the block


def test_images_that_the_norms_remember_are_near(make_network, make_images):
    network, images = make_network(), make_images(6, 48, 48)
    for layer in norm_layers(network):
        layer.momentum = 1.0
    with torch.no_grad():
        for _ in range(3):
            network.train()(2 * images - 1)
    network.eval()
    totals = []
    for seen in (images, images**2, images**4):
        with norm_distance(network) as distances:
            network(2 * seen - 1)
        totals.append(float(sum(distances).detach()))
    assert totals[0] < 0.05 * totals[1] < 0.05 * totals[2]


def test_objective_by_hand(make_opttta, make_images):
    method, images = make_opttta(norm_weight=0.3, marginal_weight=0.7), make_images(4)
    index = method.policies.members.index(("gamma", "blur", "contrast", "brightness", "identity"))
    raw = torch.full((7,), -40.0, requires_grad=True)  # magnitudes of 0: the images as they are
    total, entropy, distance, marginal = method._objective(index, raw, images).detach()
    probs = method.model(2 * images - 1).softmax(dim=1)
    assert float(entropy) == pytest.approx(float(-(probs * probs.log()).sum(dim=1).mean()), abs=1e-4)
    shares = probs.mean(dim=(0, 2, 3))
    assert float(marginal) == pytest.approx(float((shares * shares.log()).sum()), abs=1e-4)
    with norm_distance(method.model) as distances:
        method.model(2 * images - 1)
    assert float(distance) == pytest.approx(float(sum(distances)) / len(distances), rel=1e-3)
    assert float(total) == pytest.approx(float(entropy + 0.3 * distance + 0.7 * marginal), rel=1e-5)


# ------------------------------------------------------------ the search


def test_sub_policies_are_all_sets_of_five_of_seven(make_opttta):
    members = make_opttta().policies.members
    assert len(OPERATIONS) == 7
    assert len(set(members)) == len(members) == 21
    assert all(len(set(one)) == 5 for one in members)


def test_the_first_volume_tries_all_and_keeps_the_best(make_opttta, make_images, monkeypatch):
    method, images = make_opttta(keep=3), make_images(5)
    asked = []

    def learn(index, seen, steps):
        asked.append((index, len(seen), steps))
        return torch.tensor([float((index * 8) % 21), 0.0, 0.0, 0.0])

    monkeypatch.setattr(method, "_learn", learn)
    scalars = method.adapt(images)
    assert asked == [(index, 5, 2) for index in range(21)]
    assert method.kept == (0, 8, 16)  # losses 0, 1, 2
    assert float(scalars["loss/total"]) == 1.0
    asked.clear()
    method.adapt(images[:3])
    assert asked == [(index, 3, 3) for index in (0, 8, 16)]
    assert method.steps == 21 * 2 + 3 * 3
    method.reset()
    assert method.kept == ()


def test_later_volumes_learn_the_kept_on(make_opttta, make_images):
    method = make_opttta()
    method.adapt(make_images(5))
    assert (method.policies.raw != 0).any(dim=1).all()  # every one was learned
    method.policies.raw.add_(1.0)  # as after many steps
    before = method.policies.raw.clone()
    method.adapt(make_images(5, seed=1))
    moved = (method.policies.raw != before).any(dim=1).nonzero().flatten().tolist()
    assert sorted(moved) == sorted(method.kept)
    step = (method.policies.raw - before).abs().max()
    assert 0 < step < 0.05  # three steps of 0.01, from where they were


def test_the_search_finds_lower_losses(make_opttta, make_network, make_images):
    network = make_network()
    dark = make_images(6, seed=100)[:, :, :32, :32] * 0.5
    method = make_opttta(network, learning_rate=0.1, norm_weight=5)
    index = method.policies.members.index((*PHOTOMETRIC, "crop"))

    def loss():
        method.generator.manual_seed(5)
        raw = method.policies.raw[index].clone().requires_grad_(True)
        return float(torch.stack([method._objective(index, raw, dark)[0].detach() for _ in range(20)]).mean())

    before = loss()
    last = float(method._learn(index, dark, 40)[0])
    after = loss()
    assert after < before - 0.005
    assert last == pytest.approx(after, rel=0.5)


def test_the_network_is_frozen_bit_for_bit(make_opttta, make_network, make_images, same_state):
    network, images = make_network(), make_images(5)
    before = {key: value.clone() for key, value in network.state_dict().items()}
    method = make_opttta(network)
    method.adapt(images)
    method.predict(images)
    assert same_state(before, dict(method.model.state_dict()))
    assert not any(parameter.requires_grad for parameter in method.model.parameters())
    assert not method.model.training


def test_learns_nothing_at_learning_rate_0(make_opttta, make_images):
    method = make_opttta(learning_rate=0)
    method.adapt(make_images(4))
    assert torch.equal(method.policies.raw, torch.zeros(21, 7))
    assert len(method.kept) == 3


def test_a_case_is_searched_as_a_whole(make_opttta, make_images):
    images = make_images(7)
    (whole,) = make_opttta(batch_slices=2).batches(images)
    assert torch.equal(whole, images)
    parts = list(make_opttta(batch_slices=2, draw="ordered").batches(images))
    assert [len(part) for part in parts] == [2, 2, 2, 1]


@pytest.mark.parametrize(("batch", "limit", "want"), [(4, None, 4), (None, None, 6), (4, 2, 2), (None, 1, 1)])
def test_slices_of_a_step(batch, limit, want, make_opttta, make_images):
    method = make_opttta(batch_slices=batch)
    method.use_less_memory(limit)
    calls = Calls(method.model)
    method._learn(0, make_images(6), 3)
    assert calls.sizes == [want] * 3


def test_state_in_the_middle(make_opttta, make_images, same_state):
    images = make_images(5)
    one, two = make_opttta(), make_opttta(seed=5)
    one.adapt(images)
    two.load_state_dict(one.state_dict())
    for method in (one, two):
        method.adapt(images[1:])
    assert same_state(one.state_dict(), two.state_dict())
    assert torch.equal(one.predict(images), two.predict(images))
    one.reset()
    assert same_state(one.state_dict(), make_opttta().state_dict())


# ------------------------------------------------------------ predicting


def test_before_any_search_the_network_predicts(make_opttta, make_network, make_images):
    network, images = make_network(), make_images(5)
    with torch.no_grad():
        want = network(2 * images - 1).softmax(dim=1)
    assert torch.allclose(make_opttta(network).predict(images), want, atol=1e-6)


def test_views_that_change_nothing_give_the_network(make_opttta, make_network, make_images):
    network, images = make_network(), make_images(5)
    method = make_opttta(network)
    method.policies.raw.fill_(-40)
    method.kept = (method.policies.members.index((*PHOTOMETRIC, "crop")),)
    with torch.no_grad():
        want = network(2 * images - 1).softmax(dim=1)
    assert torch.allclose(method.predict(images), want, atol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_every_view_of_every_slice_is_asked_for(count, make_opttta, make_images):
    method = make_opttta(views=7)  # and a batch of 3
    method.kept = (0, 20)
    calls = Calls(method.model)
    probs = method.predict(make_images(count))
    assert probs.shape == (count, 2, 32, 32)
    assert sum(calls.sizes) == 2 * 7 * count
    assert max(calls.sizes) <= 3
    if count == 1:
        assert calls.sizes == 2 * [3, 3, 1]


@pytest.mark.parametrize("count", [1, 4])
def test_predictions_are_warped_back(count, make_opttta, make_images, monkeypatch):
    method, images = make_opttta(views=16), make_images(count, 48, 48)
    method.kept = (method.policies.members.index(("gamma", "blur", "identity", "crop", "flip_rotate")),)
    method.policies.raw[:, :2] = -40

    def bright(_, view):  # a made-up network without spatial context
        return torch.cat([8 * (0.6 - view), 8 * (view - 0.6)], dim=1)

    monkeypatch.setattr(method, "logits", bright)
    probs = method.predict(images)
    want = bright(None, images).softmax(dim=1)
    together = torch.corrcoef(torch.stack([probs[:, 1].flatten(), want[:, 1].flatten()]))[0, 1]
    mirrored = torch.corrcoef(torch.stack([probs[:, 1].flatten(), want[:, 1].flip((1, 2)).flatten()]))[0, 1]
    assert together > 0.95 > mirrored


def test_record_names_what_is_kept(make_opttta):
    method = make_opttta()
    assert set(method.record().values()) == {0.0}
    method.kept = tuple(method.policies.members.index((*PHOTOMETRIC, name)) for name in ("identity", "crop"))
    method.policies.raw[method.kept[1], OPERATIONS.index("crop")] = 3.0
    record = method.record()
    assert record["policy/kept/gamma"] == 1
    assert record["policy/kept/crop"] == 0.5
    assert record["policy/kept/flip_rotate"] == 0
    assert record["policy/magnitude/crop"] == pytest.approx(0.9526, abs=1e-4)


def test_cost(make_opttta):
    method = make_opttta(first_steps=10, later_steps=5, views=4)
    assert method.passes(6) == 10 * 21 * 4 * 3 + 3 * 4 * 6
    method.kept = (0, 1, 2)
    assert method.passes(6) == 5 * 3 * 4 * 3 + 3 * 4 * 6


def test_tiles_are_refused(make_opttta):
    network = MobileNetV2.build(MobileNetV2Params(width=0.25), 3, 4).eval()
    with pytest.raises(AdaptationError, match=r"'opttta'.*for classification.*use method 'tesla'"):
        make_opttta(network, first_steps=1)
