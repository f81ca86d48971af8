"""The adversarial policy: what it draws, how it applies a draw, and its gradient estimator."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from tesla_med.augment import warp
from tesla_med.augment.ops import OP_SETS, OPS
from tesla_med.augment.policy import AdversarialPolicy, Draw
from tesla_med.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")


def generators(seed=0):
    return torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)


def make_policy(op_set="intensity", size=3, seed=0):
    return AdversarialPolicy(op_set, size, *generators(seed))


@pytest.fixture
def plain_set(monkeypatch):
    """An op set of four intensity ops that need neither signs nor noise."""
    monkeypatch.setitem(OP_SETS, "plain", ("Brightness", "Contrast", "Sharpness", "GaussianBlur"))
    return "plain"


def unequal(policy, spread=1.0, seed=3):
    """Give the policy unequal probabilities and magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        policy.logits.copy_(spread * torch.randn(policy.logits.shape, generator=generator))
        policy.raw_magnitudes.copy_(torch.randn(policy.raw_magnitudes.shape, generator=generator))
    return policy


def index_of(policy, *names):
    wanted = [next(i for i, op in enumerate(policy.ops) if op.name == name) for name in names]
    return policy.sub_policies.tolist().index(wanted)


# ------------------------------------------------------------ structure


@pytest.mark.parametrize("op_set", OP_SETS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sub_policies_are_all_combinations_in_set_order(op_set, size):
    policy = make_policy(op_set, size)
    want = list(itertools.combinations(OP_SETS[op_set], size))
    assert [policy.name(i) for i in range(len(want))] == ["+".join(names) for names in want]
    assert policy.logits.shape == (math.comb(len(OP_SETS[op_set]), size),)
    assert policy.raw_magnitudes.shape == (len(want), size)


def test_the_release_has_165_sub_policies():
    assert len(make_policy("released_mri", 3).sub_policies) == 165


def test_starts_with_equal_probabilities_and_half_magnitudes():
    policy = make_policy()
    assert torch.allclose(policy.probabilities, torch.full_like(policy.logits, 1 / len(policy.logits)))
    summary = policy.summary()
    shares = [value for key, value in summary.items() if "probability" in key]
    assert sum(shares) == pytest.approx(3)
    assert {round(value, 6) for key, value in summary.items() if "magnitude" in key} == {0.5}
    unequal(policy).reset_parameters()
    assert policy.summary() == summary


def test_summary_weighs_by_probability(plain_set):
    policy = make_policy(plain_set, 1)
    with torch.no_grad():
        policy.logits.copy_(torch.tensor([0.7, 0.1, 0.1, 0.1]).log())
        policy.raw_magnitudes[0] = 2.0
    summary = policy.summary()
    assert summary["policy/probability/Brightness"] == pytest.approx(0.7)
    assert summary["policy/magnitude/Brightness"] == pytest.approx(torch.tensor(2.0).sigmoid().item())


def test_unknown_set_and_size():
    with pytest.raises(ConfigError, match=r"op set 'intensty'.*Did you mean 'intensity'"):
        make_policy("intensty")
    for size in (0, 99):
        with pytest.raises(ConfigError, match=rf"policy_size must be 1 to \d+ .*got {size}"):
            make_policy("intensity", size)


# ------------------------------------------------------------ drawing


def test_draws_repeat_with_the_same_generators():
    shape = (12, 1, 9, 9)
    first, second = make_policy(), make_policy()
    other = make_policy(seed=5).draw(shape, "uniform")
    for by in ("uniform", "probability"):
        one, two = first.draw(shape, by), second.draw(shape, by)
        assert torch.equal(one.sub_policy, two.sub_policy)
        assert one.signs.keys() == two.signs.keys()
        assert one.noise.keys() == two.noise.keys()
        assert all(torch.equal(one.signs[key], two.signs[key]) for key in one.signs)
        assert all(torch.equal(one.noise[key], two.noise[key]) for key in one.noise)
        assert not torch.equal(one.sub_policy, other.sub_policy)


def test_draws_do_not_touch_the_global_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    make_policy().draw((8, 1, 9, 9), "uniform")
    assert torch.equal(before, torch.get_rng_state())


def test_frequencies(plain_set):
    policy = make_policy(plain_set, 1)
    with torch.no_grad():
        policy.logits.copy_(torch.tensor([0.6, 0.25, 0.1, 0.05]).log())
    count = 20000
    for by, want in (("uniform", [0.25] * 4), ("probability", [0.6, 0.25, 0.1, 0.05])):
        seen = torch.bincount(policy.draw((count, 1, 4, 4), by).sub_policy, minlength=4) / count
        for share, p in zip(seen.tolist(), want, strict=True):
            assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / count)


