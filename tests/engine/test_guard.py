"""The guard: signals by hand, each rule, steps in between, and that a collapse leaves no trace."""

import itertools
import math

import numpy as np
import pytest
import torch

from tesla_med.config.models import GuardConfig
from tesla_med.engine.driver import Driver
from tesla_med.engine.guard import (
    VERDICTS,
    Guard,
    between,
    candidate_of,
    judge,
    supports_of,
    witnesses,
)
from tesla_med.engine.postprocess import keep_largest, largest_of
from tesla_med.engine.predictor import Predictor as CasePredictor
from tesla_med.engine.quality import joined
from tesla_med.engine.signals import (
    ZOOMS,
    agreement,
    area_change,
    compared,
    lacking,
    narrowing,
    stack_shape,
    zoomed_mask,
)
from tesla_med.models.base import norm_layers
from tesla_med.models.normalisation import running_statistics, statistics_distance
from tesla_med.models.unet import UNet
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Verdict

CONFIG = GuardConfig(enabled=True)
NAMES = ("source", "own", "half", "adapted")


def signals_of(agreements, consistency, foreground=None):
    """Signals of candidates; agreements in the order of the pairs of NAMES."""
    pairs = [(one, two) for index, one in enumerate(NAMES) for two in NAMES[index + 1 :]]
    shares = foreground or dict.fromkeys(NAMES, 0.02)
    return (
        {f"agreement_{one}_{two}": value for (one, two), value in zip(pairs, agreements, strict=True)}
        | {f"consistency_{name}": value for name, value in zip(NAMES, consistency, strict=True)}
        | {f"foreground_{name}": value for name, value in shares.items()}
    )


SURE = (0.94, 0.94, 0.94)
CLOSE = (0.95, 0.96, 0.9, 0.97, 0.92, 0.93)
"""Agreements of source with own, half, adapted; of own with half, adapted; of half with adapted."""


def network(seed=0):
    torch.manual_seed(seed)
    return UNet(1, 2, 4).eval()


def context():
    return MethodContext(torch.device("cpu"), seed=3)


def method(name="tesla", params=None):
    return make_method(name, network(), params or {}, context())


# ------------------------------------------------------------ rules


def test_an_adapted_mask_that_is_as_sure_as_the_others_is_taken():
    verdict = judge(signals_of(CLOSE, (*SURE, 0.97)), CONFIG)
    assert (verdict.used, verdict.reason, verdict.collapsed, verdict.trusted) == ("adapted", "", False, True)


def test_a_less_consistent_adapted_mask_is_not_taken():
    verdict = judge(signals_of(CLOSE, (*SURE, 0.85)), CONFIG)
    assert candidate_of(verdict) != "adapted"
    assert "trusted more" in verdict.reason
    assert not verdict.collapsed
    assert verdict.trusted


def test_the_trust_is_that_of_the_formula():
    signals = judge(signals_of(CLOSE, (*SURE, 0.95)), CONFIG).signals
    mean = (0.95 + 0.96 + 0.9) / 3
    assert signals["trust_source"] == pytest.approx(-math.log(1.02 - 0.94) - math.log(1.02 - mean))


@pytest.mark.parametrize(("name", "used"), [("source", "source"), ("own", "partial"), ("half", "partial")])
def test_the_most_trusted_is_taken(name, used):
    consistency = dict.fromkeys(NAMES, 0.7) | {name: 0.96}
    verdict = judge(signals_of((0.9,) * 6, [consistency[item] for item in NAMES]), CONFIG)
    assert (candidate_of(verdict), verdict.used) == (name, used)


def test_the_head_start_is_the_sources_alone():
    level = signals_of((0.9,) * 6, (0.9,) * 4)
    assert judge(level, CONFIG).used == "source"
    without = CONFIG.model_copy(update={"head_start": 0.0, "doubt": 0.0})
    for name in ("own", "adapted"):
        ahead = level | {f"consistency_{name}": 0.904}
        assert candidate_of(judge(ahead, without)) == name
        assert judge(ahead, CONFIG).used == "source"
        assert candidate_of(judge(level | {f"consistency_{name}": 0.93}, CONFIG)) == name


def test_the_head_start_grows_where_no_mask_is_trusted_much():
    def taken(level, doubt):
        signals = signals_of((level,) * 6, (level, level, level, level + 0.08))
        return candidate_of(judge(signals, CONFIG.model_copy(update={"doubt": doubt})))

    assert [taken(level, 0.0) for level in (0.7, 0.9)] == ["adapted", "adapted"]
    assert [taken(level, 0.3) for level in (0.7, 0.9)] == ["source", "adapted"]


def shrunk(share, consistency=0.985, **others):
    """Signals of an adapted mask that is steadier than the others and has this share of their area."""
    areas = dict.fromkeys(NAMES, 0.02) | {"adapted": 0.02 * share} | others
    return signals_of(CLOSE, (*SURE, consistency), areas)


def test_an_adapted_mask_that_is_smaller_than_all_others_must_be_trusted_more():
    dear = CONFIG.model_copy(update={"shrink_cost": 2.0})
    assert [candidate_of(judge(shrunk(share), dear)) for share in (1.5, 1.0, 0.6)] == ["adapted"] * 2 + [
        "half"
    ]
    free = CONFIG.model_copy(update={"shrink_cost": 0.0})
    assert candidate_of(judge(shrunk(0.6), free)) == "adapted"


def test_what_a_smaller_mask_costs_is_that_of_the_formula():
    worth, level = (0.95 + 0.96 + 0.9) / 3, shrunk(0.8)
    trust = judge(level, CONFIG).signals
    lead = trust["trust_adapted"] - trust["trust_half"]
    just = lead / (worth * (math.log(1 / 0.8) - 0.06))
    taken = [
        candidate_of(judge(level, CONFIG.model_copy(update={"shrink_cost": cost})))
        for cost in (0.99 * just, 1.01 * just)
    ]
    assert taken == ["adapted", "half"]


