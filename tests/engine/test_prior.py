"""Where the organ of the training lies: its measures by hand, the card, and what the guard makes of it."""

import math

import pytest
import torch

from tesla_med.config.models import GuardConfig
from tesla_med.engine.guard import Guard, judge
from tesla_med.engine.prior import (
    LEAST_SPREADS,
    OrganPrior,
    as_extra,
    fitted,
    measured,
    nearness,
    prior_of,
)
from tesla_med.models.checkpoint import make_card
from tesla_med.models.unet import UNet
from tesla_med.tta.base import MethodContext, make_method

CONFIG = GuardConfig(enabled=True)


def box(rows, columns, slices=(2, 6), shape=(8, 32, 64)):
    mask = torch.zeros(shape, dtype=torch.long)
    mask[slices[0] : slices[1], rows[0] : rows[1], columns[0] : columns[1]] = 1
    return mask


MIDDLE = box((12, 20), (24, 40))


def test_measures_by_hand():
    row, column, area, height, width = measured(MIDDLE)
    assert (row, column) == pytest.approx((0.5, 0.5))
    assert area == pytest.approx(math.log(8 * 16 / (32 * 64)))
    assert height == pytest.approx(math.log(math.sqrt((8**2 - 1) / 12) / 32))
    assert width == pytest.approx(math.log(math.sqrt((16**2 - 1) / 12) / 64))


def test_the_area_is_that_of_the_widest_slices():
    narrow = MIDDLE.clone()
    narrow[5, :, 30:] = 0
    assert measured(narrow)[2] == pytest.approx(measured(MIDDLE)[2])
    narrow[4, :, 30:] = 0
    assert measured(narrow)[2] < measured(MIDDLE)[2] - 0.1


def test_classes_count_together_and_an_empty_mask_has_no_measures():
    both = MIDDLE.clone()
    both[:, 14:18, 28:36] *= 2
    assert measured(both) == pytest.approx(measured(MIDDLE))
    assert measured(0 * MIDDLE) is None


def test_a_single_pixel_has_a_size():
    assert all(math.isfinite(value) for value in measured(box((3, 4), (5, 6), (0, 1))))


def prior():
    return fitted([MIDDLE, box((13, 21), (24, 40)), box((11, 19), (22, 42))])


def test_masks_of_the_training_are_near_and_others_are_not():
    known = prior()
    assert known.cases == 3
    assert known.spread == pytest.approx(LEAST_SPREADS)  # these three differ by less
    assert known.deviation(MIDDLE) < 0.5
    low = box((22, 30), (24, 40))  # 10 rows further, of 32, at a spread of 0.04
    assert known.deviation(low) == pytest.approx((26 / 32 - known.mean[0]) / 0.04)
    assert known.deviation(box((15, 17), (31, 33))) > 4  # the place, not the size
    assert known.deviation(box((0, 32), (0, 64))) > 4
    assert known.deviation(0 * MIDDLE) == 0.0


def test_a_training_that_varies_more_says_so():
    wide = fitted([box((0, 8), (24, 40)), box((24, 32), (24, 40)), MIDDLE])
    assert wide.spread[0] == pytest.approx(0.375)
    assert wide.spread[1:] == pytest.approx(LEAST_SPREADS[1:])


def test_one_case_is_no_prior_and_empty_ones_do_not_count():
    assert fitted([MIDDLE]) is None
    assert fitted([MIDDLE, 0 * MIDDLE]) is None
    assert fitted([MIDDLE, 0 * MIDDLE, MIDDLE]).cases == 2


def card(extra, make_pipeline):
    return make_card(make_pipeline(), extra=extra)


@pytest.fixture
def make_pipeline():
    from tesla_med.config.files import load_pipeline

    return lambda: load_pipeline("prostate")


def test_the_card_keeps_it(make_pipeline):
    kept = card(as_extra(prior()), make_pipeline)
    again = type(kept).model_validate_json(kept.model_dump_json())
    found = prior_of(again)
    assert found.cases == 3
    assert found.mean == pytest.approx(prior().mean)
    assert as_extra(None) == {}


