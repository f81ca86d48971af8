"""Temperature scaling, and a temperature chosen from agreement across styles."""

from __future__ import annotations

import math

import pytest
import torch

from tesla_med.engine import recalibration
from tesla_med.engine.outcome import Outcome
from tesla_med.engine.recalibration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    fit_temperature_to_masks,
    recalibrated,
    scale_temperature,
    style_agreement,
    style_region,
)
from tesla_med.errors import DataError
from tesla_med.types import Verdict

TEMPERATURES = (LOWEST_TEMPERATURE, 0.8, 1.0, 1.7, HIGHEST_TEMPERATURE)


def drawn(seed=0, shape=(2, 3, 12, 10), sharpness=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(sharpness * torch.randn(shape, generator=generator), dim=1)


def flipped(mask, share, seed=0):
    """Return a two-class mask with exactly this share of pixels changed, rounded."""
    order = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(seed))
    changed = mask.flatten().clone()
    chosen = order[: round(share * mask.numel())]
    changed[chosen] = 1 - changed[chosen]
    return changed.view_as(mask)


def two_classes(confidence, shape=(1, 20, 20), foreground=1.0):
    """Return probabilities of one confidence everywhere and the mask that they give."""
    mask = (torch.rand(shape, generator=torch.Generator().manual_seed(3)) < foreground).long()
    first = torch.where(mask == 1, 1 - confidence, confidence)
    return torch.stack([first, 1 - first], dim=1), mask


# ---------------------------------------------------------------- scaling


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("classes", [1, 2, 5])
def test_scaling_equals_the_softmax_of_scaled_logits(classes, temperature):
    logits = 4 * torch.randn((3, classes, 9, 7), generator=torch.Generator().manual_seed(1))
    scaled = scale_temperature(torch.softmax(logits, dim=1), temperature)
    assert scaled.dtype == torch.float32
    assert torch.allclose(scaled, torch.softmax(logits / temperature, dim=1), atol=2e-6)
    assert torch.allclose(scaled.sum(dim=1), torch.ones(3, 9, 7), atol=1e-6)


def test_scaling_by_hand():
    probs = torch.tensor([0.8, 0.2]).view(1, 2, 1, 1)
    assert scale_temperature(probs, 2.0).flatten().tolist() == pytest.approx([2 / 3, 1 / 3])
    assert scale_temperature(probs, 0.5).flatten().tolist() == pytest.approx([16 / 17, 1 / 17])
    assert scale_temperature(probs, 1.0).flatten().tolist() == pytest.approx([0.8, 0.2])


@pytest.mark.parametrize("temperature", [1e-3, *TEMPERATURES, 1e3])
def test_no_pixel_changes_its_class(temperature):
    probs = drawn(shape=(4, 3, 64, 64))
    assert torch.equal(scale_temperature(probs, temperature).argmax(dim=1), probs.argmax(dim=1))


@pytest.mark.parametrize("temperature", [1e-3, *TEMPERATURES, 1e3])
def test_classes_that_rounding_would_make_equal_keep_their_order(temperature):
    # the second class leads by the least that float32 can tell: a tie would go to the first
    half = torch.tensor(0.5)
    pairs = [(torch.nextafter(half, torch.tensor(0.0)), half), (half, half)]
    probs = torch.stack([torch.stack(pair) for pair in pairs], dim=1).view(1, 2, 1, 2)
    scaled = scale_temperature(probs, temperature)
    assert scaled.argmax(dim=1).flatten().tolist() == [1, 0]
    assert torch.allclose(scaled.sum(dim=1), torch.ones(1, 1, 2))


@pytest.mark.parametrize("temperature", [1e-3, *TEMPERATURES, 1e3])
def test_zero_and_one_stay(temperature):
    probs = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.3, 0.7, 0.0]]).T.view(1, 3, 3, 1)
    scaled = scale_temperature(probs, temperature)[0, :, :, 0].T
    assert torch.isfinite(scaled).all()
    assert scaled[0].tolist() == [1.0, 0.0, 0.0]
    assert scaled[1].tolist() == [0.0, 0.5, 0.5]
    assert scaled[2, 2] == 0.0