def test_a_mask_that_shrinks_a_little_or_less_than_another_costs_nothing():
    dear = CONFIG.model_copy(update={"shrink_cost": 100.0})
    assert candidate_of(judge(shrunk(0.95), dear)) == "adapted"  # its logarithm falls by less than 0.06
    assert candidate_of(judge(shrunk(0.7, own=0.014), dear)) == "adapted"  # own statistics say the same
    assert candidate_of(judge(shrunk(0.7, own=0.0), dear)) != "adapted"  # an empty mask says nothing


def test_where_all_masks_are_empty_none_has_shrunk():
    nothing = signals_of((1.0,) * 6, (1.0,) * 4, dict.fromkeys(NAMES, 0.0))
    assert judge(nothing, CONFIG.model_copy(update={"shrink_cost": 100.0})).used == "source"


def test_a_mask_may_shrink_where_the_sources_is_refused():
    dear = CONFIG.model_copy(update={"shrink_cost": 100.0})
    narrow = {f"narrowing_{name}": 1.0 for name in NAMES} | {"narrowing_source": 0.1}
    assert candidate_of(judge(shrunk(0.5) | narrow, dear)) == "adapted"


def test_a_source_that_is_like_no_other_does_not_win_by_its_head_start():
    """On a cord of which the source finds a tenth, one other agrees a little, the rest do not at all."""
    names = ("source", "own", "half", "part", "adapted")
    seen = {
        "consistency": (0.625, 0.84, 0.331, 0.837, 0.888),
        "narrowing": (1, 0.103, 1, 0.37, 0.783),
        "area_change": (1, 2.52, 1.11, 1.83, 1.26),
        "foreground": (0.00213, 0.0232, 0.00502, 0.0169, 0.0261),
    }
    signals = {f"{key}_{name}": x for key, row in seen.items() for name, x in zip(names, row, strict=True)}
    agreements = (0.163, 0.593, 0.214, 0.145, 0.344, 0.78, 0.78, 0.433, 0.304, 0.778)
    pairs = itertools.combinations(names, 2)
    signals |= {f"agreement_{a}_{b}": x for (a, b), x in zip(pairs, agreements, strict=True)}
    config = GuardConfig(candidates=names, head_start=0.2, doubt=0.3)
    found = judge(signals, config)
    assert candidate_of(found) == "adapted"
    whole = config.head_start + config.doubt * (4.0 - found.signals["trust_adapted"])
    assert found.signals["trust_adapted"] - found.signals["trust_source"] < whole  # in full it would win


def test_a_mask_of_little_trust_does_not_take_the_place_of_the_sources():
    signals = signals_of((0.8,) * 6, (0.7, 0.7, 0.7, 0.9))
    trust = judge(signals, CONFIG).signals["trust_adapted"]
    for least, taken in ((trust - 0.01, "adapted"), (trust + 0.01, "source")):
        assert candidate_of(judge(signals, CONFIG.model_copy(update={"least_trust": least}))) == taken
    empty = signals | {"foreground_source": 0.0}  # refused, so another must be taken whatever its trust
    assert candidate_of(judge(empty, CONFIG.model_copy(update={"least_trust": trust + 1}))) == "adapted"


@pytest.mark.parametrize(
    ("narrow", "taken"),
    [
        ({"adapted": 0.49}, "own"),  # a bladder above the prostate
        ({"adapted": 0.5}, "adapted"),
        ({"adapted": 0.3, "source": 0.2, "half": 0.1}, "own"),
        (dict.fromkeys(NAMES, 0.1), "adapted"),  # lesions here and there: of all masks the same is true
        ({}, "adapted"),
    ],
)
def test_a_mask_of_two_parts_is_refused_where_another_is_one(narrow, taken):
    base = signals_of((0.9,) * 6, (0.8, 0.94, 0.85, 0.97))
    signals = base | {f"narrowing_{name}": narrow.get(name, 1.0) for name in NAMES}
    verdict = judge(signals, CONFIG)
    assert candidate_of(verdict) == taken
    assert verdict.collapsed == (taken != "adapted")
    assert ("of two parts along the stack (narrows to " in verdict.reason) == (taken != "adapted")
    assert candidate_of(judge(signals, CONFIG.model_copy(update={"narrowest": 0.0}))) == "adapted"


def test_a_mask_that_narrows_as_far_as_it_may_is_one_body():
    """At the limit itself it is neither refused nor of no weight against one that narrows further."""
    given = signals_of((0.9,) * 6, (0.9, 0.9, 0.9, 0.99)) | {"narrowing_adapted": 0.4}
    others = {f"narrowing_{name}": CONFIG.narrowest for name in ("source", "own", "half")}
    verdict = judge(given | others, CONFIG)
    assert verdict.used != "adapted"
    assert "two parts" in verdict.reason


def test_an_empty_mask_is_not_one_part():
    base = signals_of((0.9,) * 6, (0.8, 0.94, 0.85, 0.97), dict.fromkeys(NAMES, 0.02) | {"source": 0.0})
    narrow = {f"narrowing_{name}": 0.2 for name in NAMES} | {"narrowing_source": 1.0}
    verdict = judge(base | narrow, CONFIG)
    assert (candidate_of(verdict), verdict.trusted) == ("adapted", True)  # of two parts, as all that found it


@pytest.mark.parametrize(
    ("agreements", "adapted", "words"),
    [
        ((0.95, 0.96, 0.03, 0.97, 0.03, 0.03), 0.0004, "agrees with no other (Dice 0.03"),  # 2 % of the size
        ((0.95, 0.96, 0.0, 0.97, 0.0, 0.0), 0.02, "agrees with no other (Dice 0.00"),  # elsewhere
        ((0.95, 0.96, 0.1, 0.97, 0.32, 0.2), 0.5, "agrees with no other (Dice 0.32"),  # half the field
        ((0.95, 0.96, 0.0, 0.97, 0.0, 0.0), 0.0, "is empty and others are not"),
        ((0.95, 0.96, 0.6, 0.97, 0.6, 0.6), 0.7, "fills 70 % of the field"),
    ],
)
def test_an_adapted_mask_without_support_is_refused_however_sure_it_is(agreements, adapted, words):
    shares = dict.fromkeys(NAMES, 0.02) | {"adapted": adapted}
    verdict = judge(signals_of(agreements, (*SURE, 1.0), shares), CONFIG)
    assert candidate_of(verdict) != "adapted"
    assert verdict.collapsed
    assert verdict.trusted
    assert words in verdict.reason


