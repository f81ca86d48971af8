"""Static augmentation: RandAugment, AutoAugment and none."""

from __future__ import annotations

import copy

import pytest
import torch

from tesla_med.augment import warp
from tesla_med.augment.ops import OP_SETS, OPS
from tesla_med.augment.policy import View
from tesla_med.augment.static import (
    IMAGENET,
    UNUSED,
    AutoAugment,
    RandAugment,
    StaticDraw,
    StaticPolicy,
    magnitude_of,
)
from tesla_med.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")

STATIC = ("randaugment", "autoaugment", "none")
QUICK = {"batch_slices": 4, "weak_views": 2, "policy_size": 2}


def generators(seed=0):
    return torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)


def make_policy(kind, seed=0, op_set="mri", size=2, strength=0.5):
    if kind == "randaugment":
        return RandAugment(op_set, size, strength, *generators(seed))
    if kind == "autoaugment":
        return AutoAugment(*generators(seed))
    return StaticPolicy((), *generators(seed))


def made_by(ops, strengths, signs=None):
    """Return a policy of exactly these ops and the draw that applies them to one image in order."""
    policy = StaticPolicy(tuple(ops), *generators())
    given = torch.ones(1, len(ops)) if signs is None else torch.tensor([signs], dtype=torch.float32)
    return policy, StaticDraw(torch.arange(len(ops))[None], torch.tensor([strengths]), given, {})


# ------------------------------------------------------------ magnitudes


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.identity is not None])
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_strength_zero_is_the_identity_and_one_an_end_of_the_range(name, side, make_images):
    op, images, sign = OPS.get(name), make_images(1, channels=3), torch.tensor([side])
    assert magnitude_of(op, torch.zeros(1), sign).item() == pytest.approx(op.identity)
    assert magnitude_of(op, torch.ones(1), sign).item() in (0.0, 1.0)
    policy, draw = made_by([name], [0.0], [side])
    assert torch.allclose(policy.apply_draw(images, draw).images, images, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.identity == 0.5 and not op.signed])
def test_ops_without_a_sign_of_their_own_go_either_way(name):
    op, half = OPS.get(name), torch.full((1,), 0.5)
    assert magnitude_of(op, half, torch.ones(1)).item() == pytest.approx(0.75)
    assert magnitude_of(op, half, -torch.ones(1)).item() == pytest.approx(0.25)


def test_stronger_is_fewer_bits_and_a_lower_threshold(make_images):
    images = make_images(1)

    def one(name, strength):
        policy, draw = made_by([name], [strength])
        return policy.apply_draw(images, draw).images

    bits = [len(one("Posterize", strength).unique()) for strength in (0.0, 0.5, 1.0)]
    assert bits[0] > bits[1] > bits[2]
    assert bits[2] <= 16
    inverted = [(one("Solarize", strength) != images).float().mean() for strength in (0.2, 0.6, 0.95)]
    assert inverted[0] < inverted[1] < inverted[2]


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "TranslateY", "MildScale"])
def test_signs_turn_the_displacement_round(name):
    images = torch.rand(1, 1, 16, 16)
    thetas = []
    for side in (1.0, -1.0):
        policy, draw = made_by([name], [0.8], [side])
        thetas.append(policy.apply_draw(images, draw).theta)
    assert (thetas[0] - thetas[1]).abs().max() > 0.05
    assert torch.allclose(warp.compose(*thetas), torch.eye(2, 3)[None], atol=1e-5)


# ------------------------------------------------------------ draws


def test_randaugment_draws_every_op_alike_and_with_replacement():
    policy = make_policy("randaugment", size=3)
    draw = policy.draw((20000, 1, 4, 4))
    assert draw.ops.shape == (20000, 3)
    share = torch.bincount(draw.ops.flatten(), minlength=len(policy.ops)) / draw.ops.numel()
    assert torch.allclose(share, torch.full_like(share, 1 / len(policy.ops)), atol=0.005)
    repeated = (draw.ops[:, 0] == draw.ops[:, 1]).float().mean()
    assert repeated.item() == pytest.approx(1 / len(policy.ops), abs=0.01)
    assert set(draw.strengths.unique().tolist()) == {0.5}
    assert draw.signs.mean().abs() < 0.02
    assert [op.name for op in policy.ops] == list(OP_SETS["mri"])