def test_half_precision_is_scaled_in_float32():
    probs = drawn().bfloat16()
    scaled = scale_temperature(probs, 2.0)
    assert scaled.dtype == torch.float32
    assert torch.allclose(scaled.sum(dim=1), torch.ones(2, 12, 10), atol=1e-6)
    assert torch.equal(scaled.argmax(dim=1), probs.argmax(dim=1))


def test_scaling_leaves_its_input_alone_and_accepts_no_slices():
    probs = drawn()
    before = probs.clone()
    scale_temperature(probs, 3.0)
    assert torch.equal(probs, before)
    assert scale_temperature(probs[:0], 3.0).shape == (0, 3, 12, 10)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, 1e-4, 1e4])
def test_a_temperature_out_of_range_is_refused(temperature):
    with pytest.raises(DataError, match=r"temperature must lie in \[0.001, 1000\]"):
        scale_temperature(drawn(), temperature)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p[0], r"must be \(N, L, H, W\)"),
        (lambda p: p[:, :0], "at least one class"),
        (lambda p: p * 0.8, "sum to 1"),
        (lambda p: p * 3, r"\[0, 1\].*not logits"),
        (lambda p: p.log(), r"\[0, 1\].*not logits"),
        (lambda p: p.masked_fill(p == p.max(), math.nan), r"\[0, 1\]"),
        (lambda p: p.masked_fill(p == p.max(), math.inf), r"\[0, 1\]"),
        (lambda p: p * 0, "sum to 1"),
    ],
)
def test_what_is_no_probability_is_refused(change, words):
    good = drawn()
    for call in (
        lambda bad: scale_temperature(bad, 2.0),
        lambda bad: fit_temperature_to_masks(bad, [good.argmax(dim=1)]),
    ):
        with pytest.raises(DataError, match=words):
            call(change(good))


# ---------------------------------------------------------------- region and agreement


@pytest.mark.parametrize("dilation", [0, 1, 3])
def test_region_is_a_disc_about_every_foreground_within_slices(dilation):
    masks = [torch.zeros((3, 15, 13), dtype=torch.long) for _ in range(2)]
    centres = ((0, 0, 7, 6), (1, 0, 7, 7), (1, 2, 0, 12))
    for number, *place in centres:
        masks[number][tuple(place)] = number + 1
    expected = torch.zeros((3, 15, 13), dtype=torch.bool)
    for _, index, row, column in centres:
        for i in range(15):
            for j in range(13):
                expected[index, i, j] |= (i - row) ** 2 + (j - column) ** 2 <= dilation**2
    assert torch.equal(style_region(masks, dilation), expected)
    assert not style_region(masks, dilation)[1].any()


def test_region_is_that_of_calibration():
    from tesla_med.scoring.areas import calibration_region

    masks = [drawn(seed).argmax(dim=1) * (torch.rand(2, 12, 10) > 0.97) for seed in range(2)]
    expected = calibration_region(*(mask.numpy() for mask in masks), dilation=3, slice_axis=0)
    assert style_region(masks).numpy().tolist() == expected.tolist()


def test_region_refuses_what_does_not_fit():
    mask = torch.zeros((1, 4, 4), dtype=torch.long)
    assert not style_region([mask]).any()
    assert style_region([mask[:0]]).shape == (0, 4, 4)
    with pytest.raises(DataError, match="at least one mask"):
        style_region([])
    with pytest.raises(DataError, match="one shape"):
        style_region([mask, mask[:, :3]])
    with pytest.raises(DataError, match="one shape"):
        style_region([mask[0]])
    with pytest.raises(DataError, match="at least 0"):
        style_region([mask], -1)