@pytest.mark.parametrize(
    ("agreements", "source"),
    [((0.1, 0.2, 0.05, 0.8, 0.9, 0.85), 0.001), ((0.0, 0.0, 0.0, 0.8, 0.9, 0.85), 0.0)],
)
def test_a_source_that_is_wrong_and_certain_does_not_win(agreements, source):
    shares = dict.fromkeys(NAMES, 0.02) | {"source": source}
    verdict = judge(signals_of(agreements, (1.0, 0.8, 0.8, 0.9), shares), CONFIG)
    assert verdict.used == "adapted"
    assert "the source's mask" in verdict.reason
    assert not verdict.collapsed


def test_empty_masks_do_not_support_each_other_where_something_is_found():
    shares = dict.fromkeys(NAMES, 0.0) | {"adapted": 0.02}
    verdict = judge(signals_of((1.0, 1.0, 0.0, 1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.9), shares), CONFIG)
    assert (verdict.used, verdict.trusted, verdict.collapsed) == ("adapted", False, False)
    assert "nothing is trustworthy" in verdict.reason
    nothing = dict.fromkeys(NAMES, 0.0)
    verdict = judge(signals_of((1.0,) * 6, (1.0,) * 4, nothing), CONFIG)
    assert verdict.trusted


def test_candidates_can_be_left_out():
    consistency = dict.fromkeys(NAMES, 0.7) | {"own": 0.96}
    signals = signals_of((0.9,) * 6, [consistency[item] for item in NAMES])
    assert candidate_of(judge(signals, CONFIG)) == "own"
    few = CONFIG.model_copy(update={"candidates": ("source", "half", "adapted")})
    assert candidate_of(judge(signals, few)) == "source"
    assert Guard(few, method("source"), method("tesla")).candidates == ("source", "half", "adapted")
    for wrong in (("source", "half"), ("source", "source", "adapted")):
        with pytest.raises(ValueError, match="each name once"):
            GuardConfig(candidates=wrong)


@pytest.mark.parametrize("name", ["own", "half", "part", "mixed", "adapted"])
def test_every_candidate_repeats_its_probabilities(name, make_images):
    """What the guard judged is what is deployed and saved."""
    params = {"batch_slices": 4, "learning_rate": 0.01, "predict_statistics": "volume"}
    ours, images = method("tesla", params), make_images(4, 32, 32)
    config = CONFIG.model_copy(update={"candidates": ("source", "own", "half", "part", "mixed", "adapted")})
    predictor = CasePredictor(method("source"), ours, Driver(ours, "N-O", "case"), config)
    ours.adapt(images)
    source, adapted = predictor.source.predict(images), ours.predict(images)
    _, masks = predictor.guard.look(images, source, adapted)
    probs = predictor.guard.probabilities(images, VERDICTS[name])
    assert torch.equal(probs.argmax(1), masks[name])
    with predictor.deployed(images, VERDICTS[name]) as deployed:
        again = make_method("source", deployed, {}, context()).predict(images)
    assert torch.allclose(probs, again, atol=1e-6)
    assert not torch.allclose(probs, source, atol=1e-3)


def test_nothing_is_trusted_where_no_two_masks_agree():
    verdict = judge(signals_of((0.2,) * 6, (0.5, 0.9, 0.3, 0.8)), CONFIG)
    assert (candidate_of(verdict), verdict.trusted, verdict.collapsed) == ("own", False, True)
    assert "nothing is trustworthy here" in verdict.reason


def test_nothing_is_trusted_where_the_best_changes_with_the_view():
    verdict = judge(signals_of((0.6,) * 6, (0.3,) * 4), CONFIG)
    assert not verdict.trusted
    assert "nothing is trustworthy here" in verdict.reason
    assert judge(signals_of((0.6,) * 6, (0.7,) * 4), CONFIG).trusted


def test_a_network_without_batch_norm_is_judged_by_three_masks():
    any_trust = CONFIG.model_copy(update={"least_trust_without_batch_norm": 0.0})
    names = ("source", "part", "adapted")
    base = {f"foreground_{name}": 0.02 for name in names} | {f"consistency_{name}": 0.9 for name in names}
    near = {
        "agreement_source_part": 0.9,
        "agreement_source_adapted": 0.8,
        "agreement_part_adapted": 0.9,
    }
    assert judge(base | near | {"consistency_adapted": 0.95}, any_trust).used == "adapted"
    assert judge(base | near, any_trust).used == "source"
    verdict = judge(base | near | {"consistency_adapted": 0.6}, any_trust)
    assert verdict.used == "source"
    verdict = judge(base | near | {"consistency_adapted": 0.6, "consistency_part": 0.95}, any_trust)
    assert (verdict.used, verdict.share) == ("partial", 0.5)
    alone = near | {"agreement_source_adapted": 0.1, "agreement_part_adapted": 0.2}
    verdict = judge(base | alone, any_trust)
    assert verdict.collapsed
    assert verdict.share < 1


def test_without_batch_norm_a_mask_needs_more_trust():
    names = ("source", "part", "adapted")
    signals = {f"foreground_{name}": 0.02 for name in names} | {f"consistency_{name}": 0.9 for name in names}
    signals |= {"agreement_source_part": 0.97, "agreement_part_adapted": 0.97, "consistency_adapted": 0.96}
    trust = judge(signals | {"agreement_source_adapted": 0.94}, CONFIG).signals["trust_adapted"]
    for least, taken in ((trust - 0.01, "adapted"), (trust + 0.01, "source")):
        config = CONFIG.model_copy(update={"least_trust_without_batch_norm": least, "least_trust": 0.0})
        assert candidate_of(judge(signals | {"agreement_source_adapted": 0.94}, config)) == taken
        more = {f"{key}_own": 0.9 for key in ("consistency", "foreground")}
        more |= {f"agreement_{a}": 0.94 for a in ("source_own", "own_part", "own_adapted", "source_adapted")}
        assert candidate_of(judge(signals | more, config)) == "adapted"  # a batch norm: more to compare


