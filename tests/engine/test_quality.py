"""Predicted Dice: support by hand, the estimate, the audit, and the report's files."""

import json
import math

import pytest
import torch

from tesla_med.config.models import QualityConfig
from tesla_med.engine.quality import (
    SHARES,
    audit,
    class_agreement,
    feature,
    joined,
    needs_review,
    predicted_dice,
    support,
    usual_dice,
    with_estimates,
)
from tesla_med.records import CaseResult, ClassScore

CONFIG = QualityConfig(intercept=0.5, slope=0.1, half_width=0.05, review_below=0.75, fitted_on="phantoms")


def masks(*rows):
    return [torch.tensor([[row]]) for row in rows]


def score(true=None, predicted=None, low=None, high=None, label=1):
    return ClassScore(
        label=label,
        name="gland",
        dice=true,
        predicted_dice=predicted,
        predicted_low=low,
        predicted_high=high,
    )


def result(name, *scores):
    return CaseResult(
        case=name,
        site="X",
        method="tesla",
        protocol="N-O",
        seed=0,
        status="ok",
        used="adapted",
        scores=scores,
    )


def test_support_by_hand():
    ours, near, far, moved = masks([0, 1, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 0])
    assert class_agreement(ours, near, 1) == pytest.approx(0.8)
    assert class_agreement(ours, far, 1) == 0.0
    assert class_agreement(ours, near, 2) is None
    found = support(ours, [near, far], ours, moved, 1)
    assert found == pytest.approx(1.02 - 0.02**0.36 * (1.02 - 2 / 3) ** 0.14 * (1.02 - 0.8) ** 0.5)
    assert support(ours, [near, far], ours, moved, 2) is None
    assert support(ours, [ours], ours, ours, 1) == pytest.approx(1.0)
    assert support(ours, [], far, far, 1) == pytest.approx(0.0)


@pytest.mark.parametrize("name", SHARES)
def test_every_part_of_the_support_counts(name):
    parts = dict.fromkeys(SHARES, 0.9)
    assert joined(parts) == pytest.approx(0.9)
    assert joined(parts | {name: 0.5}) < 0.9 < joined(parts | {name: 1.0})
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_a_part_counts_relative_to_the_usual_value_and_less_the_lower_that_is():
    parts = {"larger": 0.45, "smaller": 0.9, "agreement": 0.8}
    shares = {"larger": 0.36 * 0.5**3, "smaller": 0.14, "agreement": 0.5}
    logs = {
        "larger": math.log(1.02 - 0.9),
        "smaller": math.log(1.02 - 0.9),
        "agreement": math.log(1.02 - 0.8),
    }
    want = sum(shares[name] * logs[name] for name in parts) / sum(shares.values())
    assert joined(parts, (1.0, 0.5)) == pytest.approx(1.02 - math.exp(want))
    assert joined(parts | {"larger": 0.0, "smaller": 0.0}, (0.0, 0.0)) == pytest.approx(0.8)


def test_a_network_that_is_poor_at_home_is_not_expected_to_be_better_elsewhere():
    poor = CONFIG.model_copy(update={"source_dice": 0.5})
    usual = 0.88 - 0.38 / 3
    assert predicted_dice(0.9, poor).dice == pytest.approx(0.5 + 0.1 * usual * 0.81)
    assert [usual_dice(value) for value in (None, 0.88, 1.0)] == pytest.approx([0.88, 0.88, 0.92])


def test_the_estimate_is_linear_in_the_feature():
    assert feature(1.0) == 1.0
    assert feature(0.5) == 0.25
    assert feature(2.0) == feature(1.0)
    found = predicted_dice(0.9, CONFIG)
    assert found.dice == pytest.approx(0.5 + 0.1 * 0.88 * 0.81)
    assert (found.low, found.high) == (pytest.approx(found.dice - 0.05), pytest.approx(found.dice + 0.05))
    assert predicted_dice(0.9, QualityConfig()) is None


def test_the_interval_widens_as_the_estimate_falls():
    config = CONFIG.model_copy(update={"intercept": 0.0, "slope": 1.0, "growth": 0.4})
    for value in (0.9, 0.7):
        found = predicted_dice(value, config)
        assert found.high - found.dice == pytest.approx(0.05 + 0.4 * (1 - 0.88 * value**2))
        assert found.dice - found.low == pytest.approx(found.high - found.dice)


def test_estimates_stay_in_range():
    wide = CONFIG.model_copy(update={"intercept": 0.9, "slope": 0.3, "half_width": 0.5})
    found = predicted_dice(1.0, wide)
    assert (found.dice, found.high) == (1.0, 1.0)
    low = predicted_dice(0.0, CONFIG.model_copy(update={"intercept": -3.0}))
    assert (low.dice, low.low, low.high) == (0.0, 0.0, 0.05)


def test_every_class_gets_its_own_estimate():
    scores = with_estimates([score(label=5), score(label=9)], {"support_2": 0.9}, CONFIG)
    assert scores[0].predicted_dice is None
    assert scores[1].predicted_dice == predicted_dice(0.9, CONFIG).dice
    assert scores[1].predicted_low == predicted_dice(0.9, CONFIG).low
    assert with_estimates([score()], {"support_1": 0.9}, QualityConfig()) == (score(),)


def test_one_poor_class_is_enough_for_a_review():
    assert needs_review(result("a", score(predicted=0.9), score(predicted=0.7)), CONFIG)
    assert not needs_review(result("a", score(predicted=0.9)), CONFIG)
    assert not needs_review(result("a", score()), CONFIG)