def test_signs_for_signed_ops_and_noise_for_its_users():
    policy = make_policy("intensity", 3)
    draw = policy.draw((64, 1, 5, 6), "uniform")
    for position, op in enumerate(policy.ops):
        assert (position in draw.signs) == op.signed
        if op.signed:
            assert set(draw.signs[position].tolist()) == {1.0, -1.0}
        users = int((policy.sub_policies[draw.sub_policy] == position).sum())
        if op.noise is not None:
            assert tuple(draw.noise[position].shape) == op.noise((users, 1, 5, 6))
            assert draw.noise[position].std().item() == pytest.approx(1.0, abs=0.25)


# ------------------------------------------------------------ applying


@pytest.mark.parametrize("op_set", OP_SETS)
def test_views_are_in_range_and_pure(op_set, make_images):
    policy = unequal(make_policy(op_set, 3))
    images = make_images(24, 23, 20)
    kept = images.clone()
    draw = policy.draw(tuple(images.shape), "uniform")
    one, two = policy.apply_draw(images, draw), policy.apply_draw(images, draw)
    assert torch.equal(one.images, two.images)
    assert torch.equal(one.theta, two.theta)
    assert torch.equal(images, kept)
    assert one.images.shape == images.shape
    assert one.images.min() >= 0
    assert one.images.max() <= 1
    assert (one.images - images).abs().flatten(1).amax(dim=1).gt(1e-3).all()


@pytest.mark.parametrize("op_set", OP_SETS)
def test_images_of_a_batch_are_independent(op_set, make_images):
    policy = unequal(make_policy(op_set, 3))
    images = make_images(10, 16, 16, 3 if op_set == "generic" else 1)
    draw = policy.draw(tuple(images.shape), "uniform")
    whole = policy.apply_draw(images, draw)
    for i in range(10):
        noise = {}
        for position, values in draw.noise.items():
            users = torch.nonzero(policy.sub_policies[draw.sub_policy] == position)[:, 0].tolist()
            if i in users:
                noise[position] = values[[users.index(i)]]
        signs = {position: values[[i]] for position, values in draw.signs.items()}
        single = policy.apply_draw(images[[i]], Draw(draw.sub_policy[[i]], signs, noise))
        assert torch.allclose(single.images[0], whole.images[i], atol=1e-4)
        assert torch.allclose(single.theta[0], whole.theta[i], atol=1e-6)


def test_intensity_ops_come_in_set_order(monkeypatch, make_images):
    monkeypatch.setitem(OP_SETS, "forward", ("Brightness", "Gamma"))
    monkeypatch.setitem(OP_SETS, "backward", ("Gamma", "Brightness"))
    images, strength = 0.5 * make_images(2, 12, 12), torch.tensor([0.7, 0.7])
    bright, power = OPS.get("Brightness"), OPS.get("Gamma")
    results = {}
    for op_set in ("forward", "backward"):
        policy = make_policy(op_set, 2)
        with torch.no_grad():
            policy.raw_magnitudes.fill_(math.log(0.7 / 0.3))
        signs = {i: torch.ones(2) for i, op in enumerate(policy.ops) if op.signed}
        results[op_set] = policy.apply_draw(images, Draw(torch.zeros(2, dtype=torch.long), signs, {})).images
    forward = power.intensities(bright.intensities(images, strength), strength)
    backward = bright.intensities(power.intensities(images, strength), strength)
    assert torch.allclose(results["forward"], forward, atol=1e-5)
    assert torch.allclose(results["backward"], backward, atol=1e-5)
    assert (forward - backward).abs().max() > 0.01