def test_a_mask_that_rises_and_falls_twice_is_trusted_less():
    """An organ and another above it agree with nothing less for being two, but no organ has that shape."""
    config = CONFIG.model_copy(update={"doubt": 0.0})
    signals = signals_of((0.8,) * 6, (0.9, 0.88, 0.88, 0.93)) | {f"area_change_{name}": 1.0 for name in NAMES}
    assert candidate_of(judge(signals, config)) == "adapted"
    twice = signals | {"area_change_adapted": 1.2}
    assert candidate_of(judge(twice, config)) == "source"
    assert candidate_of(judge(twice | {"area_change_source": 1.3}, config)) in {"own", "half"}
    without = config.model_copy(update={"shape_cost": 0.0})
    assert candidate_of(judge(twice, without)) == "adapted"
    trust = [
        judge(signals | {"area_change_adapted": value}, config).signals["trust_adapted"]
        for value in (1.0, 1.025, 1.05, 9.0)
    ]
    assert [trust[0] - value for value in trust] == pytest.approx([0.0, 0.25, 0.5, 0.5])
    flat = signals | {"area_change_adapted": 0.5}
    assert judge(flat, config).signals["trust_adapted"] == judge(signals, config).signals["trust_adapted"]


@pytest.mark.parametrize(
    ("areas", "expected"),
    [
        ((0, 2, 5, 8, 8, 4, 1, 0), 1.0),
        ((), 1.0),
        ((0, 0, 0, 0), 1.0),
        ((8, 8, 8, 2, 9, 9, 9), 2 / 8),
        ((8, 8, 8, 0, 0, 9, 9, 9), 0.0),
        ((9, 7, 6, 3, 4, 5, 8), 3 / 4),  # the third largest above is 6, below 4
        ((8, 0, 9, 9, 9, 0, 8), 1.0),  # a slice that was missed, not a part
        ((8, 8, 0, 9, 9, 9, 9), 1.0),  # two slices are no part
        ((9, 9, 9, 6, 9, 9, 9, 3, 8, 8, 8), 3 / 8),
    ],
)
def test_narrowing_between_two_parts(areas, expected):
    mask = torch.zeros(len(areas), 10, 10, dtype=torch.bool)
    for index, area in enumerate(areas):
        mask[index, :area, 0] = True
    assert narrowing(mask) == pytest.approx(expected)


def test_changes_of_area():
    mask = torch.zeros(7, 10, 10)
    assert area_change(mask > 0) == 1.0
    for index, side in enumerate((2, 4, 0, 4, 6, 4)):
        mask[index, :side, 0] = 1
    assert area_change(mask > 0) == pytest.approx((2 + 2 + 4 + 4 + 2 + 2 + 4) / (2 * 6))
    mask[6, :4, 0] = 1  # up to the last slice
    assert area_change(mask > 0) == pytest.approx((2 + 2 + 4 + 4 + 2 + 2 + 0 + 4) / (2 * 6))


def test_the_mask_half_way_speaks_for_none():
    names = ("source", "own", "half", "part", "adapted")
    assert witnesses("source", names) == ["own", "half", "adapted"]
    assert witnesses("part", names) == ["source", "own", "half", "adapted"]
    assert witnesses("source", ("source", "part", "adapted")) == ["part", "adapted"]
    signals = signals_of((0.3,) * 6, (0.9,) * 4)
    part = {"consistency_part": 0.9, "foreground_part": 0.02}
    near = {f"agreement_{name}_part": 0.9 for name in ("source", "own", "half")} | {
        "agreement_part_adapted": 0.9
    }
    verdict = judge(signals | part | near, CONFIG)
    assert candidate_of(verdict) == "part"
    assert verdict.collapsed
    assert verdict.signals["trust_source"] == judge(signals, CONFIG).signals["trust_source"]


# ------------------------------------------------------------ what it sees


def masks_of(boxes):
    masks = {name: torch.zeros(2, 10, 40, dtype=torch.long) for name in boxes}
    for name, (left, right) in boxes.items():
        masks[name][:, :, left:right] = 1
    return masks


def test_signals_by_hand():
    boxes = {"source": (0, 4), "source@0.85": (0, 4), "source@1.2": (0, 2)}
    boxes |= {"adapted": (2, 6), "adapted@0.85": (6, 8), "adapted@1.2": (2, 6)}
    signals = compared(masks_of(boxes), ("source", "adapted"), 2)
    assert signals["consistency_source"] == pytest.approx((1 + 2 / 3) / 2)
    assert signals["consistency_adapted"] == pytest.approx(0.5)
    assert signals["agreement_source_adapted"] == pytest.approx(0.5)
    assert signals["foreground_source"] == pytest.approx(0.1)


def structures(*names_of_both, alone=()):
    """Masks of two classes side by side, and those in which the second is missing; zoomed alike."""
    masks = {}
    for name in (*names_of_both, *alone):
        mask = torch.zeros(6, 20, 40, dtype=torch.long)
        mask[:, 5:15, 5:15] = 1
        if name in names_of_both:
            mask[:, 5:15, 20:30] = 2
        masks |= {name: mask} | {f"{name}@{zoom}": mask for zoom in ZOOMS}
    return masks


@pytest.mark.parametrize(
    "names", [("source", "part", "adapted"), ("source", "own", "half", "part", "mixed", "adapted")]
)
def test_a_mask_that_lost_a_structure_is_refused_though_it_agrees_on_the_rest(names):
    moved = tuple(name for name in names if VERDICTS[name].share > 0)
    unmoved = tuple(name for name in names if name not in moved)
    masks = structures(*unmoved, alone=moved)
    signals = compared(masks, names, 3) | lacking(masks, names, unmoved, 3)
    assert signals["consistency_adapted"] == 1.0
    config = CONFIG.model_copy(update={"candidates": names, "least_trust_without_batch_norm": 0.0})
    verdict = judge(signals, config)
    assert candidate_of(verdict) in unmoved
    assert verdict.collapsed
    whole = structures(*names)
    assert not judge(compared(whole, names, 3) | lacking(whole, names, unmoved, 3), config).collapsed


