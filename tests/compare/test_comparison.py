"""Figures of a comparison by hand: means, deviations, intervals, tests and their correction."""

import numpy as np
import pytest
from scipy import stats

from tesla_med.compare.figures import ACCURACY, AVERAGE, BCA_LIMIT, holm, interval, mcnemar, summarise

ORDER = (("source", "N-O"), ("ours", "N-O"), ("ours", "N-M"))


def row(name, case, dice, *, site="A", seed=0, label=1, protocol="N-O", status="ok"):
    return {
        "row": name, "protocol": protocol, "site": site, "case": case, "seed": seed, "label": label,
        "dice": dice, "status": status,
    }  # fmt: skip


def table(rows, sites=("A", "B"), order=ORDER):
    return summarise(rows, sites=sites, order=order, baseline="source")


ROWS = [
    row("source", "1", 0.8),
    row("source", "2", 0.6),
    row("source", "1", 0.5, site="B"),
    row("ours", "1", 0.9),
    row("ours", "1", 0.7, label=2),
    row("ours", "2", 0.7),
    row("ours", "1", 0.9, seed=1),
    row("ours", "2", 0.9, seed=1),
    row("ours", "1", 0.48, site="B"),
    row("ours", "1", 0.52, site="B", seed=1),
]


def test_means_over_classes_cases_and_seeds():
    result = table(ROWS)
    figure = result.figures["ours", "N-O", "A"]
    assert figure.mean == pytest.approx((0.75 + 0.9) / 2)
    assert figure.std == pytest.approx(np.std([0.75, 0.9], ddof=1))
    assert (figure.cases, figure.seeds) == (2, 2)
    average = result.figures["ours", "N-O", AVERAGE]
    assert average.mean == pytest.approx(((0.75 + 0.48) / 2 + (0.9 + 0.52) / 2) / 2)
    assert average.std == pytest.approx(np.std([(0.75 + 0.48) / 2, (0.9 + 0.52) / 2], ddof=1))
    assert result.figures["source", "N-O", AVERAGE].mean == pytest.approx(0.6)
    assert result.figures["source", "N-O", AVERAGE].std is None


def test_what_was_not_run_is_not_there():
    result = table(ROWS)
    assert not any(key[1] == "N-M" for key in result.figures)
    partly = table([*ROWS, row("ours", "1", 0.9, protocol="N-M")])
    assert ("ours", "N-M", "A") in partly.figures
    assert ("ours", "N-M", AVERAGE) not in partly.figures


def test_pairs_are_cases():
    item = table(ROWS).paired["ours", "N-O"]
    differences = np.array([0.85 - 0.8, 0.8 - 0.6, 0.5 - 0.5])
    assert item.cases == 3
    assert item.difference == pytest.approx(differences.mean())
    assert item.harmed == 0
    assert item.worst == pytest.approx(0.0, abs=1e-12)
    assert ("source", "N-O") not in table(ROWS).paired


def test_wilcoxon_and_harm():
    rng = np.random.default_rng(0)
    before, after = rng.uniform(0.4, 0.9, 12), rng.uniform(0.4, 0.9, 12)
    rows = [row("source", str(i), value) for i, value in enumerate(before)]
    rows += [row("ours", str(i), value) for i, value in enumerate(after)]
    item = table(rows, ("A",)).paired["ours", "N-O"]
    assert item.p == pytest.approx(stats.wilcoxon(after - before).pvalue)
    assert item.harmed == int((after - before < -0.01).sum())
    assert item.low < item.difference < item.high


def test_another_protocol_is_compared_with_the_baselines_own():
    rows = [*ROWS, row("ours", "1", 0.9, protocol="N-M"), row("ours", "2", 0.4, protocol="N-M")]
    item = table(rows).paired["ours", "N-M"]
    assert (item.cases, item.harmed) == (2, 1)


def test_holm_by_hand():
    given = {("a", "O"): 0.01, ("b", "O"): 0.04, ("c", "O"): 0.03, ("d", "O"): None}
    assert holm(given) == {
        ("a", "O"): pytest.approx(0.03),
        ("c", "O"): pytest.approx(0.06),
        ("b", "O"): pytest.approx(0.06),
        ("d", "O"): None,
    }


def test_intervals():
    values = np.random.default_rng(1).normal(0.8, 0.05, 40)
    low, high = interval(values)
    error = values.std(ddof=1) / np.sqrt(40)
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=error / 2)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=error / 2)
    assert interval(values) == (low, high)
    assert interval(values[:1]) == (None, None)
    assert interval(np.full(5, 0.7)) == (0.7, 0.7)


def test_failed_cases_are_counted_once():
    rows = [*ROWS, *(row("ours", "9", None, label=k, status="failed") for k in (1, 2))]
    assert table(rows).failed["ours", "N-O"] == 1


def tile(name, case, right, *, site="A", seed=0, protocol="N-O"):
    status = "ok" if right is not None else "failed"
    return {
        "row": name, "protocol": protocol, "site": site, "case": case, "seed": seed, "right": right,
        "status": status,
    }  # fmt: skip


def test_mcnemar_by_hand():
    before = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0, 1])
    after = np.array([1, 1, 0, 1, 1, 1, 1, 1, 0, 1])  # 5 won, 1 lost
    by_hand = 2 * (1 + 6) / 2**6  # none or one of six, either way
    assert mcnemar(after - before) == pytest.approx(by_hand)
    assert mcnemar(np.array([0.0, 0.3, -0.1, 0.1])) == pytest.approx(1.0)  # shares of seeds: signs count
    assert mcnemar(np.zeros(4)) is None
    assert mcnemar(np.array([1.0])) == 1.0


def test_accuracy_is_the_share_of_tiles_that_are_right():
    right = {"source": [1, 0, 0, 1], "ours": [1, 1, 1, 0]}
    rows = [tile(name, str(i), float(v)) for name, values in right.items() for i, v in enumerate(values)]
    rows += [tile("ours", str(i), 1.0, seed=1) for i in range(4)]
    rows += [tile("ours", "broken", None)]
    found = summarise(rows, sites=("A",), order=ORDER[:2], baseline="source", metric=ACCURACY)
    assert found.figures["source", "N-O", "A"].mean == 0.5
    figure = found.figures["ours", "N-O", "A"]
    assert (figure.mean, figure.seeds, figure.cases) == (0.875, 2, 4)
    assert figure.std == pytest.approx(np.std([0.75, 1.0], ddof=1))
    item = found.paired["ours", "N-O"]
    assert item.difference == pytest.approx(0.375)
    assert item.p == pytest.approx(2 * (1 + 3) / 2**3)  # won two, lost half of one: 2 against 1
    assert item.harmed == 1
    assert found.failed["ours", "N-O"] == 1


def test_intervals_of_many_tiles():
    values = (np.random.default_rng(0).random(BCA_LIMIT + 1) < 0.9).astype(float)
    low, high = interval(values)
    error = np.sqrt(0.9 * 0.1 / len(values))
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=error / 3)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=error / 3)