def test_geometric_ops_come_before_intensity_ops(make_images):
    policy = make_policy("released_mri", 3)
    images = make_images(1, 32, 32)
    chosen = index_of(policy, "TranslateX", "Contrast", "Rotate")
    with torch.no_grad():
        policy.raw_magnitudes.fill_(1.0)
    draw = policy.draw((1, 1, 32, 32), "uniform")
    draw = Draw(torch.tensor([chosen]), {key: torch.ones(1) for key in draw.signs}, {})
    view = policy.apply_draw(images, draw)
    strength = torch.tensor([1.0]).sigmoid()
    shift = OPS.get("TranslateX").theta(images, strength)
    theta = warp.compose(shift, OPS.get("Rotate").theta(images, strength))
    assert torch.allclose(view.theta, theta, atol=1e-6)
    want = OPS.get("Contrast").intensities(warp.to_view(images, theta), strength)
    assert torch.allclose(view.images, want, atol=1e-5)


def test_composed_geometry_equals_warps_in_turn():
    policy = make_policy("released_mri", 3)
    rows, columns = torch.linspace(-1, 1, 48)[:, None], torch.linspace(-1, 1, 48)[None]
    images = (0.5 + 0.4 * torch.sin(2 * rows + 1) * torch.cos(2.5 * columns))[None, None]
    chosen = index_of(policy, "ShearX", "TranslateY", "Rotate")
    with torch.no_grad():
        policy.raw_magnitudes.fill_(0.6)
    for sign in (1.0, -1.0):
        draw = policy.draw((1, 1, 48, 48), "uniform")
        draw = Draw(torch.tensor([chosen]), {key: torch.full((1,), sign) for key in draw.signs}, {})
        once = policy.apply_draw(images, draw).images
        in_turn = images
        for name in ("ShearX", "TranslateY", "Rotate"):
            in_turn, _ = OPS.get(name)(in_turn, torch.tensor([0.6]).sigmoid(), torch.full((1,), sign))
        assert (once - in_turn)[..., 12:-12, 12:-12].abs().max() < 3e-3
        assert (once - images)[..., 12:-12, 12:-12].abs().max() > 0.02


def test_each_op_runs_once_a_batch(make_images):
    policy = make_policy("intensity", 3)
    calls = dict.fromkeys(range(len(policy.ops)), 0)

    def counted(position, op):
        def function(*arguments):
            calls[position] += 1
            return op.function(*arguments)

        return dataclasses.replace(op, function=function)

    policy.ops = tuple(counted(position, op) for position, op in enumerate(policy.ops))
    images = make_images(48, 12, 12)
    policy.apply_draw(images, policy.draw(tuple(images.shape), "uniform"))
    assert set(calls.values()) == {1}


def test_gradient_reaches_only_the_magnitudes_that_were_used(make_images):
    policy = make_policy("intensity", 2)
    images = make_images(6, 16, 16)
    draw = policy.draw(tuple(images.shape), "uniform")
    (policy.apply_draw(images, draw).images ** 2).sum().backward()
    touched = policy.raw_magnitudes.grad.abs().sum(dim=1) > 0
    assert torch.nonzero(touched)[:, 0].tolist() == sorted(set(draw.sub_policy.tolist()))
    assert policy.logits.grad is None


# ------------------------------------------------------------ the estimator