def test_what_counts_as_a_structure_that_is_lacking():
    masks = structures("source", "own", "adapted")
    masks["adapted"] = masks["adapted"].clone()
    masks["adapted"][1:][masks["adapted"][1:] == 2] = 0  # a sixth is left
    assert lacking(masks, (*NAMES[:2], "adapted"), ("source", "own"), 3)["lacking_adapted"] == 0
    masks["adapted"][0, 7:][masks["adapted"][0, 7:] == 2] = 0  # a thirtieth
    assert lacking(masks, (*NAMES[:2], "adapted"), ("source", "own"), 3)["lacking_adapted"] == 1
    masks["own"] = masks["adapted"]  # what not all of the source's masks have is not missed
    assert lacking(masks, (*NAMES[:2], "adapted"), ("source", "own"), 3)["lacking_adapted"] == 0
    speck = structures(alone=("source", "adapted"))
    speck["source"] = speck["source"].clone()
    speck["source"][0, 0, 0] = 2
    assert lacking(speck, ("source", "adapted"), ("source",), 3) == {
        "lacking_source": 0,
        "lacking_adapted": 0,
    }
    assert lacking(speck, ("adapted",), ("source",), 3) == {}


def test_without_batch_norm_the_mask_half_way_does_not_speak_for_the_adapted_one():
    """Adapted and half way moved to another place together, and the source's mask is steadier."""
    names = ("source", "part", "adapted")
    boxes = {"source": (0, 8), "part": (20, 28), "adapted": (20, 28)}
    boxes |= {f"{name}@{zoom}": box for name, box in boxes.items() for zoom in ZOOMS}
    verdict = judge(compared(masks_of(boxes), names, 2), CONFIG)
    assert verdict.collapsed
    assert candidate_of(verdict) != "adapted"
    assert not judge(
        compared(masks_of(boxes), names, 2), CONFIG.model_copy(update={"unsupported": 0.0})
    ).collapsed


def probabilities_of(mask):
    found = torch.stack([1.0 - mask.float(), mask.float()], dim=1)
    return found * 0.998 + 0.001


def test_a_certain_adapted_mask_is_refused_by_a_whole_guard(make_images, monkeypatch):
    """Shrunk to 2 %, elsewhere, or half the field: low entropy does not help it."""
    images = make_images(4, 40, 40)
    body = torch.zeros(4, 40, 40)
    body[:, 10:30, 10:30] = 1
    sure = probabilities_of(body)

    def same(network, batch):
        return torch.nn.functional.interpolate(sure, batch.shape[-2:], mode="bilinear")

    shrunk, elsewhere, large = torch.zeros(4, 40, 40), torch.zeros(4, 40, 40), torch.zeros(4, 40, 40)
    shrunk[:, 18:21, 18:21] = 1
    elsewhere[:, 32:39, 32:39] = 1
    large[:, 20:, :] = 1
    guard = Guard(CONFIG, method("source"), method("tesla"))
    monkeypatch.setattr(guard.method, "probabilities", same)
    monkeypatch.setattr(guard.source, "probabilities", same)
    assert guard.judge(images, sure, sure).trusted
    for mask in (shrunk, elsewhere, large):
        verdict = guard.judge(images, sure, probabilities_of(mask))
        assert verdict.used != "adapted"
        assert verdict.collapsed


def test_the_support_is_that_of_the_mask_that_is_taken(make_images, monkeypatch):
    """Mask, others and views of the support must be those of the candidate the verdict names."""
    images = make_images(4, 40, 40)
    boxes = {"source": (0, 10), "own": (0, 8), "half": (0, 9), "adapted": (0, 30)}
    small = {"source": (0, 10), "own": (0, 4), "half": (0, 3), "adapted": (0, 12)}
    large = {"source": (0, 9), "own": (0, 5), "half": (0, 7), "adapted": (0, 20)}
    named, smaller, larger = masks_of(boxes), masks_of(small), masks_of(large)
    masks = dict(named)
    for name in NAMES:
        masks |= {f"{name}@{ZOOMS[0]}": smaller[name], f"{name}@{ZOOMS[1]}": larger[name]}
    guard = Guard(CONFIG, method("source"), method("tesla"))
    monkeypatch.setattr(guard, "look", lambda *_: ({}, masks))
    nothing = torch.zeros(4, 2, 40, 40)
    for name in NAMES:
        monkeypatch.setattr("tesla_med.engine.guard.judge", lambda *_, name=name: VERDICTS[name])
        found = guard.judge(images, nothing, nothing).signals["support_1"]
        others = [agreement(named[name], named[other], 2) for other in NAMES if other != name]
        parts = {"agreement": max(others)}
        parts["smaller"] = agreement(named[name], smaller[name], 2)
        parts["larger"] = agreement(named[name], larger[name], 2)
        assert found == pytest.approx(joined(parts))


def test_the_mask_half_way_supports_none():
    """It lies near source and adapted by its making, so that its agreement would say nothing."""
    boxes = {"source": (0, 10), "own": (0, 8), "half": (0, 9), "part": (0, 20), "adapted": (0, 20)}
    masks = masks_of({f"{name}{view}": box for name, box in boxes.items() for view in ("", "@0.85", "@1.2")})
    parts = {"smaller": 1.0, "larger": 1.0, "agreement": agreement(masks["adapted"], masks["source"], 2)}
    assert parts["agreement"] == pytest.approx(2 / 3)
    assert supports_of(masks, "adapted", 2)["support_1"] == pytest.approx(joined(parts))
    few = {name: mask for name, mask in masks.items() if not name.startswith(("own", "half"))}
    assert supports_of(few, "adapted", 2)["support_1"] == pytest.approx(1.0)  # without them it must speak