def test_agreement_by_hand():
    mask, first, second = (
        torch.tensor([[row]]) for row in ([0, 1, 1, 2, 0], [0, 1, 0, 2, 1], [1, 1, 1, 0, 1])
    )
    region = torch.tensor([[[True, True, True, True, False]]])
    assert style_agreement(mask, [first], region) == 0.75
    assert style_agreement(mask, [first, second], region) == pytest.approx((3 + 2) / 8)
    assert style_agreement(mask, [mask], region) == 1.0
    assert style_agreement(mask, [first], region & False) is None
    with pytest.raises(DataError, match="at least one"):
        style_agreement(mask, [], region)
    with pytest.raises(DataError, match="one shape"):
        style_agreement(mask, [first[..., :3]], region)


# ---------------------------------------------------------------- the choice of T


@pytest.mark.parametrize("share", [0.1, 0.2, 0.3])
def test_the_temperature_is_the_one_of_the_closed_form(share):
    # one confidence c everywhere: c^(1/T) / (c^(1/T) + (1 - c)^(1/T)) = a has one solution
    confidence = 0.95
    probs, mask = two_classes(confidence)
    found = fit_temperature_to_masks(probs, [flipped(mask, share)])
    agreement = 1 - share
    expected = math.log(confidence / (1 - confidence)) / math.log(agreement / (1 - agreement))
    assert found.agreement == pytest.approx(agreement)
    assert found.confidence == pytest.approx(confidence)
    assert found.temperature == pytest.approx(expected, rel=1e-4)
    assert found.pixels == mask.numel()


def test_confidence_after_scaling_is_the_agreement():
    probs = drawn(shape=(3, 3, 24, 24))
    mask = probs.argmax(dim=1)
    moved = torch.where(torch.rand(mask.shape, generator=torch.Generator().manual_seed(5)) < 0.3, 0, mask)
    found = fit_temperature_to_masks(probs, [moved, mask])
    region = style_region([mask, moved])
    assert LOWEST_TEMPERATURE < found.temperature < HIGHEST_TEMPERATURE
    scaled = scale_temperature(probs, found.temperature)
    assert float(scaled.amax(dim=1)[region].mean()) == pytest.approx(found.agreement, abs=1e-5)


def test_over_confident_above_one_and_under_confident_below():
    probs, mask = two_classes(0.9)
    assert fit_temperature_to_masks(probs, [flipped(mask, 0.2)]).temperature > 1.2
    assert fit_temperature_to_masks(probs, [flipped(mask, 0.05)]).temperature < 0.9


def test_already_consistent_is_left_alone():
    probs, mask = two_classes(0.9)
    found = fit_temperature_to_masks(probs, [flipped(mask, 0.1), flipped(mask, 0.1, seed=1)])
    assert found.temperature == pytest.approx(1.0, abs=1e-4)


def test_less_agreement_never_gives_a_lower_temperature():
    probs, mask = two_classes(0.93)
    found = [fit_temperature_to_masks(probs, [flipped(mask, n / 50)]).temperature for n in range(26)]
    assert found == sorted(found)
    assert found[0] == LOWEST_TEMPERATURE
    assert found[-1] == HIGHEST_TEMPERATURE


def test_the_ends_of_the_range():
    probs, mask = two_classes(0.9)
    assert fit_temperature_to_masks(probs, [mask]).temperature == LOWEST_TEMPERATURE
    assert fit_temperature_to_masks(probs, [1 - mask]).temperature == HIGHEST_TEMPERATURE


def test_all_agree_on_a_wrong_mask_is_not_seen():
    # the stated failure: a steady error is made more confident
    probs, _ = two_classes(0.8)
    found = fit_temperature_to_masks(probs, [probs.argmax(dim=1)] * 2)
    assert found.agreement == 1.0
    assert found.temperature == LOWEST_TEMPERATURE


def test_no_foreground_anywhere():
    probs, _ = two_classes(0.9, foreground=0.0)
    found = fit_temperature_to_masks(probs, [probs.argmax(dim=1)])
    assert (found.temperature, found.agreement, found.confidence, found.pixels) == (1.0, None, None, 0)


def test_foreground_of_a_styled_prediction_alone_makes_a_region():
    probs, mask = two_classes(0.9, foreground=0.0)
    moved = mask.clone()
    moved[0, 10, 10] = 1
    found = fit_temperature_to_masks(probs, [moved])
    assert found.pixels == 29  # a disc of radius 3
    assert found.agreement == pytest.approx(28 / 29)


