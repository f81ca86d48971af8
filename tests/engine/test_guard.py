"""The guard: signals by hand, each rule, partial steps, and that a collapse leaves no trace."""

import numpy as np
import pytest
import torch

from tesla_med.config.models import GuardConfig
from tesla_med.engine.driver import Driver
from tesla_med.engine.guard import (
    Guard,
    agreement,
    between,
    judge,
    region_entropy,
    stack_shape,
    statistics_distance,
)
from tesla_med.engine.postprocess import keep_largest
from tesla_med.engine.predictor import Predictor as CasePredictor
from tesla_med.models.base import norm_layers
from tesla_med.models.normalisation import running_statistics
from tesla_med.models.unet import UNet
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Verdict

CONFIG = GuardConfig(enabled=True)
GOOD = {
    "agreement_source_adapted": 0.8,
    "agreement_source_own": 0.85,
    "agreement_own_adapted": 0.9,
    "entropy_source": 0.2,
    "entropy_own": 0.15,
    "entropy_adapted": 0.1,
    "foreground_source": 0.02,
    "foreground_own": 0.02,
    "foreground_adapted": 0.02,
    "statistics_distance": 0.1,
}


def network(seed=0):
    torch.manual_seed(seed)
    return UNet(1, 2, 4).eval()


def context():
    return MethodContext(torch.device("cpu"), seed=3)


def method(name="tesla", params=None):
    return make_method(name, network(), params or {}, context())


# ------------------------------------------------------------ rules


@pytest.mark.parametrize(
    ("change", "share", "collapsed", "words"),
    [
        ({}, 1.0, False, ""),
        ({"foreground_adapted": 0.0}, 0.0, True, "empty"),
        ({"foreground_adapted": 0.0, "foreground_source": 0.0}, 1.0, False, ""),
        ({"foreground_adapted": 0.7}, 0.0, True, "70 % of the field"),
        ({"foreground_source": 0.001, "agreement_source_adapted": 0.05}, 1.0, False, "misses"),
        (
            {
                "foreground_source": 0.001,
                "agreement_source_adapted": 0.05,
                "agreement_own_adapted": 0.2,
            },
            0.0,
            True,
            "masks do not agree",
        ),
        ({"agreement_source_own": 0.98}, 0.0, False, "no shift"),
        ({"agreement_source_own": 0.98, "statistics_distance": 0.0}, 1.0, False, ""),
        ({"entropy_adapted": 0.187, "entropy_own": 0.16}, 0.0, False, "hardly more certain"),
        ({"entropy_own": 0.26}, 0.0, False, "do not fit"),
        ({"entropy_own": 0.26, "statistics_distance": 0.0}, 1.0, False, ""),
        ({"agreement_source_adapted": 0.95}, 0.5, False, "50 % of the way"),
        ({"agreement_source_adapted": 0.95, "entropy_adapted": 0.15}, 0.25, False, "25 % of the way"),
    ],
)
def test_rules(change, share, collapsed, words):
    verdict = judge(GOOD | change, CONFIG)
    assert (verdict.share, verdict.collapsed) == (share, collapsed)
    assert words in verdict.reason
    assert bool(words) == bool(verdict.reason)
    assert verdict.used == {0.0: "source", 1.0: "adapted"}.get(share, "partial")
    assert verdict.signals == GOOD | change


def test_own_statistics_are_taken_where_they_help_and_adaptation_does_not():
    verdict = judge(GOOD | {"entropy_adapted": 0.21, "entropy_own": 0.1}, CONFIG)
    assert (verdict.used, verdict.share, verdict.statistics) == ("partial", 0.0, True)
    assert "own statistics" in verdict.reason


def test_supports_are_among_the_signals(make_images):
    source, ours = method("source"), method("tesla", {"batch_slices": 4, "learning_rate": 0.01})
    images = make_images(4, 32, 32)
    ours.adapt(images)
    guard = Guard(CONFIG, source, ours)
    verdict = guard.judge(images, source.predict(images), ours.predict(images))
    assert 0 <= verdict.signals["support_1"] <= 1


def test_a_certain_but_blind_source_is_not_trusted():
    blind = {
        "entropy_source": 0.001,
        "foreground_source": 0.0,
        "agreement_source_adapted": 0.0,
        "agreement_source_own": 0.0,
    }
    assert judge(GOOD | blind, CONFIG).share == 1.0


# ------------------------------------------------------------ signals


def test_agreement_by_hand():
    one = torch.tensor([[[0, 1, 1, 2]]])
    two = torch.tensor([[[0, 1, 0, 2]]])
    assert agreement(one, two, 3) == pytest.approx((2 / 3 + 1) / 2)
    assert agreement(one, one, 3) == 1.0
    assert agreement(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), 2) == 1.0
    assert agreement(one, torch.zeros_like(one), 3) == 0.0


def test_region_entropy_by_hand():
    probs = torch.tensor([0.5, 1.0]).view(1, 1, 1, 2)
    probs = torch.cat([probs, 1 - probs], dim=1)
    assert region_entropy(probs, torch.tensor([[[True, False]]])) == pytest.approx(1.0)
    assert region_entropy(probs, torch.tensor([[[True, True]]])) == pytest.approx(0.5)
    assert region_entropy(probs, torch.zeros(1, 1, 2, dtype=torch.bool)) == 0.0


def test_shape_of_a_body():
    mask = torch.zeros(5, 10, 20, dtype=torch.bool)
    assert set(stack_shape(mask).values()) == {0.0}
    mask[1, 2:4, 5:10] = True
    mask[2, 2:6, 5:10] = True
    mask[3, 4:6, 5:10] = True
    shape = stack_shape(mask)
    assert shape["components"] == 1
    assert shape["largest_component"] == 1.0
    assert shape["area_change"] == pytest.approx(1.0)
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
    assert signals["entropy_source"] == signals["entropy_adapted"]
    assert all(np.isfinite(value) for value in signals.values())
    now = [item for pair in running_statistics(source.model) for item in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_a_network_without_norms_can_be_judged(make_images):
    class Plain(UNet):
        pass

    model = Plain(1, 2, 4)
    for child in list(model.modules()):
        if isinstance(child, torch.nn.Sequential):
            for index, layer in enumerate(child):
                if isinstance(layer, torch.nn.BatchNorm2d):
                    child[index] = torch.nn.GroupNorm(1, layer.num_features)
    assert not norm_layers(model)
    guard = Guard(CONFIG, *(make_source(model) for _ in range(2)))
    assert guard._normalised is False


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


def test_the_source_with_own_statistics_repeats_its_probabilities(make_images):
    ours, images = method("tesla", {"batch_slices": 4, "learning_rate": 0.01}), make_images(4, 32, 32)
    source = method("source")
    predictor = CasePredictor(source, ours, Driver(ours, "N-O", "case"), CONFIG)
    ours.adapt(images)
    before = source.predict(images)
    verdict = Verdict(0.0, "", statistics=True)
    probs = predictor.guard.probabilities(images, verdict)
    with predictor.deployed(images, verdict) as deployed:
        again = make_method("source", deployed, {}, context()).predict(images)
    assert torch.allclose(probs, again, atol=1e-6)
    bn = method("bn")
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
    change = {"foreground_adapted": 0.0} if collapsed else {"agreement_source_own": 0.99}
    bad = judge(GOOD | change, CONFIG)
    predictor = predictor_with([judge(GOOD, CONFIG), bad], monkeypatch)
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
    monkeypatch.setattr(predictor.driver, "adapt_and_predict", lambda _: None)
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