def test_every_pair_of_masks_is_compared():
    masks = masks_of({"source": (0, 4), "own": (2, 12), "half": (3, 30), "adapted": (1, 7)})
    views = {f"{name}@{zoom}": mask for name, mask in masks.items() for zoom in ZOOMS}
    signals = compared(masks | views, NAMES, 2)
    pairs = [(one, two) for index, one in enumerate(NAMES) for two in NAMES[index + 1 :]]
    found = [signals[f"agreement_{one}_{two}"] for one, two in pairs]
    assert found == pytest.approx([agreement(masks[one], masks[two], 2) for one, two in pairs])
    assert len(set(found)) == len(pairs) == 6


def test_every_class_has_a_support_of_its_own():
    boxes = {"source": (0, 10), "own": (0, 10), "adapted": (0, 5)}
    masks = masks_of({f"{name}{view}": box for name, box in boxes.items() for view in ("", "@0.85", "@1.2")})
    for name, mask in masks.items():
        mask[:, :, 20 : 26 if name.startswith("adapted") else 30] = 2
    found = supports_of(masks, "adapted", 3)
    closest = {"support_1": 2 * 5 / 15, "support_2": 2 * 6 / 16}
    for name, value in closest.items():
        assert found[name] == pytest.approx(joined({"smaller": 1.0, "larger": 1.0, "agreement": value}))


def test_every_class_is_supported_however_low_the_slices_are(make_images):
    images, probs = make_images(3, 2, 32), torch.rand(3, 4, 2, 32).softmax(dim=1)
    source, ours = (make_source(UNet(1, 4, 4).eval()) for _ in range(2))
    found = Guard(CONFIG, source, ours).judge(images, probs, probs).signals
    assert {name for name in found if name.startswith("support_")} == {"support_1", "support_2", "support_3"}


def test_masks_are_judged_as_they_will_be_written(make_images):
    """A small component beside the body is dropped before masks are compared."""
    images = make_images(4, 40, 40)
    body, other = torch.zeros(4, 40, 40), torch.zeros(4, 40, 40)
    body[:, 10:30, 10:30] = 1
    other[:, 10:30, 10:30] = 1
    other[:, 34:39, 2:39] = 1
    sources = method("source"), method("tesla")
    plain = Guard(CONFIG, *sources).look(images, probabilities_of(body), probabilities_of(other))[0]
    largest = Guard(CONFIG, *sources, largest=True)
    signals, masks = largest.look(images, probabilities_of(body), probabilities_of(other))
    assert plain["agreement_source_adapted"] < 0.9
    assert signals["agreement_source_adapted"] == 1.0
    assert torch.equal(masks["adapted"], body.long())
    assert signals["components_adapted"] == 2


def test_the_largest_component_of_a_tensor():
    mask = torch.zeros(3, 8, 8, dtype=torch.long)
    assert not largest_of(mask).any()
    mask[0, :2, :2] = 1
    mask[1:, 4:8, 4:7] = 2
    kept = largest_of(mask)
    assert kept[0].sum() == 0
    assert torch.equal(kept[1:], mask[1:])
    assert kept.dtype == mask.dtype
    assert np.array_equal(kept.numpy(), keep_largest(mask.numpy()))


def test_consistency_is_relative_to_that_of_the_training():
    boxes = {"source": (0, 10), f"source@{ZOOMS[0]}": (0, 4), f"source@{ZOOMS[1]}": (0, 6)}
    boxes |= {name.replace("source", "adapted"): box for name, box in boxes.items()}
    masks = masks_of(boxes)
    plain = [8 / 14, 12 / 16]
    for usual in ((1.0, 1.0), (0.9, 0.8), (0.5, 0.2)):
        want = [min(value / share, 1.0) for value, share in zip(plain, usual, strict=True)]
        found = compared(masks, ("source", "adapted"), 2, usual)
        assert found["consistency_source"] == pytest.approx(sum(want) / 2)
        parts = {"smaller": plain[0], "larger": plain[1], "agreement": 1.0}
        assert supports_of(masks, "source", 2, usual)["support_1"] == pytest.approx(joined(parts, usual))


def test_a_guard_uses_the_steadiness_it_is_told(make_images, monkeypatch):
    images, body = make_images(4, 40, 40), torch.zeros(4, 40, 40)
    body[:, 10:30, 10:30] = 1
    monkeypatch.setattr("tesla_med.engine.guard.zoomed_mask", lambda *_: body.long().roll(8, dims=2))
    values = []
    for steadiness in ((1.0, 1.0), (0.8, 0.8)):
        guard = Guard(CONFIG, method("source"), method("tesla"), steadiness=steadiness)
        values.append(guard.judge(images, probabilities_of(body), probabilities_of(body)).signals)
    assert values[0]["consistency_source"] == pytest.approx(0.6)
    assert values[1]["consistency_source"] == pytest.approx(0.75)
    assert values[0]["support_1"] < values[1]["support_1"]


@pytest.mark.parametrize("zoom", ZOOMS)
def test_the_network_sees_larger_or_smaller_slices_and_the_mask_comes_back(zoom, monkeypatch):
    source, seen = method("source"), []
    images = torch.zeros(2, 1, 40, 60)
    images[:, :, 10:30, 20:50] = 1.0

    def threshold(network, batch):
        seen.append(batch)
        return probabilities_of(batch[:, 0] > 0.5)

    monkeypatch.setattr(source, "probabilities", threshold)
    found = zoomed_mask(source, source.model, images, zoom)
    assert seen[0].shape == (2, 1, round(40 * zoom), round(60 * zoom))
    assert float((seen[0] > 0.5).float().mean()) == pytest.approx(20 * 30 / (40 * 60), rel=0.12)
    assert agreement(found, (images[:, 0] > 0.5).long(), 2) > 0.92


