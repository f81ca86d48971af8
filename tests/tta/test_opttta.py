"""OptTTA: views of sub-policies, the search, and predictions averaged over views."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tesla_med.augment import warp
from tesla_med.errors import AdaptationError
from tesla_med.models.base import norm_layers
from tesla_med.models.torchvision import MobileNetV2, MobileNetV2Params
from tesla_med.tta._shared.opttta_views import (
    LEARNED,
    OPERATIONS,
    STYLES,
    Draw,
    SubPolicy,
    apply_draw,
    bright_slices,
    draw_views,
    norm_distance,
    nuclear_norm,
)

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"batch_slices": 4, "first_steps": 2, "later_steps": 3, "views": 2}
PHOTOMETRIC = ("brightness", "contrast", "gamma", "blur")


@pytest.fixture
def make_opttta(make_tta):
    def make(network=None, *, seed=0, **params):
        return make_tta("opttta", network, seed=seed, **(QUICK | params))

    return make


def index_of(method, members):
    return [policy.members for policy in method.policies].index(members)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def full_draw(count, *, style=1.0, flip=1.0, shift=0.0, turn=0.0):
    """The draw in which every view has these values."""
    return Draw(
        torch.full((count, 3), style),
        torch.full((count, 2), shift),
        torch.full((count, 2), flip),
        torch.full((count,), turn),
    )


def policy_of(*members, channels=1, **learned):
    """A sub-policy with these values of ``bias``, ``range``, ``sigma`` and ``crop``, 0 where not given."""
    policy = SubPolicy(members, channels)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            value.fill_(learned.get(name.split(".")[0], 0.0))
    return policy


class Calls:
    """Note the sizes of the batches that a network is given."""

    def __init__(self, network):
        self.sizes = []
        network.register_forward_pre_hook(self)

    def __call__(self, _, inputs):
        self.sizes.append(len(inputs[0]))


# ------------------------------------------------------------ views


def test_a_sub_policy_starts_near_the_identity():
    policy = SubPolicy(OPERATIONS, 3)
    found = {name: value.detach().tolist() for name, value in policy.named_parameters()}
    assert set(found) == {
        *(f"{kind}.{name}" for kind in ("bias", "range") for name in STYLES),
        "sigma",
        "crop",
    }
    assert all(found[f"bias.{name}"] == [0.0] * 3 for name in STYLES)
    assert all(found[f"range.{name}"] == pytest.approx([0.001] * 3) for name in STYLES)
    assert found["sigma"] == 1.0
    assert found["crop"] == pytest.approx([0.1, 0.1])
    assert set(policy.summary()) == set(LEARNED)
    assert not list(SubPolicy(("identity", "flip_turn"), 1).parameters())


WANT = {
    "brightness": lambda x, b, r, u: x + b + r * u,
    "contrast": lambda x, b, r, u: x * (1 + b + r * u),
    "gamma": lambda x, b, r, u: x ** (1 + b + 0.01 * r * u),
}


@pytest.mark.parametrize("spread", [0.2, -0.2])
@pytest.mark.parametrize("name", STYLES)
def test_a_style_has_a_bias_and_a_range(name, spread, make_images):
    images = make_images(4)
    for bias, u in itertools.product((-0.3, 0.4), (-1.0, 0.0, 0.5)):
        view = apply_draw(images, policy_of(name, bias=bias, range=spread), full_draw(4, style=u)).images
        assert torch.allclose(view, WANT[name](images, bias, 0.2, u), atol=1e-5)


@pytest.mark.parametrize("name", STYLES)
def test_a_bias_moves_every_view_to_the_same_side(name, make_images):
    """What a range alone cannot do: its mean over views stays where the image is."""
    images, draw = make_images(1).expand(400, -1, -1, -1), draw_views(400, generator())
    views = (apply_draw(images, policy_of(name, bias=bias, range=0.05), draw).images for bias in (0.2, 0.0))
    moved, spread = (view.detach().mean(dim=(1, 2, 3)) for view in views)
    plain = float(images[0].mean())
    assert float(spread.mean()) == pytest.approx(plain, abs=0.003)
    side = moved > plain
    assert side.all() or not side.any()
    assert spread.std() > (1e-5 if name == "gamma" else 1e-3)


def test_styles_are_learned_for_each_channel(make_images):
    images, policy = make_images(2, channels=2), policy_of("brightness", channels=2)
    with torch.no_grad():
        policy.bias["brightness"].copy_(torch.tensor([0.1, -0.2]))
    view = apply_draw(images, policy, full_draw(2)).images
    assert torch.allclose(
        view - images, torch.tensor([0.1, -0.2]).view(1, 2, 1, 1).expand_as(view), atol=1e-6
    )


def test_styles_may_leave_the_range_of_images(make_images):
    images, both = make_images(3), ("brightness", "gamma")
    assert apply_draw(images, policy_of("brightness", bias=0.9), full_draw(3)).images.max() > 1.2
    dark = apply_draw(images, policy_of(*both, bias=-0.6), full_draw(3)).images
    assert torch.isfinite(dark).all()


def test_blur_is_a_gaussian_of_seven_pixels():
    images = torch.zeros(1, 1, 15, 15)
    images[0, 0, 7, 7] = 1.0
    for sigma in (1.0, -1.0, 2.0):
        view = apply_draw(images, policy_of("blur", sigma=sigma), full_draw(1)).images[0, 0]
        line = torch.exp(-0.5 * torch.arange(-3.0, 4) ** 2 / sigma**2)
        want = torch.outer(line, line) / line.sum() ** 2
        assert torch.allclose(view[4:11, 4:11], want, atol=1e-6)
        assert float(view.detach().sum()) == pytest.approx(1.0, abs=1e-5)


def test_the_identity_and_the_order_of_operations(make_images):
    images = make_images(3)
    assert torch.equal(apply_draw(images, policy_of("identity"), full_draw(3)).images, images)
    policy = policy_of("brightness", "contrast", "gamma", bias=0.3)
    want = ((images + 0.3) * 1.3) ** 1.3
    assert torch.allclose(apply_draw(images, policy, full_draw(3)).images, want, atol=1e-5)
    assert OPERATIONS == ("brightness", "contrast", "gamma", "blur", "identity", "crop", "flip_turn")


def test_flips_and_turns_learn_nothing(make_images):
    images, policy = make_images(3), policy_of("flip_turn")
    view = apply_draw(images, policy, full_draw(3, flip=-1.0))
    assert torch.allclose(view.images, images.flip((2, 3)), atol=1e-5)
    half = full_draw(3)
    half.flips[:, 0] = -1.0
    assert torch.allclose(apply_draw(images, policy, half).images, images.flip(3), atol=1e-5)
    turned = apply_draw(images, policy, full_draw(3, turn=1.0))
    quarter = [torch.allclose(turned.images, images.rot90(k, (2, 3)), atol=1e-4) for k in (1, 3)]
    assert sum(quarter) == 1
    assert torch.allclose(warp.from_view(turned.images, turned.theta), images, atol=1e-4)
    wide = make_images(2, 16, 24)  # a quarter turn of which is no field of the same sides
    assert torch.allclose(apply_draw(wide, policy, full_draw(2, turn=1.0)).images, wide, atol=1e-5)


@pytest.mark.parametrize("shift", [-1.0, 0.3, 1.0])
@pytest.mark.parametrize("share", [0.1, -0.4, 2.0])
def test_crops_stay_inside_the_field(share, shift):
    view = apply_draw(torch.rand(2, 1, 16, 16), policy_of("crop", crop=share), full_draw(2, shift=shift))
    taken = min(abs(share), 0.9)
    assert view.theta[0, 0, 0].item() == view.theta[0, 1, 1].item() == pytest.approx(1 - taken)
    assert view.theta[0, :, 2].tolist() == pytest.approx([0.5 * taken * shift] * 2)
    for corner in itertools.product((-1.0, 1.0), repeat=2):
        reached = view.theta @ torch.tensor([*corner, 1.0])
        assert reached.abs().max() <= 1 + 1e-6


def test_crops_of_a_half_taken_from_one_axis(make_images):
    images, policy = make_images(1, 32, 32), policy_of("crop")
    with torch.no_grad():
        policy.crop.copy_(torch.tensor([0.5, 0.0]))  # along W
    view = apply_draw(images, policy, full_draw(1)).images
    want = torch.nn.functional.interpolate(images[..., 8:24], (32, 32), mode="bilinear")
    assert (view - want)[..., 2:-2].abs().max() < 1e-4


def test_draws_come_from_the_generator_and_span_their_ranges():
    one, two, other = (
        draw_views(500, generator(1)),
        draw_views(500, generator(1)),
        draw_views(500, generator(2)),
    )
    for field in ("styles", "shifts", "flips", "turns"):
        values = getattr(one, field)
        assert torch.equal(values, getattr(two, field))
        assert not torch.equal(values, getattr(other, field))
        assert values.float().std() > 0.25
    assert set(one.flips.unique().tolist()) == {-1.0, 1.0}
    assert set(one.turns.unique().tolist()) == {0.0, 1.0}
    assert float(one.turns.mean()) == pytest.approx(0.5, abs=0.07)
    assert one.flips.mean(dim=0).abs().max() < 0.14
    for values in (one.shifts, one.styles):
        assert values.abs().max() <= 1
        assert values.min() < -0.9
        assert values.max() > 0.9
        assert values.mean().abs() < 0.08


def test_gradients_reach_all_that_is_learned(make_images):
    policy = SubPolicy(OPERATIONS, 1)
    view = apply_draw(make_images(4), policy, draw_views(4, generator()))
    (view.images**2).mean().backward()
    for name, value in policy.named_parameters():
        assert value.grad is not None, name
        assert (value.grad != 0).all(), name


@pytest.mark.parametrize("turn", [0.0, 1.0])
@pytest.mark.parametrize("members", [OPERATIONS, ("blur", "gamma", "flip_turn")])
def test_volumes_are_augmented_slice_by_slice(members, turn, make_images):
    slices = make_images(6).view(2, 1, 3, 32, 32)
    policy = policy_of(*members, bias=0.1, range=0.1, sigma=1.0, crop=0.2)
    draw = replace(draw_views(2, generator()), turns=torch.full((2,), turn))
    found = apply_draw(slices, policy, draw)
    for depth in range(3):
        want = apply_draw(slices[:, :, depth], policy, draw)
        assert torch.allclose(found.images[:, :, depth], want.images, atol=1e-5)
    assert torch.equal(found.theta, want.theta)


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


def test_variances_of_a_few_values_are_those_of_these_values():
    norm = torch.nn.BatchNorm2d(1, affine=False).eval()
    with norm_distance(norm) as distances:
        norm(torch.tensor([-3.0, 3.0]).view(2, 1, 1, 1))  # of variance 9, where 1 is remembered
    assert float(distances[0]) == pytest.approx(64.0)


def remember(network, images):
    """Let the norms of a network remember the statistics of these images."""
    for layer in norm_layers(network):
        layer.momentum = 1.0
    with torch.no_grad():
        for _ in range(3):
            network.train()(2 * images - 1)
    network.eval()


def test_images_that_the_norms_remember_are_near(make_network, make_images):
    network, images = make_network(), make_images(6, 48, 48)
    remember(network, images)
    totals = []
    for seen in (images, images**2, images**4):
        with norm_distance(network) as distances:
            network(2 * seen - 1)
        totals.append(float(sum(distances).detach()))
    assert totals[0] < 0.05 * totals[1] < 0.05 * totals[2]


def test_nuclear_norm_by_hand():
    probs = torch.rand(3, 4, 8, 12, generator=generator()).softmax(dim=1)
    total = 0.0
    for image in probs:
        windows = image.unfold(1, 4, 4).unfold(2, 4, 4).amax(dim=(3, 4))
        matrix = windows.flatten(1).T  # pixels x classes
        assert matrix.shape == (6, 4)
        total += float(torch.linalg.svdvals(matrix).sum())
    assert float(nuclear_norm(probs)) == pytest.approx(total / 3, rel=1e-5)
    weight = torch.ones(3, 8, 12)
    weight[:, :4] = 0.0
    assert float(nuclear_norm(probs, weight)) == pytest.approx(float(nuclear_norm(probs[:, :, 4:])), rel=1e-5)
    volumes = torch.stack([probs, probs], dim=2)
    assert float(nuclear_norm(volumes)) == pytest.approx(total / 3, rel=1e-5)


def test_nuclear_norm_rewards_certain_and_diverse_predictions():
    half = torch.zeros(1, 2, 16, 16)
    half[0, 0, :8], half[0, 1, 8:] = 1.0, 1.0
    alike = torch.zeros(1, 2, 16, 16)
    alike[0, 0] = 1.0
    unsure = torch.full((1, 2, 16, 16), 0.5)
    assert nuclear_norm(half) > nuclear_norm(alike) + 1 > nuclear_norm(unsure) + 1.5


def test_objective_by_hand(make_opttta, make_images):
    method = make_opttta(entropy_weight=20, norm_weight=0.3, nuclear_weight=0.7)
    images = make_images(4)
    index = index_of(method, ("brightness", "contrast", "gamma", "blur", "identity"))
    with torch.no_grad():  # the images as they are
        for value in method.policies[index].parameters():
            value.zero_()
    total, entropy, distance, norm = method._objective(index, images).detach()
    probs = method.model(2 * images - 1).softmax(dim=1)
    assert float(entropy) == pytest.approx(float(-(probs * probs.log()).sum(dim=1).mean()), abs=1e-4)
    assert float(norm) == pytest.approx(float(nuclear_norm(probs)), rel=1e-3)
    with norm_distance(method.model) as distances:
        method.model(2 * images - 1)
    assert float(distance) == pytest.approx(float(sum(distances)), rel=1e-3)
    want = 20 * entropy + 0.3 * distance - 0.5 * 0.7 * norm
    assert float(total) == pytest.approx(float(want), rel=1e-4)
    assert min(20 * entropy, 0.3 * distance, 0.35 * norm) > 0.01 * abs(total)  # each has a say


def test_slices_of_background_are_left_out(make_images):
    images = make_images(5)
    images[1] = 0.0
    images[3] = 0.0
    images[3, :, :3, :3] = 1.0  # a corner of 1 %
    assert bright_slices(images).tolist() == [0, 2, 4]
    assert bright_slices(0.1 * images).tolist() == [0, 2, 4]  # the scale of a slice is its own
    assert bright_slices(torch.zeros(3, 1, 8, 8)).tolist() == [0, 1, 2]


def test_slices_of_any_size_can_be_looked_at(monkeypatch):
    most, quantile = 2**24, torch.quantile  # values that torch 2.6 takes quantiles of

    def of_few(values, shares):
        assert values.numel() <= most
        return quantile(values, shares)

    monkeypatch.setattr(torch, "quantile", of_few)
    images = torch.zeros(2, 1, 1, most + 1)
    images[1, ..., : most // 2] = 1.0
    assert bright_slices(images).tolist() == [1]


def test_steps_draw_no_slice_of_background(make_opttta, make_images, monkeypatch):
    method, images = make_opttta(batch_slices=8), make_images(6)
    images[[0, 5]] = 0.0
    images[:, :, 0, 0] = torch.arange(6.0)[:, None] / 10
    seen = []

    def objective(_, batch, weight):
        seen.append(batch)
        return torch.zeros(4, requires_grad=True)

    monkeypatch.setattr(method, "_objective", objective)
    method.learn(0, images, bright_slices(images), 20)
    numbers = (torch.cat(seen)[:, 0, 0, 0] * 10).round().long()
    assert numbers.unique().tolist() == [1, 2, 3, 4]


# ------------------------------------------------------------ the search


def test_sub_policies_are_all_sets_of_five_of_seven(make_opttta):
    members = [policy.members for policy in make_opttta().policies]
    assert len(OPERATIONS) == 7
    assert len(set(members)) == len(members) == 21
    assert all(len(set(one)) == 5 for one in members)


def test_the_first_volume_tries_all_and_keeps_the_best(make_opttta, make_images, monkeypatch):
    method, images = make_opttta(keep=3), make_images(5)
    asked = []

    def learn(index, seen, _, steps):
        asked.append((index, len(seen), steps))
        return torch.tensor([float((index * 8) % 21), 0.0, 0.0, 0.0])

    monkeypatch.setattr(method, "learn", learn)
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


def learned(method):
    """What each sub-policy has learned, as one row."""
    return [torch.cat([value.detach().flatten() for value in item.parameters()]) for item in method.policies]


def test_later_volumes_learn_the_kept_on(make_opttta, make_images):
    method = make_opttta()
    start = learned(method)
    method.adapt(make_images(5))
    before = learned(method)
    assert all((one != two).any() for one, two in zip(start, before, strict=True))  # every one was learned
    method.adapt(make_images(5, seed=1))
    steps = [float((one - two).abs().max()) for one, two in zip(before, learned(method), strict=True)]
    assert [index for index, step in enumerate(steps) if step > 0] == sorted(method.kept)
    assert max(steps) < 3.5e-3  # three steps of 0.001, from where they were
    counts = [{int(state["step"]) for state in item.state.values()} for item in method.optimizers().values()]
    assert [next(iter(count)) for count in counts] == [
        2 + 3 * (index in method.kept) for index in range(21)
    ]  # the state of the optimisers goes on


def test_the_search_moves_a_volume_towards_the_source(make_opttta, make_network, make_images, monkeypatch):
    """A volume that is darker than the source is made brighter as a whole: the bias is learned."""
    images, network = make_images(6, 48, 48), make_network()
    remember(network, images)
    dark = images - 0.2
    weights = {"entropy_weight": 0, "nuclear_weight": 0, "norm_weight": 5}
    method = make_opttta(network, learning_rate=0.02, batch_slices=24, **weights)
    index = index_of(method, ("brightness", "gamma", "identity", "crop", "flip_turn"))
    policy = method.policies[index]
    del policy.bias["gamma"], policy.range["gamma"]
    policy.members = ("brightness",)

    def loss():
        method.generator.manual_seed(5)
        return float(torch.stack([method._objective(index, dark)[0].detach() for _ in range(10)]).mean())

    before, steps, objective = loss(), [], method._objective
    with monkeypatch.context() as patch:
        patch.setattr(method, "_objective", lambda *args: steps.append(objective(*args)) or steps[-1])
        last = method.learn(index, dark, torch.arange(6), 60)
    assert loss() < 0.5 * before
    assert torch.allclose(last, torch.stack(steps[-6:]).mean(dim=0))  # of the last tenth
    assert float(last[0]) < 0.5 * before
    assert 0.1 < float(policy.bias["brightness"].detach()) < 0.3


def test_a_step_has_the_gradient_of_its_own_slices(make_opttta, make_images, monkeypatch):
    method, seen = make_opttta(clip_norm=None, learning_rate=0.0), []
    index = index_of(method, (*PHOTOMETRIC, "identity"))
    sigma = method.policies[index].sigma
    monkeypatch.setattr(method, "_objective", lambda *_: torch.stack([2 * sigma] * 4))
    method._optimizers[index].register_step_pre_hook(lambda *_: seen.append(float(sigma.grad)))
    method.learn(index, make_images(3), torch.arange(3), 3)
    assert seen == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("steps", "last"), [(1, 1), (9, 1), (20, 2), (30, 3)])
def test_a_sub_policy_is_judged_by_the_last_tenth_of_its_steps(
    steps, last, make_opttta, make_images, monkeypatch
):
    method, count = make_opttta(), itertools.count()
    sigma = method.policies[0].sigma
    monkeypatch.setattr(method, "_objective", lambda *_: 0 * sigma + torch.full((4,), float(next(count))))
    found = method.learn(0, make_images(3), torch.arange(3), steps)
    assert found.tolist() == pytest.approx([steps - (last + 1) / 2] * 4)


def test_slices_of_the_size_of_a_patch_are_drawn_whole(make_opttta, make_images):
    method, images = make_opttta(), make_images(4)
    method.pixel_weight = torch.rand(4, 32, 32, generator=generator())
    for patch, whole in (((32, 32), True), ((16, 32), False), ((32, 16), False)):
        method.model.patch = patch
        drawn, weight = method._drawn(images, torch.tensor([1]), 3)
        assert drawn.shape == (3, 1, *patch)
        if whole:
            assert torch.equal(weight, method.pixel_weight[[1, 1, 1]])
        else:
            assert weight is None


def test_labels_teach_the_sub_policy_that_an_optimiser_updates(make_opttta, make_images, monkeypatch):
    method, images = make_opttta(), make_images(3)
    assert list(method.optimizers()) == [f"policy_{index}" for index in range(21)]
    index = index_of(method, ("brightness", "contrast", "gamma", "identity", "flip_turn"))
    monkeypatch.setattr(method, "logits", lambda _, view: torch.cat([-view, view], dim=1))
    logits = method.labelled_pass(f"policy_{index}")(images)
    logits[:, 1].sum().backward()
    taught = [any(item.grad is not None for item in policy.parameters()) for policy in method.policies]
    assert [number for number, found in enumerate(taught) if found] == [index]
    assert torch.allclose(logits[:, 1], images[:, 0], atol=0.01)  # flipped and turned back


def test_gradients_are_clipped(make_opttta, make_images, monkeypatch):
    seen, clip = [], torch.nn.utils.clip_grad_norm_

    def noted(items, most):
        seen.append(most)
        return clip(items, most)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", noted)
    for most in (0.5, None):
        method = make_opttta(clip_norm=most)
        method.learn(0, make_images(3), torch.arange(3), 2)
    assert seen == [0.5, 0.5]


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
    before = learned(method)
    method.adapt(make_images(4))
    assert all(torch.equal(*pair) for pair in zip(before, learned(method), strict=True))
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
    method.learn(0, make_images(6), torch.arange(6), 3)
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
    method.kept = (index_of(method, (*PHOTOMETRIC, "crop")),)
    with torch.no_grad():
        for value in method.policies[method.kept[0]].parameters():
            value.zero_()
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
    method.kept = (index_of(method, ("gamma", "blur", "identity", "crop", "flip_turn")),)
    with torch.no_grad():
        method.policies[method.kept[0]].sigma.zero_()

    def bright(_, view):  # a made-up network without spatial context
        return torch.cat([8 * (0.6 - view), 8 * (view - 0.6)], dim=1)

    monkeypatch.setattr(method, "logits", bright)
    inside = (..., slice(6, -6), slice(6, -6))  # where every view looks
    probs, want = method.predict(images), bright(None, images).softmax(dim=1)
    assert (probs[:, 1, 0, 0] - 0.5).abs().max() < (want[:, 1, 0, 0] - 0.5).abs().max()  # few look there
    probs, want = probs[inside], want[inside]
    together = torch.corrcoef(torch.stack([probs[:, 1].flatten(), want[:, 1].flatten()]))[0, 1]
    mirrored = torch.corrcoef(torch.stack([probs[:, 1].flatten(), want[:, 1].flip((1, 2)).flatten()]))[0, 1]
    assert together > 0.95 > mirrored


def test_record_names_what_is_kept(make_opttta):
    method = make_opttta()
    assert set(method.record().values()) == {0.0}
    method.kept = tuple(index_of(method, (*PHOTOMETRIC, name)) for name in ("identity", "crop"))
    first, second = (method.policies[index] for index in method.kept)
    with torch.no_grad():
        second.crop.fill_(-0.3)
        first.bias["gamma"].fill_(0.2)
        second.bias["gamma"].fill_(0.4)
    record = method.record()
    assert record["policy/kept/gamma"] == 1
    assert record["policy/kept/crop"] == 0.5
    assert record["policy/kept/flip_turn"] == 0
    assert record["policy/crop"] == pytest.approx(0.3)
    assert record["policy/bias/gamma"] == pytest.approx(0.3)


def test_cost(make_opttta):
    method = make_opttta(first_steps=10, later_steps=5, views=4)
    assert method.passes(6) == 10 * 21 * 4 * 3 + 3 * 4 * 6
    method.kept = (0, 1, 2)
    assert method.passes(6) == 5 * 3 * 4 * 3 + 3 * 4 * 6


def test_tiles_are_refused(make_opttta):
    network = MobileNetV2.build(MobileNetV2Params(width=0.25), 3, 4).eval()
    with pytest.raises(AdaptationError, match=r"'opttta'.*for classification.*use method 'tesla'"):
        make_opttta(network, first_steps=1)