def exact_gradient(policy, images):
    """Gradient of sum_p P(p) loss(view by p), over all sub-policies."""
    total = torch.zeros(())
    for index in range(len(policy.sub_policies)):
        draw = Draw(torch.full((images.shape[0],), index), {}, {})
        loss = loss_of(policy.apply_draw(images, draw).images).mean()
        total = total + policy.probabilities[index] * loss
    return torch.autograd.grad(total, [policy.logits, policy.raw_magnitudes])


def loss_of(views):
    return (views**2).flatten(1).mean(dim=1) * 4 - 0.5


def estimated_gradients(policy, images, by, rounds):
    results = []
    for _ in range(rounds):
        draw = policy.draw(tuple(images.shape), by)
        value = policy.surrogate(loss_of(policy.apply_draw(images, draw).images), draw)
        results.append(torch.autograd.grad(value, [policy.logits, policy.raw_magnitudes]))
    logits, magnitudes = (torch.stack(parts).flatten(1) for parts in zip(*results, strict=True))
    return torch.cat([logits, magnitudes], dim=1)


def standard_errors(policy, images, by, rounds=200):
    exact = torch.cat([part.flatten() for part in exact_gradient(policy, images)])
    samples = estimated_gradients(policy, images, by, rounds)
    error = samples.std(dim=0) / math.sqrt(rounds)
    return (samples.mean(dim=0) - exact) / error, exact


def test_estimator_is_unbiased_when_drawn_by_probability(plain_set, make_images):
    policy = unequal(make_policy(plain_set, 2), spread=0.7)
    images = make_images(1, 8, 8).expand(64, 1, 8, 8)
    deviations, exact = standard_errors(policy, images, "probability")
    assert exact.abs().max() > 0.02
    assert deviations.abs().max() < 4


def test_estimator_is_biased_when_drawn_uniformly(plain_set, make_images):
    policy = unequal(make_policy(plain_set, 2), spread=0.7)
    images = make_images(1, 8, 8).expand(64, 1, 8, 8)
    deviations, _ = standard_errors(policy, images, "uniform")
    assert deviations.abs().max() > 10


def test_surrogate_by_hand(plain_set):
    policy = unequal(make_policy(plain_set, 1))
    losses = torch.tensor([0.5, -2.0], requires_grad=True)
    value = policy.surrogate(losses, Draw(torch.tensor([2, 0]), {}, {}))
    logits, slopes = torch.autograd.grad(value, [policy.logits, losses])
    one_hot = torch.eye(4)[[2, 0]]
    want = (losses.detach()[:, None] * (one_hot - policy.probabilities.detach())).mean(dim=0)
    assert torch.allclose(logits, want, atol=1e-6)
    assert slopes.tolist() == pytest.approx([0.5, 0.5])


def test_descent_prefers_the_sub_policy_with_the_smaller_loss(plain_set):
    policy = make_policy(plain_set, 1)
    losses = torch.tensor([0.0, -1.0, 0.0, 0.0])
    optimizer = torch.optim.Adam([policy.logits], lr=0.1)
    for _ in range(60):
        draw = policy.draw((32, 1, 4, 4), "probability")
        optimizer.zero_grad()
        policy.surrogate(losses[draw.sub_policy], draw).backward()
        optimizer.step()
    assert policy.probabilities.argmax() == 1
    assert policy.probabilities[1] > 0.6


# ------------------------------------------------------------ state


def test_state_round_trip(make_images):
    policy = unequal(make_policy())
    shape = (8, 1, 12, 12)
    policy.draw(shape, "uniform")
    saved = policy.state_dict()
    copy = make_policy(seed=9)
    copy.load_state_dict(saved)
    copy.generator.set_state(policy.generator.get_state())
    copy.noise_generator.set_state(policy.noise_generator.get_state())
    images = make_images(8, 12, 12)
    views = [item.apply_draw(images, item.draw(shape, "probability")) for item in (policy, copy)]
    assert torch.equal(views[0].images, views[1].images)
    assert torch.equal(views[0].theta, views[1].theta)