def test_supports_are_among_the_signals(make_images):
    source, ours = method("source"), method("tesla", {"batch_slices": 4, "learning_rate": 0.01})
    images = make_images(4, 32, 32)
    ours.adapt(images)
    guard = Guard(CONFIG, source, ours)
    verdict = guard.judge(images, source.predict(images), ours.predict(images))
    assert 0 <= verdict.signals["support_1"] <= 1


# ------------------------------------------------------------ signals


def test_agreement_by_hand():
    one = torch.tensor([[[0, 1, 1, 2]]])
    two = torch.tensor([[[0, 1, 0, 2]]])
    assert agreement(one, two, 3) == pytest.approx((2 / 3 + 1) / 2)
    assert agreement(one, one, 3) == 1.0
    assert agreement(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), 2) == 1.0
    assert agreement(one, torch.zeros_like(one), 3) == 0.0


def test_shape_of_a_body():
    mask = torch.zeros(5, 10, 20, dtype=torch.bool)
    assert set(stack_shape(mask).values()) == {0.0}
    mask[1, 2:4, 5:10] = True
    mask[2, 2:6, 5:10] = True
    mask[3, 4:6, 5:10] = True
    shape = stack_shape(mask)
    assert shape["components"] == 1
    assert shape["largest_component"] == 1.0
    assert area_change(mask) == pytest.approx(1.0)
    assert shape["centroid_jump"] == pytest.approx(0.1)
    mask[0, 9, 19] = True
    shape = stack_shape(mask)
    assert shape["components"] == 2
    assert shape["largest_component"] == pytest.approx(40 / 41)


def test_distance_of_statistics():
    one = [(torch.zeros(3), torch.ones(3))]
    two = [(torch.full((3,), 2.0), torch.ones(3))]
    assert statistics_distance(one, one) == 0.0
    assert statistics_distance(one, two) == pytest.approx(4.0)
    assert statistics_distance(one, two) == pytest.approx(statistics_distance(two, one))
    assert statistics_distance([], []) == 0.0


def test_a_mask_of_two_parts_is_seen_in_its_signals():
    masks = masks_of({f"{name}{view}": (0, 8) for name in NAMES for view in ("", "@0.85", "@1.2")})
    masks = {name: mask[:1].repeat(9, 1, 1) for name, mask in masks.items()}
    masks["adapted"][4, :, 2:] = 0
    signals = compared(masks, NAMES, 2)
    assert signals["narrowing_adapted"] == pytest.approx(0.25)
    assert {signals[f"narrowing_{name}"] for name in NAMES if name != "adapted"} == {1.0}


@pytest.mark.parametrize("zoom", ZOOMS)
def test_slices_of_a_volume_are_zoomed_as_slices_are(zoom, monkeypatch):
    source = method("source")
    monkeypatch.setattr(
        source,
        "probabilities",
        lambda network, batch: torch.cat([0.5 - 0 * batch, batch], dim=1),  # foreground above a half
    )
    slices = torch.zeros(3, 1, 40, 60)
    for index, side in enumerate((10, 20, 30)):
        slices[index, :, 5 : 5 + side, 8 : 8 + side] = 1.0
    volume = slices.movedim(0, 1)[None]
    assert volume.shape == (1, 1, 3, 40, 60)
    plain = zoomed_mask(source, source.model, slices, zoom)
    assert torch.equal(zoomed_mask(source, source.model, volume, zoom), plain)
    assert agreement(plain, (slices[:, 0] > 0.5).long(), 2) > 0.9


def test_what_judging_costs_is_about_what_is_computed(make_images, monkeypatch):
    """In pixels of slices that go through a network, whatever their size."""
    images, seen = make_images(6, 32, 32), []
    source, ours = method("source"), method("tesla", {"predict_statistics": "volume"})
    for item in (source, ours):
        logits = item.logits

        def counted(network, batch, logits=logits):
            seen.append(batch.shape[0] * batch[0, 0].numel())
            return logits(network, batch)

        monkeypatch.setattr(item, "logits", counted)
    probs = source.predict(images), ours.predict(images)
    for names in (("source", "adapted"), ("source", "own", "half", "adapted")):
        guard = Guard(CONFIG.model_copy(update={"candidates": names}), source, ours)
        seen.clear()
        guard.look(images, *probs)
        guard.probabilities(images, VERDICTS["source"])
        assert guard.passes(6) == pytest.approx(sum(seen) / (32 * 32), rel=0.05)


def test_the_mixed_candidate_is_the_adapted_network_under_mixed_statistics(make_images):
    ours, images = method("tesla", {"learning_rate": 0.01}), make_images(4, 32, 32)
    ours.adapt(images)
    guard = Guard(CONFIG, method("source"), ours)
    with guard.deployed(images, VERDICTS["mixed"]) as network:
        for now, adapted in zip(network.parameters(), ours.predictor.parameters(), strict=True):
            assert torch.equal(now, adapted)
        mixed = [item.clone() for item, _ in running_statistics(network)]
    own = [item for item, _ in running_statistics(ours.predictor)]
    assert not any(torch.equal(*pair) for pair in zip(mixed, own, strict=True))