def test_the_table_of_autoaugment():
    assert len(IMAGENET) == 25
    for sub_policy in IMAGENET:
        assert len(sub_policy) == 2
        for name, probability, level in sub_policy:
            assert name in OPS.names()
            assert 0 <= probability <= 1
            assert level in range(10)


def test_the_table_of_autoaugment_is_the_published_one():
    transforms = pytest.importorskip("torchvision.transforms")
    theirs = transforms.AutoAugment(transforms.AutoAugmentPolicy.IMAGENET).policies
    for ours, published in zip(IMAGENET, theirs, strict=True):
        for (name, probability, level), (their_name, their_probability, their_level) in zip(
            ours, published, strict=True
        ):
            assert (name, probability) == (their_name, their_probability)
            assert their_level is None or level == their_level


def test_autoaugment_applies_its_ops_as_often_as_published():
    policy = make_policy("autoaugment")
    draw = policy.draw((40000, 1, 4, 4))
    for position, op in enumerate(policy.ops):
        want = sum(p for pair in IMAGENET for name, p, _ in pair if name == op.name) / len(IMAGENET)
        assert (draw.ops == position).sum().item() / 40000 == pytest.approx(want, abs=0.015), op.name
    pairs = {tuple(sorted(name for name, _, _ in pair)) for pair in IMAGENET}
    names = [op.name for op in policy.ops]
    for row in draw.ops.unique(dim=0).tolist():
        if UNUSED not in row:
            assert tuple(sorted(names[position] for position in row)) in pairs
    rotated = draw.strengths[draw.ops == names.index("Rotate")].unique()
    assert torch.allclose(rotated, torch.tensor([3.0, 8.0, 9.0]) / 9)


@pytest.mark.parametrize("kind", STATIC)
def test_draws_come_from_the_given_generators(kind, make_images):
    images = make_images(8)
    one, two, other = make_policy(kind), make_policy(kind), make_policy(kind, seed=5)
    views = []
    for policy in (one, two, other):
        torch.rand(3)  # the global generator does not matter
        views.append(policy.apply_draw(images, policy.draw(tuple(images.shape), "probability")))
    assert torch.equal(views[0].images, views[1].images)
    assert torch.equal(views[0].theta, views[1].theta)
    assert torch.equal(views[0].images, views[2].images) == (kind == "none")


@pytest.mark.parametrize(("op_set", "size"), [("mri", 0), ("mri", 17), ("nothing", 2)])
def test_wrong_parameters(op_set, size):
    with pytest.raises(ConfigError, match="op set 'nothing'" if op_set == "nothing" else "1 to 16"):
        make_policy("randaugment", op_set=op_set, size=size)


# ------------------------------------------------------------ views


@pytest.mark.parametrize("kind", STATIC)
@pytest.mark.parametrize(("count", "channels"), [(1, 1), (6, 1), (5, 3)])
def test_views(kind, count, channels, make_images):
    images = make_images(count, 20, 23, channels)
    kept = images.clone()
    for op_set in OP_SETS:
        policy = make_policy(kind, op_set=op_set, strength=1.0)
        view = policy.apply_draw(images, policy.draw(tuple(images.shape), "uniform"))
        assert isinstance(view, View)
        assert view.images.shape == images.shape
        assert view.theta.shape == (count, 2, 3)
        assert torch.isfinite(view.images).all()
        assert 0 <= view.images.min() <= view.images.max() <= 1
    assert torch.equal(images, kept)


def test_none_is_the_clean_image(make_images):
    images = make_images(3)
    policy = make_policy("none")
    view = policy.apply_draw(images, policy.draw(tuple(images.shape), "probability"))
    assert torch.equal(view.images, images)
    assert torch.equal(view.theta, torch.eye(2, 3).expand(3, 2, 3))