def test_audit_by_hand():
    rows = [(0.9, 0.8, 0.7, 0.95), (0.5, 0.6, 0.4, 0.7), (0.7, 0.9, 0.8, 1.0)]
    cases = [result(str(number), score(*row)) for number, row in enumerate(rows)]
    found = audit([*cases, result("unscored", score(None, 0.8, 0.7, 0.9)), result("plain", score(0.7))])
    assert found.pairs == 3
    assert found.mean_error == pytest.approx(0.4 / 3)
    assert found.coverage == pytest.approx(2 / 3)
    assert found.correlation == pytest.approx(0.654654, abs=1e-5)
    assert audit(cases[:2]).correlation is None
    assert audit([]).coverage is None


def test_the_estimate_follows_the_damage(make_images):
    """On masks that agree less and less, the predicted Dice falls."""
    truth = torch.zeros(1, 32, 32, dtype=torch.long)
    truth[:, 8:24, 8:24] = 1
    values = []
    for shift in range(5):
        moved = truth.roll(shift, dims=1)
        values.append(predicted_dice(support(truth, [moved], moved, moved, 1), CONFIG).dice)
    assert values == sorted(values, reverse=True)
    assert values[0] - values[-1] > 0.03


def test_files_of_the_report(tmp_path):
    from made_up_runs import run_context

    from tesla_med.reports.base import make_reports

    run = run_context(tmp_path)
    report = make_reports(["quality"], run)[0]
    cases = [result("a", score(0.9, 0.8, 0.7, 0.95)), result("b", score(None, 0.6, 0.5, 0.7))]
    files = report.finish(cases)
    assert [path.name for path in files] == ["predicted_dice.json", "predicted_dice.png"]
    content = json.loads(files[0].read_text())
    assert content["review"] == ["b"]
    assert content["audit"]["pairs"] == 1
    assert [item["predicted_dice"] for item in content["cases"]] == [0.8, 0.6]
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in report.finish(cases[1:])] == ["predicted_dice.json"]
    assert not files[1].exists()


# ------------------------------------------------------------ the program that fits


@pytest.fixture(scope="module")
def program():
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[2] / "benchmarks" / "quality.py"
    spec = importlib.util.spec_from_file_location("benchmark_quality", path)
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def made_up(program, noise=0.0):
    pairs = []
    for number in range(40):
        value = 0.5 + 0.012 * number
        dice = 0.4 + 0.12 * feature(value) + (noise if number % 2 else -noise)
        pairs.append(program.Pair(f"site {number % 4}", str(number), value, dice))
    return pairs


def test_the_fit_finds_the_line(program):
    intercept, slope, half, growth = program.fit(made_up(program, 0.02))
    assert intercept == pytest.approx(0.4, abs=0.01)
    assert slope * 0.88 == pytest.approx(0.12, abs=0.02)
    assert half + growth * 0.5 == pytest.approx(0.025, abs=0.01)


def test_the_width_follows_the_residuals(program):
    """Residuals that grow as the prediction falls give an interval that does, and holds 90 % everywhere."""
    pairs = []
    for number in range(120):
        value = (0.2 + 0.8 * number / 120) ** 0.5
        noise = (0.02 + 0.3 * (1 - value**2)) * (1 if number % 2 else -1) * (number % 7) / 6
        pairs.append(program.Pair(f"site {number % 4}", str(number), value, value**2 + noise))
    _, _, half, growth = program.fit(pairs)
    assert 0.1 < growth < 0.5
    assert half < 0.08
    judged = program.cross_validated(pairs)
    assert 85 <= judged["coverage_percent"] <= 98


def test_each_group_is_predicted_from_the_others(program):
    pairs = made_up(program)
    shifted = [
        program.Pair(pair.group, pair.case, pair.support, pair.dice - (0.2 if pair.group == "site 0" else 0))
        for pair in pairs
    ]
    clean = program.cross_validated(pairs)
    assert clean["correlation"] == pytest.approx(1.0)
    assert clean["mean_error_points"] == pytest.approx(0.0, abs=1e-9)
    odd = program.cross_validated(shifted)["groups"]["site 0"]
    assert odd["mean_error_points"] == pytest.approx(20.0, abs=0.1)  # it was not fitted on itself
    assert odd["coverage_percent"] == 0.0


def test_the_zoo_is_read_candidate_by_candidate(program, tmp_path):
    classes = [{"dice": 0.8, "support": 0.9}, {"dice": None, "support": 0.9}, {"dice": 0.7, "support": None}]
    row = {
        "model": "m",
        "site": "s",
        "case": "a",
        "source_dice": 0.9,
        "candidates": {"own": {"classes": classes}},
    }
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "m-1.json").write_text(json.dumps({"volumes": [row]}))
    (pair,) = program.read_zoo(tmp_path)
    assert (pair.group, pair.case, pair.support, pair.dice, pair.source_dice) == ("m/s", "a", 0.9, 0.8, 0.9)


def test_runs_are_read_class_by_class(program, tmp_path):
    record = result("a", score(0.9, label=1), score(None, label=2), score(0.7, label=3))
    record = record.model_copy(update={"signals": {"support_1": 0.8, "support_2": 0.9}})
    folder = tmp_path / ".cases"
    folder.mkdir()
    (folder / "a.json").write_text(record.model_dump_json())
    pairs = program.read_runs([tmp_path])
    assert [(pair.case, pair.support, pair.dice) for pair in pairs] == [("a", 0.8, 0.9)]
    judged = program.with_coefficients(pairs, CONFIG)
    assert judged["pairs"] == 1
    with pytest.raises(SystemExit, match="no coefficients"):
        program.with_coefficients(pairs, QualityConfig())


def test_no_dice_above_one_is_predicted():
    config = QualityConfig(intercept=0.5, slope=1.0, half_width=0.1, growth=0.5)
    found = predicted_dice(1.0, config)
    assert (found.dice, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.9)