def test_only_the_region_counts():
    probs, mask = two_classes(0.9, foreground=0.0)
    moved = mask.clone()
    moved[0, 10, 10] = 1
    other = probs.clone()
    other[0, :, :4] = torch.tensor([0.6, 0.4])[:, None, None]
    assert fit_temperature_to_masks(other, [moved]) == fit_temperature_to_masks(probs, [moved])


def test_one_class_and_no_slices():
    single = torch.ones((2, 1, 5, 5))
    assert fit_temperature_to_masks(single, [single.argmax(dim=1)]).temperature == 1.0
    assert torch.equal(scale_temperature(single, 2.0), single)
    none = torch.zeros((0, 2, 5, 5))
    assert fit_temperature_to_masks(none, [none.argmax(dim=1)]).temperature == 1.0


def test_certain_probabilities_cannot_be_changed():
    mask = torch.zeros((1, 12, 12), dtype=torch.long)
    mask[0, 4:8, 4:8] = 1
    probs = torch.stack([1 - mask, mask], dim=1).float()
    found = fit_temperature_to_masks(probs, [torch.roll(mask, 2, dims=1)])
    assert found.confidence == 1.0
    assert found.agreement < 1.0
    assert found.temperature == 1.0


def test_some_certain_pixels_are_no_obstacle():
    probs, mask = two_classes(0.9)
    certain = probs.clone()
    certain[0, :, :5] = torch.nn.functional.one_hot(mask[0, :5], 2).movedim(-1, 0).float()
    found = fit_temperature_to_masks(certain, [flipped(mask, 0.2)])
    assert found.temperature > 1
    scaled = scale_temperature(certain, found.temperature)
    assert float(scaled.amax(dim=1).mean()) == pytest.approx(0.8, abs=1e-5)


def test_a_known_temperature_is_found_again():
    # labels drawn from the true probabilities stand for style changes that are as uncertain as the model
    # should be; the model is sharpened by a known factor
    true = torch.softmax(2.5 * torch.randn((4, 2, 96, 96), generator=torch.Generator().manual_seed(0)), 1)
    generator = torch.Generator().manual_seed(1)
    drawn_masks = [
        (torch.rand(true.shape[:1] + true.shape[2:], generator=generator) < true[:, 1]).long()
        for _ in range(3)
    ]
    sharp = scale_temperature(true, 1 / 2.0)
    assert fit_temperature_to_masks(sharp, drawn_masks).temperature == pytest.approx(2.0, abs=0.05)
    assert fit_temperature_to_masks(true, drawn_masks).temperature == pytest.approx(1.0, abs=0.03)


def test_styles_that_do_not_fit_are_named():
    probs = drawn()
    with pytest.raises(DataError, match="at least one style change"):
        fit_temperature_to_masks(probs, [])
    with pytest.raises(DataError, match="one shape"):
        fit_temperature_to_masks(probs, [probs.argmax(dim=1)[:, :4]])


def test_the_range_is_the_stated_one():
    assert (recalibration.LOWEST_TEMPERATURE, recalibration.HIGHEST_TEMPERATURE) == (0.5, 4.0)
    assert recalibration.REGION_DILATION == 3


def test_a_volume_has_the_temperature_of_its_slices():
    generator = torch.Generator().manual_seed(4)
    slices = torch.randn(5, 3, 12, 12, generator=generator).mul(2).softmax(dim=1)
    styled = torch.randn(5, 3, 12, 12, generator=generator).argmax(dim=1)
    flat = recalibrated(Outcome(slices, slices, Verdict(1.0, "")), [styled], None)
    volume = slices.movedim(0, 1)[None]  # (1, L, D, H, W)
    whole = recalibrated(Outcome(volume, volume, Verdict(1.0, "")), [styled[None]], None)
    assert flat.temperature == whole.temperature != 1.0
    assert whole.probs is volume