def test_a_view_is_its_ops_one_after_another(make_images):
    images = make_images(1, channels=3)
    policy, draw = made_by(["Rotate", "Contrast", "ShearX", "Invert"], [0.6, 0.5, 0.4, 1.0], [1, -1, -1, 1])
    view = policy.apply_draw(images, draw)
    thetas = [
        OPS.get(name).theta(images, torch.tensor([magnitude]), torch.tensor([sign]))
        for name, magnitude, sign in (("Rotate", 0.8, 1.0), ("ShearX", 0.7, -1.0))
    ]
    theta = warp.compose(*thetas)
    want = warp.to_view(images, theta).clamp(0, 1)
    want = 1 - OPS.get("Contrast").intensities(want, torch.tensor([0.25]))
    assert torch.allclose(view.theta, theta, atol=1e-6)
    assert torch.allclose(view.images, want, atol=1e-5)
    reverse, other = made_by(["Solarize", "Contrast"], [0.6, 0.9], [1, -1])
    forward = reverse.apply_draw(images, other).images
    assert (forward - reverse.apply_draw(images, flipped(other)).images).abs().max() > 0.01


def flipped(draw):
    """Return the draw with its slots in the other order."""
    return StaticDraw(draw.ops.flip(1), draw.strengths.flip(1), draw.signs.flip(1), {})


@pytest.mark.parametrize("kind", ["randaugment", "autoaugment"])
def test_a_batch_is_its_images_one_by_one(kind, make_images):
    images = make_images(6)
    policy = make_policy(kind, op_set="released_mri")
    draw = policy.draw(tuple(images.shape), "uniform")
    together = policy.apply_draw(images, draw)
    for row in range(6):
        part = slice(row, row + 1)
        alone = policy.apply_draw(
            images[part], StaticDraw(draw.ops[part], draw.strengths[part], draw.signs[part], {})
        )
        assert torch.allclose(alone.images, together.images[part], atol=1e-6)
        assert torch.allclose(alone.theta, together.theta[part], atol=1e-6)


# ------------------------------------------------------------ in TeSLA


@pytest.mark.parametrize("augment", STATIC)
def test_tesla_learns_from_them_and_takes_no_policy_step(augment, make_tta, make_images):
    method, images = make_tta("tesla", augment=augment, **QUICK), make_images(4)
    before = [value.clone() for value in method.student.parameters()]
    scalars = method.adapt(images)
    assert set(scalars) == {"loss/flipped_cross_entropy", "loss/class_marginal", "loss/distillation"}
    assert scalars["loss/distillation"] > 0
    assert any(not torch.equal(*pair) for pair in zip(before, method.student.parameters(), strict=True))
    assert "policy" not in method.optimizers()
    assert list(method.policy.parameters()) == []
    assert method.record() == {}
    learned = make_tta("tesla", **QUICK)
    assert method.passes(8) == learned.passes(8) - 2 * 8


@pytest.mark.parametrize("augment", STATIC)
def test_tesla_repeats_resets_and_resumes_with_them(augment, make_tta, make_images, same_state):
    images = make_images(4)
    method, other = (make_tta("tesla", augment=augment, seed=seed, **QUICK) for seed in (0, 7))
    initial = method.state_dict()
    method.adapt(images)
    middle = method.state_dict()
    method.adapt(images)
    first = method.predict(images)
    other.load_state_dict(middle)
    other.adapt(images)
    assert torch.equal(other.predict(images), first)
    method.reset()
    assert same_state(initial, method.state_dict())
    for _ in range(2):
        method.adapt(images)
    assert torch.equal(method.predict(images), first)


def test_none_distils_the_clean_images(make_tta, make_images):
    method, images = make_tta("tesla", augment="none", **QUICK), make_images(4)
    labels, _ = method._pseudo_labels(images)
    student = copy.deepcopy(method.student).train()
    result = method._distil(images, labels)
    log_probs = student(2 * images - 1).log_softmax(dim=1)
    want = (labels * (labels.clamp_min(1e-9).log() - log_probs)).sum(dim=1).mean()
    assert result.item() == pytest.approx(want.item(), rel=1e-3)


def test_the_magnitude_of_randaugment_matters(make_tta, make_images):
    images = make_images(4)
    params = QUICK | {"augment": "randaugment", "op_set": "released_mri"}
    still, strong = (make_tta("tesla", static_magnitude=value, **params) for value in (0.0, 1.0))
    for method in (still, strong):
        method.adapt(images)
    assert not torch.equal(still.predict(images), strong.predict(images))
    with pytest.raises(ConfigError, match="static_magnitude"):
        make_tta("tesla", static_magnitude=1.5, **params)