def test_signals_of_an_unmoved_method(make_images):
    source, ours = method("source"), method("source")
    images = make_images(3, 32, 32)
    probs = source.predict(images)
    before = [item.clone() for pair in running_statistics(source.model) for item in pair]
    signals, masks = Guard(CONFIG, source, ours).look(images, probs, probs)
    assert torch.equal(masks["source"], probs.argmax(1))
    assert signals["agreement_source_adapted"] == 1.0
    assert signals["weights_moved"] == 0.0
    assert signals["statistics_distance"] > 0
    assert signals["consistency_source"] == signals["consistency_adapted"]
    assert all(np.isfinite(value) for value in signals.values())
    now = [item for pair in running_statistics(source.model) for item in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


@pytest.mark.parametrize("norm", ["instance", "group"])
def test_a_network_without_batch_norm_can_be_judged(norm, make_images):
    model = UNet(1, 2, 4, norm).eval()
    assert not norm_layers(model)
    guard = Guard(CONFIG, *(make_source(model) for _ in range(2)))
    assert guard.candidates == ("source", "part", "adapted")
    images = make_images(3, 32, 32)
    probs = guard.source.predict(images)
    verdict = guard.judge(images, probs, probs)
    assert verdict.signals["statistics_distance"] == 0.0
    assert verdict.signals["agreement_part_adapted"] == 1.0


def make_source(model):
    return make_method("source", model, {}, context())


# ------------------------------------------------------------ partial steps


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_between_is_in_between_and_undone(share):
    ours, source = network(1), network(2)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    with between(ours, source, share):
        for name, value in ours.state_dict().items():
            if value.is_floating_point():
                want = torch.lerp(source.state_dict()[name], before[name], share)
                assert torch.allclose(value, want, atol=1e-6)
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


def test_between_is_undone_after_an_error():
    ours, source = network(1), network(2)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    with pytest.raises(KeyError), between(ours, source, 0.5):
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_the_partial_network_repeats_its_probabilities(share, make_images):
    params = {"batch_slices": 4, "learning_rate": 0.01, "predict_statistics": "volume"}
    ours, images = method("tesla", params), make_images(4, 32, 32)
    predictor = CasePredictor(method("source"), ours, Driver(ours, "N-O", "case"), CONFIG)
    for _ in range(3):
        ours.adapt(images)
    verdict = Verdict(share, "")
    probs = predictor.guard.probabilities(images, verdict)
    with predictor.deployed(images, verdict) as deployed:
        again = make_method("source", deployed, {}, context()).predict(images)
    assert torch.allclose(probs, again, atol=1e-6)
    if share == 1.0:
        assert torch.allclose(probs, ours.predict(images), atol=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_source_with_own_statistics_repeats_its_probabilities(share, make_images):
    ours, images = method("tesla", {"batch_slices": 4, "learning_rate": 0.01}), make_images(4, 32, 32)
    source = method("source")
    predictor = CasePredictor(source, ours, Driver(ours, "N-O", "case"), CONFIG)
    ours.adapt(images)
    before = source.predict(images)
    verdict = Verdict(0.0, "", statistics=share)
    probs = predictor.guard.probabilities(images, verdict)
    with predictor.deployed(images, verdict) as deployed:
        again = make_method("source", deployed, {}, context()).predict(images)
    assert torch.allclose(probs, again, atol=1e-6)
    bn = method("bn", {"target_share": share})
    bn.adapt(images)
    assert torch.allclose(probs, bn.predict(images), atol=1e-5)
    assert not torch.allclose(probs, before, atol=1e-3)
    assert torch.equal(before, source.predict(images))


# ------------------------------------------------------------ a case


def predictor_with(verdicts, monkeypatch, reset="site"):
    source, ours = method("source"), method("tesla", {"batch_slices": 4, "learning_rate": 0.01})
    predictor = CasePredictor(source, ours, Driver(ours, "N-O", reset), CONFIG)
    given = iter(verdicts)
    monkeypatch.setattr(predictor.guard, "judge", lambda *_: next(given))
    return predictor


def weights_of(ours):
    return torch.cat([item.flatten() for item in ours.teacher.parameters()]).clone()


@pytest.mark.parametrize("collapsed", [True, False])
def test_a_collapsed_case_leaves_no_trace(collapsed, make_images, monkeypatch):
    bad = Verdict(0.0, "not this one", collapsed=collapsed)
    predictor = predictor_with([Verdict(1.0, ""), bad], monkeypatch)
    predictor(make_images(4, 32, 32))
    before = weights_of(predictor.method)
    images = make_images(4, 32, 32) ** 2
    outcome = predictor(images)
    assert torch.equal(outcome.probs, outcome.source)
    assert torch.equal(before, weights_of(predictor.method)) == collapsed


def test_without_guard_the_adapted_probabilities_are_taken(make_images):
    source, ours = method("source"), method("tesla", {"batch_slices": 4, "learning_rate": 0.01})
    predictor = CasePredictor(source, ours, Driver(ours, "N-O", "case"), GuardConfig())
    images = make_images(4, 32, 32)
    outcome = predictor(images)
    assert predictor.guard is None
    assert (outcome.verdict.share, outcome.verdict.signals) == (1.0, {})
    assert torch.equal(outcome.probs, ours.predict(images))


def test_what_is_not_finite_is_the_source(make_images, monkeypatch):
    predictor = predictor_with([], monkeypatch)
    monkeypatch.setattr(predictor.driver, "adapt_and_predict", lambda *_: None)
    outcome = predictor(make_images(4, 32, 32))
    assert outcome.verdict.collapsed
    assert "not finite" in outcome.verdict.reason
    assert torch.equal(outcome.probs, outcome.source)


# ------------------------------------------------------------ finished masks


def test_the_largest_component_stays():
    mask = np.zeros((8, 8, 4), np.uint16)
    mask[1:4, 1:4, 1:3] = 2
    mask[4, 4, 3] = 300  # touches at a corner
    mask[7, 7, 0] = 2
    kept = keep_largest(mask)
    assert kept.dtype == mask.dtype
    assert kept[7, 7, 0] == 0
    mask[7, 7, 0] = 0
    assert np.array_equal(kept, mask)
    assert not keep_largest(np.zeros((3, 3, 3), np.uint8)).any()


def test_masks_are_judged_without_fill(make_images):
    """Foreground in fill is none, and shares are of what was measured, also where nothing was."""
    images, body = make_images(4, 40, 40), torch.zeros(4, 40, 40)
    body[:, 10:30, 10:30] = 1
    probs, guard = probabilities_of(body), Guard(CONFIG, method("source"), method("tesla"))
    half = torch.zeros(body.shape, dtype=torch.bool)
    half[:, :20] = True
    for fill in (half, torch.ones_like(half)):
        signals, masks = guard.look(images, probs, probs, fill)
        assert all(not mask[fill].any() for mask in masks.values())
        measured = max(int((~fill).sum()), 1)
        assert signals["foreground_source"] == pytest.approx(int((masks["source"] > 0).sum()) / measured)
        assert guard.judge(images, probs, probs, fill).signals["foreground_source"] <= 1