@pytest.mark.parametrize(
    "content",
    [
        None,
        "text",
        {"mean": [0.5], "spread": [0.1], "cases": 3},
        {"mean": [0.5] * 5, "spread": [0.0] * 5, "cases": 3},
        {"mean": [0.5] * 5, "cases": 3},
        {"mean": ["a"] * 5, "spread": [0.1] * 5, "cases": 3},
    ],
)
def test_a_card_that_says_nothing_sound_is_one_without(content, make_pipeline):
    assert prior_of(card({"organ": content}, make_pipeline)) is None
    assert prior_of(None) is None


# ---------------------------------------------------------------- what the guard makes of it


def signals(**deviations):
    names = ("source", "own", "half", "adapted")
    pairs = {
        f"agreement_{one}_{two}": 0.9 for one in names for two in names if names.index(one) < names.index(two)
    }
    about = {f"consistency_{name}": 0.95 for name in names} | {f"foreground_{name}": 0.02 for name in names}
    about["consistency_adapted"] = 0.99
    return pairs | about | {f"deviation_{name}": value for name, value in deviations.items()}


def test_a_mask_in_the_wrong_place_is_refused_where_another_is_not():
    assert judge(signals(source=1.0, own=1.0, half=1.0, adapted=4.4), CONFIG).used == "adapted"
    verdict = judge(signals(source=1.0, own=1.0, half=1.0, adapted=4.6), CONFIG)
    assert verdict.used != "adapted"
    assert verdict.collapsed
    assert verdict.trusted
    assert "no organ of the training" in verdict.reason


def test_where_all_are_in_the_wrong_place_nothing_is_trusted():
    verdict = judge(signals(source=6.0, own=6.0, half=6.0, adapted=6.0), CONFIG)
    assert verdict.used == "adapted"
    assert not verdict.trusted
    assert verdict.reason.startswith("nothing is trustworthy here: the mask lies")


def test_an_empty_mask_is_not_one_that_lies_well():
    """It deviates by nothing, and is no reason to refuse the others."""
    given = signals(source=0.0, own=6.0, half=6.0, adapted=6.0) | {"foreground_source": 0.0}
    verdict = judge(given, CONFIG)
    assert verdict.used == "adapted"
    assert not verdict.trusted


def test_without_a_card_nothing_changes():
    assert judge(signals(), CONFIG).used == "adapted"


def test_support_falls_with_the_distance():
    assert nearness({}, "adapted", 4.5) == 1.0
    assert nearness({"deviation_adapted": 4.5}, "adapted", 4.5) == 1.0
    assert nearness({"deviation_adapted": 9.0}, "adapted", 4.5) == pytest.approx(1 / 16)


def test_a_guard_that_knows_the_organ_looks_where_masks_lie(make_images, monkeypatch):
    def method(name):
        torch.manual_seed(0)
        context = MethodContext(torch.device("cpu"), seed=3)
        return make_method(name, UNet(1, 2, 4).eval(), {}, context)

    images = make_images(8, 32, 64)
    probs = torch.stack([1.0 - MIDDLE.float(), MIDDLE.float()], dim=1)
    sure = {"least_support": 0.0, "unsupported": 0.0, "candidates": ("source", "adapted")}
    config = CONFIG.model_copy(update=sure)
    found = {}
    for name, known in (("none", None), ("near", prior()), ("far", prior_far())):
        guard = Guard(config, method("source"), method("tesla"), prior=known)
        monkeypatch.setattr("tesla_med.engine.guard.zoomed_mask", lambda *_: MIDDLE)
        found[name] = guard.judge(images, probs, probs)
    assert "deviation_source" not in found["none"].signals
    assert found["near"].signals["deviation_adapted"] == pytest.approx(prior().deviation(MIDDLE))
    assert found["near"].trusted
    assert not found["far"].trusted
    assert found["near"].signals["support_1"] == pytest.approx(found["none"].signals["support_1"])
    assert found["far"].signals["support_1"] < 0.1 * found["near"].signals["support_1"]


def prior_far():
    return OrganPrior((0.9, 0.9, *prior().mean[2:]), LEAST_SPREADS, 3)
