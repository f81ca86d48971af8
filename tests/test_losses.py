"""Losses: values known by hand, the identities behind them, and finite arithmetic."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from tesla_med import losses

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {"tiles": (6, 3), "slices": (2, 3, 5, 4), "volumes": (2, 3, 2, 5, 4)}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def logits_of(*probs):
    """Logits (1, L) of one pixel with the given probabilities."""
    return torch.tensor([probs]).log()


def random_logits(shape, seed=0, scale=2.0):
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_probs(shape, seed=1):
    return random_logits(shape, seed).softmax(dim=1)


# ------------------------------------------------------------ values by hand


def test_flipped_cross_entropy_by_hand():
    value = losses.flipped_cross_entropy(logits_of(0.7, 0.3), torch.tensor([[0.6, 0.4]]))
    assert value.item() == pytest.approx(-(0.7 * math.log(0.6) + 0.3 * math.log(0.4)), abs=1e-6)


def test_flipped_cross_entropy_weighs_with_the_student():
    student, teacher = (0.9, 0.1), (0.5, 0.5)
    usual = -(0.5 * math.log(0.9) + 0.5 * math.log(0.1))
    flipped = losses.flipped_cross_entropy(logits_of(*student), torch.tensor([teacher])).item()
    assert flipped == pytest.approx(math.log(2), abs=1e-6)
    assert abs(flipped - usual) > 0.4


def test_flipped_cross_entropy_limits():
    uniform = torch.full((1, 4), 0.25)
    assert losses.flipped_cross_entropy(torch.zeros(1, 4), uniform).item() == pytest.approx(math.log(4))
    one_hot = torch.tensor([[1.0, 0.0]])
    agree = losses.flipped_cross_entropy(torch.tensor([[50.0, -50.0]]), one_hot)
    assert agree.item() == pytest.approx(0.0, abs=1e-6)
    differ = losses.flipped_cross_entropy(torch.tensor([[-50.0, 50.0]]), one_hot)
    assert differ.item() == pytest.approx(-math.log(losses.EPSILON), rel=1e-5)


@each_shape
def test_flipped_cross_entropy_is_conditional_entropy_plus_divergence(shape):
    logits, labels = random_logits(shape).double(), random_probs(shape).double()
    probs = logits.softmax(dim=1)
    entropy = -(probs * probs.log()).sum(dim=1).mean()
    divergence = (probs * (probs.log() - labels.log())).sum(dim=1).mean()
    value = losses.flipped_cross_entropy(logits, labels)
    assert value.item() == pytest.approx((entropy + divergence).item(), abs=1e-6)


def test_class_marginal_limits():
    certain = torch.tensor([[60.0, -60.0, -60.0], [-60.0, 60.0, -60.0], [-60.0, -60.0, 60.0]])
    assert losses.class_marginal(torch.zeros(2, 3, 4, 4)).item() == pytest.approx(-math.log(3), abs=1e-6)
    assert losses.class_marginal(certain).item() == pytest.approx(-math.log(3), abs=1e-6)
    assert losses.class_marginal(certain[:2]).item() == pytest.approx(-math.log(2), abs=1e-6)
    assert losses.class_marginal(certain[:1]).item() == pytest.approx(0.0, abs=1e-6)


def test_class_marginal_by_hand_is_over_batch_and_pixels():
    first, second = logits_of(0.9, 0.1), logits_of(0.5, 0.5)
    logits = torch.stack([first, second], dim=2)  # one image of two pixels
    want = 0.7 * math.log(0.7) + 0.3 * math.log(0.3)
    assert losses.class_marginal(logits).item() == pytest.approx(want, abs=1e-6)
    assert losses.class_marginal(torch.cat([first, second])).item() == pytest.approx(want, abs=1e-6)


def test_class_marginal_against_a_prior_by_hand():
    prior = torch.tensor([0.8, 0.2])
    want = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert losses.class_marginal(torch.zeros(3, 2, 4), prior).item() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_class_marginal_against_a_prior_is_a_divergence(seed):
    logits = random_logits((2, 4, 6, 5), seed)
    other = random_probs((1, 4), seed + 50)[0]
    own = logits.softmax(dim=1).mean(dim=(0, 2, 3))
    assert losses.class_marginal(logits, own).item() == pytest.approx(0.0, abs=1e-6)
    assert losses.class_marginal(logits, other).item() > 1e-4


def test_class_marginal_with_a_prior_that_lacks_a_class():
    value = losses.class_marginal(torch.zeros(1, 2, 3), torch.tensor([1.0, 0.0]))
    assert value.item() == pytest.approx(math.log(0.5) - 0.5 * math.log(losses.EPSILON), rel=1e-5)


def test_distillation_by_hand():
    value = losses.distillation(logits_of(0.7, 0.3), torch.tensor([[0.6, 0.4]]))
    assert value.item() == pytest.approx(0.6 * math.log(0.6 / 0.7) + 0.4 * math.log(0.4 / 0.3), abs=1e-6)


def test_distillation_of_one_hot_labels_is_cross_entropy():
    logits = random_logits((4, 3, 5, 5))
    index = torch.randint(3, (4, 5, 5), generator=torch.Generator().manual_seed(2))
    labels = torch.nn.functional.one_hot(index, 3).permute(0, 3, 1, 2).float()
    want = torch.nn.functional.cross_entropy(logits, index)
    assert losses.distillation(logits, labels).item() == pytest.approx(want.item(), rel=1e-5)


@each_shape
def test_distillation_is_zero_only_at_the_labels(shape):
    logits = random_logits(shape)
    assert losses.distillation(logits, logits.softmax(dim=1)).item() == pytest.approx(0.0, abs=1e-6)
    assert losses.distillation(logits, random_probs(shape)).item() > 0.1


# ------------------------------------------------------------ shapes, weights, gradients

PIXELWISE = [losses.flipped_cross_entropy, losses.distillation]
each_pixelwise = pytest.mark.parametrize("loss", PIXELWISE, ids=lambda loss: loss.__name__)


@each_pixelwise
def test_pixels_and_tiles_share_the_loss(loss):
    logits, labels = random_logits((2, 3, 2, 5, 4)), random_probs((2, 3, 2, 5, 4))
    whole = loss(logits, labels).item()

    def tiles(values):
        return values.movedim(1, -1).reshape(-1, 3)

    assert loss(tiles(logits), tiles(labels)).item() == pytest.approx(whole, rel=1e-5)
    assert loss(logits.flatten(2, 3), labels.flatten(2, 3)).item() == pytest.approx(whole, rel=1e-5)
    assert losses.class_marginal(tiles(logits)).item() == pytest.approx(
        losses.class_marginal(logits).item(), rel=1e-5
    )


@each_pixelwise
def test_pixel_weight_selects_pixels(loss):
    logits, labels = random_logits((2, 3, 4, 4)), random_probs((2, 3, 4, 4))
    weight = torch.zeros(2, 4, 4)
    weight[:, :, :2] = 2.5
    half = loss(logits[..., :2], labels[..., :2]).item()
    assert loss(logits, labels, weight).item() == pytest.approx(half, rel=1e-5)
    assert abs(half - loss(logits, labels).item()) > 1e-3
    everywhere = loss(logits, labels, torch.full((2, 4, 4), 3.0)).item()
    assert everywhere == pytest.approx(loss(logits, labels).item(), rel=1e-5)


@each_pixelwise
def test_pixel_weight_by_hand(loss):
    logits, labels = random_logits((1, 2, 2)), random_probs((1, 2, 2))
    one, two = (loss(logits[..., [i]], labels[..., [i]]).item() for i in range(2))
    value = loss(logits, labels, torch.tensor([[1.0, 3.0]])).item()
    assert value == pytest.approx((one + 3 * two) / 4, rel=1e-5)


@each_pixelwise
def test_no_weight_anywhere_is_zero(loss):
    value = loss(random_logits((1, 2, 3)), random_probs((1, 2, 3)), torch.zeros(1, 3))
    assert value.item() == 0.0


@each_pixelwise
def test_no_gradient_flows_into_the_labels(loss):
    logits = random_logits((2, 3, 4)).requires_grad_()
    source = random_logits((2, 3, 4), 7).requires_grad_()
    loss(logits, source.softmax(dim=1)).backward()
    assert source.grad is None
    assert logits.grad.abs().sum() > 0


@each_pixelwise
def test_gradient_by_central_differences(loss):
    logits, labels = random_logits((2, 3, 2)), random_probs((2, 3, 2))
    logits.requires_grad_()
    loss(logits, labels).backward()
    step = 1e-2
    for index in [(0, 0, 0), (1, 2, 1), (0, 1, 1)]:
        shift = torch.zeros_like(logits)
        shift[index] = step
        slope = (loss(logits + shift, labels) - loss(logits - shift, labels)).item() / (2 * step)
        assert logits.grad[index].item() == pytest.approx(slope, abs=2e-4)


# ------------------------------------------------------------ extreme values and autocast


@pytest.mark.parametrize("prior", [None, torch.tensor([0.6, 0.3, 0.1])])
def test_a_class_of_exactly_no_mass_has_a_finite_gradient(prior):
    logits = torch.tensor([[300.0, -300.0, 299.0], [300.0, -300.0, 298.0]], requires_grad=True)
    assert (logits.softmax(dim=1)[:, 1] == 0).all()
    value = losses.class_marginal(logits, prior)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.abs().max() > 0.01


CASTS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("name", ["flipped", "distillation", "marginal", "prior", "entropy"])
def test_extreme_logits_stay_finite(name, cast):
    logits = torch.tensor([[200.0, -200.0, 0.0], [-200.0, 200.0, 200.0], [0.0, 0.0, 0.0]])
    logits = logits[:, :, None, None].expand(3, 3, 2, 2).clone().requires_grad_()
    labels = torch.eye(3)[[1, 2, 0]][:, :, None, None].expand(3, 3, 2, 2)
    block = torch.autocast("cpu", dtype=cast) if cast else nullcontext()
    functions = {
        "flipped": lambda given: losses.flipped_cross_entropy(given, labels),
        "distillation": lambda given: losses.distillation(given, labels),
        "marginal": losses.class_marginal,
        "prior": lambda given: losses.class_marginal(given, torch.tensor([1.0, 0.0, 0.0])),
        "entropy": lambda given: losses.negative_entropy(given.softmax(dim=1)).mean(),
    }
    with block:
        value = functions[name](logits.to(cast) if cast else logits)
    value.backward()
    assert value.dtype == torch.float32
    assert torch.isfinite(value)
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@each_pixelwise
def test_half_precision_inputs_are_summed_in_float32(loss, dtype):
    logits = random_logits((2, 3, 96, 96)).to(dtype)
    labels = random_probs((2, 3, 96, 96)).to(dtype)
    block = torch.autocast("cpu", dtype=dtype)
    with block:
        value, marginal = loss(logits, labels), losses.class_marginal(logits)
    assert value.item() == pytest.approx(loss(logits.double(), labels.double()).item(), rel=1e-5)
    assert marginal.item() == pytest.approx(losses.class_marginal(logits.double()).item(), rel=1e-5)


SIDE = 512  # so many pixels that their sum is beyond the range of float16
SURE = torch.tensor([8.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, SIDE, SIDE)
WRONG = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, SIDE, SIDE)
SUMMED = {
    "flipped": losses.flipped_cross_entropy,
    "weighted": lambda logits, labels: losses.flipped_cross_entropy(
        logits, labels, torch.ones(1, SIDE, SIDE, dtype=logits.dtype)
    ),
    "marginal": lambda logits, _: losses.class_marginal(logits),
    "distillation": losses.distillation,
    "entropy": lambda logits, _: losses.negative_entropy(logits.softmax(1)),
}


def test_the_sum_in_half_precision_would_overflow():
    assert torch.isinf(torch.ones(SIDE, SIDE, dtype=torch.float16).sum(dtype=torch.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SUMMED)
def test_sums_of_half_precision_do_not_overflow(name, dtype):
    loss = SUMMED[name]
    value = loss(SURE.to(dtype), WRONG.to(dtype))
    assert value.dtype == torch.float32
    # The inputs are exact in half precision; only the entropy gets probabilities that were rounded.
    relative, absolute = (0.02, 2e-3) if name == "entropy" else (1e-5, 1e-6)
    assert torch.allclose(value, loss(SURE, WRONG), rtol=relative, atol=absolute)


# ------------------------------------------------------------ certain pixels

CERTAIN = torch.tensor([[200.0, -200.0], [-200.0, 200.0]])[:, :, None, None]
LABELS = torch.tensor([[1.0, 0.0], [1.0, 0.0]])[:, :, None, None]
OF_CERTAIN = {
    "flipped": lambda logits: losses.flipped_cross_entropy(logits, LABELS),
    "marginal": losses.class_marginal,
    "marginal with prior": lambda logits: losses.class_marginal(logits, torch.tensor([1.0, 0.0])),
    "distillation": lambda logits: losses.distillation(logits, LABELS),
    "negative entropy": lambda logits: losses.negative_entropy(logits.softmax(1)).mean(),
    "normalised entropy": lambda logits: losses.normalised_entropy(logits.softmax(1)).mean(),
}


@pytest.mark.parametrize("loss", OF_CERTAIN.values(), ids=OF_CERTAIN)
def test_loss_and_gradient_of_a_certain_pixel_are_finite(loss):
    logits = CERTAIN.clone().requires_grad_()
    value = loss(logits)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logits.grad).all()


def test_a_certain_mistake_still_teaches():
    logits = CERTAIN.clone().requires_grad_()
    losses.distillation(logits, LABELS).backward()
    assert logits.grad[1].abs().max() > 0.4
    assert losses.distillation(CERTAIN, LABELS) == pytest.approx(200.0)


# ------------------------------------------------------------ entropies


def test_negative_entropy_by_hand():
    probs = torch.tensor([[[0.5, 1.0], [0.5, 0.0]], [[0.25, 0.0], [0.75, 0.0]]])
    want = [0.5 * math.log(0.5), 0.5 * (0.25 * math.log(0.25) + 0.75 * math.log(0.75))]
    assert losses.negative_entropy(probs).tolist() == pytest.approx(want, abs=1e-6)


@each_shape
def test_negative_entropy_is_one_value_an_image(shape):
    values = losses.negative_entropy(random_probs(shape))
    assert values.shape == (shape[0],)
    assert (values < 0).all()
    assert (values >= -math.log(3)).all()


def test_normalised_entropy():
    probs = torch.tensor([[[0.25, 1.0, 0.5]] + [[0.25, 0.0, 0.5]] + [[0.25, 0.0, 0.0]] * 2])
    assert losses.normalised_entropy(probs)[0].tolist() == pytest.approx([1.0, 0.0, 0.5], abs=1e-6)


@each_shape
def test_normalised_entropy_drops_the_class_axis(shape):
    values = losses.normalised_entropy(random_probs(shape))
    assert values.shape == (shape[0], *shape[2:])
    assert ((values >= 0) & (values <= 1)).all()


def test_plain_cross_entropy_is_torchs_with_soft_targets():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 5, 6, generator=generator, requires_grad=True)
    labels = torch.randn(3, 4, 5, 6, generator=generator).softmax(dim=1).requires_grad_(True)
    value = losses.cross_entropy(logits, labels)
    assert value.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    value.backward()
    assert labels.grad is None
    weight = torch.zeros(3, 5, 6)
    weight[0] = 1.0
    alone = losses.cross_entropy(logits[:1], labels[:1])
    assert losses.cross_entropy(logits, labels, weight).item() == pytest.approx(alone.item(), rel=1e-5)
    flipped = losses.flipped_cross_entropy(logits, labels)
    assert abs(flipped.item() - value.item()) > 1e-3


def test_pixels_without_weight_do_not_count():
    """A weight of 0 and 1 is as if the pixels without one were not there."""
    logits, labels = (
        torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(4)),
        random_probs((2, 3, 6, 5)),
    )
    weight = torch.zeros(2, 6, 5)
    weight[:, :4] = 1
    part, soft = logits[:, :, :4], labels[:, :, :4]
    hard = labels.argmax(1)
    pairs = [
        (losses.entropy(logits, weight), losses.entropy(part)),
        (losses.class_marginal(logits, pixel_weight=weight), losses.class_marginal(part)),
        (losses.class_shares(labels, weight).sum(), losses.class_shares(soft).sum()),
        (losses.label_cross_entropy(logits, hard, weight), losses.label_cross_entropy(part, hard[:, :4])),
        (losses.label_cross_entropy(logits, labels, weight), losses.label_cross_entropy(part, soft)),
    ]
    for found, want in pairs:
        assert found.item() == pytest.approx(want.item(), rel=1e-5)
    assert torch.allclose(losses.negative_entropy(labels, weight), losses.negative_entropy(soft))
    nothing = torch.zeros_like(weight)
    assert losses.entropy(logits, nothing).item() == 0
    assert losses.negative_entropy(labels, nothing).eq(0).all()


def test_pixels_that_are_left_out_count_as_background_that_was_found():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 6, 6, generator=generator, requires_grad=True)
    labels = torch.randint(3, (2, 6, 6), generator=generator)
    left_out = torch.rand(2, 6, 6, generator=generator) < 0.4
    value = losses.supervised(logits, labels, left_out)
    value.backward()
    assert logits.grad.movedim(1, -1)[left_out].abs().max() == 0
    assert logits.grad.movedim(1, -1)[~left_out].abs().max() > 0
    assert torch.equal(losses.supervised(logits, torch.where(left_out, 1, labels), left_out), value)
    certain = 30 * torch.nn.functional.one_hot(torch.where(left_out, 0, labels), 3).movedim(-1, 1).float()
    elsewhere = torch.where(left_out[:, None], -certain, certain)
    assert float(losses.supervised(certain, labels, left_out)) < 0.01
    assert float(losses.supervised(elsewhere, labels, left_out)) < 0.01  # whatever was found there


def test_regions_have_marginals_of_their_own():
    """The mean over regions of the term that each has alone; together they would be one share."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, 3, 5, 4, generator=generator)
    weight = torch.rand(2, 3, 5, 4, generator=generator)
    for given in (None, weight):
        alone = [
            losses.class_marginal(logits[:, :, region], None, None if given is None else given[:, region])
            for region in range(3)
        ]
        found = losses.class_marginal(logits, None, given, apart=True)
        assert torch.allclose(found, torch.stack(alone).mean())
        assert not torch.allclose(found, losses.class_marginal(logits, None, given))
    shares = losses.class_shares(logits.softmax(1), apart=True)
    assert shares.shape == (2, 3)
    assert losses.class_marginal(logits, shares, apart=True).abs() < 1e-6
