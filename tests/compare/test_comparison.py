"""Figures of a comparison by hand: means, deviations, intervals, tests and their correction."""

import numpy as np
import pytest
from scipy import stats

from tesla_med.compare.figures import ACCURACY, summarise
from tesla_med.compare.statistics import AVERAGE, BCA_LIMIT, average, holm, interval, mcnemar

ORDER = (("source", "N-O"), ("ours", "N-O"), ("ours", "N-M"))


def row(name, case, dice, *, site="A", seed=0, label=1, protocol="N-O", status="ok", own=0.6):
    return {
        "row": name, "protocol": protocol, "site": site, "case": case, "seed": seed, "label": label,
        "dice": dice, "dice_source": own, "status": status,
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


def test_sums_in_another_order_are_no_difference():
    """A mean over three seeds that are all 0.7 is not 0.7 to the last bit."""
    cases = [(str(number), 0.1 + 0.031 * number) for number in range(20)]
    rows = [row("source", name, value) for name, value in cases]
    rows += [row("ours", name, value, seed=seed) for name, value in cases for seed in range(3)]
    change = table(rows, sites=("A",)).paired.baseline["ours", "N-O"].sites["A"]
    assert (change.difference, change.p) == (0.0, None)


def test_what_was_not_run_is_not_there():
    result = table(ROWS)
    assert not any(key[1] == "N-M" for key in result.figures)
    partly = table([*ROWS, row("ours", "1", 0.9, protocol="N-M")])
    assert ("ours", "N-M", "A") in partly.figures
    assert ("ours", "N-M", AVERAGE) not in partly.figures


def test_change_is_the_difference_of_the_averages():
    """Sites of two cases and of one: neither level nor change may count the larger site more."""
    result = table(ROWS)
    item = result.paired.baseline["ours", "N-O"]
    by_site = {"A": ((0.85 - 0.8) + (0.8 - 0.6)) / 2, "B": 0.5 - 0.5}
    assert {site: found.difference for site, found in item.sites.items()} == pytest.approx(by_site)
    levels = [result.figures[name, "N-O", AVERAGE].mean for name in ("ours", "source")]
    assert item.average.difference == pytest.approx(levels[0] - levels[1])
    assert item.average.difference == pytest.approx(0.0625)
    assert (item.average.cases, item.sites["A"].cases, item.sites["B"].cases) == (3, 2, 1)
    assert item.other == ("source", "N-O")
    assert ("source", "N-O") not in result.paired.baseline


def test_a_case_that_failed_under_one_seed_counts_as_one_case():
    """The seed of the missing run must not make the other cases count more."""
    rows = [row("ours", "1", 0.2), row("ours", "2", 0.8), row("ours", "2", 0.8, seed=1)]
    assert table(rows, ("A",), ORDER[1:2]).figures["ours", "N-O", "A"].mean == pytest.approx(0.5)


def test_what_is_not_on_every_site_has_no_average():
    rows = [*ROWS, row("ours", "1", 0.9, protocol="N-M"), row("ours", "2", 0.4, protocol="N-M")]
    item = table(rows).paired.baseline["ours", "N-M"]  # against the baseline's own protocol
    assert item.other == ("source", "N-O")
    assert item.sites["A"].difference == pytest.approx(((0.9 - 0.8) + (0.4 - 0.6)) / 2)
    assert (set(item.sites), item.average) == ({"A"}, None)


def drawn(name, before, rng, *, site="A", gain=0.0, **more):
    values = np.clip(before + gain + rng.normal(0, 0.08, len(before)), 0, 1)
    return [row(name, str(i), float(value), site=site, **more) for i, value in enumerate(values)], values


def two_sites():
    """Return tidy rows of three methods at two sites and what they were made from, by row and site."""
    rng = np.random.default_rng(0)
    rows, values = [], {}
    for site, count in (("A", 12), ("B", 7)):
        start = rng.uniform(0.4, 0.8, count)
        for name, gain in (("source", 0.0), ("tent", 0.03), ("ours", 0.1)):
            found, values[name, site] = drawn(name, start, rng, site=site, gain=gain)
            rows += found
    return rows, values


THREE = (("source", "N-O"), ("tent", "N-O"), ("ours", "N-O"))


def test_tests_are_per_site_and_corrected_over_their_family():
    rows, values = two_sites()
    found = table(rows, order=THREE).paired
    p = {
        (name, site): stats.wilcoxon(values[name, site] - values["source", site]).pvalue
        for name in ("tent", "ours")
        for site in "AB"
    }
    corrected = holm(p)
    for (name, site), value in p.items():
        item = found.baseline[name, "N-O"].sites[site]
        assert item.p == pytest.approx(value)
        assert item.p_holm == pytest.approx(corrected[name, site])
    assert max(item / one for item, one in zip(corrected.values(), p.values(), strict=True)) == 4
    assert found.baseline["ours", "N-O"].family == "N-O, against source"
    assert found.families == {"N-O, against source": 4, "N-O, against the best other row": 2}


def test_the_best_row_is_tested_against_the_runner_up():
    rows, values = two_sites()
    found = table(rows, order=THREE).paired.best_other
    assert found["ours", "N-O"].other == ("tent", "N-O")
    assert found["tent", "N-O"].other == ("ours", "N-O")
    for site in "AB":
        ours, theirs = (found[name, "N-O"].sites[site] for name in ("ours", "tent"))
        assert ours.p == pytest.approx(stats.wilcoxon(values["ours", site] - values["tent", site]).pvalue)
        assert ours.difference == pytest.approx(-theirs.difference)
        assert ours.p_holm == theirs.p_holm  # one test, counted once
    smaller = min(found["ours", "N-O"].sites.values(), key=lambda item: item.p)
    assert smaller.p_holm == pytest.approx(2 * smaller.p)


def test_the_best_other_row_is_of_the_protocol_or_the_baseline():
    rows, _ = two_sites()
    better = [
        item | {"row": "theirs", "protocol": "N-M", "dice": 1.0} for item in rows if item["row"] == "ours"
    ]
    later = [item | {"protocol": "N-M", "dice": 0.0} for item in rows if item["row"] == "tent"]
    order = (*THREE, ("tent", "N-M"), ("theirs", "N-M"))
    found = table([*rows, *better, *later], order=order).paired.best_other
    assert found["ours", "N-O"].other == ("tent", "N-O")
    assert found["theirs", "N-M"].other == ("source", "N-O")  # tent N-M is worse
    assert found["tent", "N-M"].other == ("theirs", "N-M")


def test_intervals_are_stratified():
    """Two sites far apart, each of cases that are alike: pooled resampling would give a wide interval."""
    rng = np.random.default_rng(2)
    one, other = rng.normal(0.9, 0.01, 30), rng.normal(0.1, 0.01, 6)
    low, high = interval(one, other)
    error = np.sqrt(one.var(ddof=1) / 30 + other.var(ddof=1) / 6) / 2
    assert average(one, other) == pytest.approx((one.mean() + other.mean()) / 2)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.2)
    assert low < average(one, other) < high
    assert interval(one, other) == (low, high)
    assert interval(one, other[:1]) == (None, None)
    assert interval() == (None, None)
    assert interval(np.full(3, 0.7), np.full(2, 0.1)) == (pytest.approx(0.4), pytest.approx(0.4))
    rows, values = two_sites()
    result = table(rows, order=THREE)
    figure, item = result.figures["ours", "N-O", AVERAGE], result.paired.baseline["ours", "N-O"].average
    assert (figure.low, figure.high) == interval(values["ours", "A"], values["ours", "B"])
    differences = [values["ours", site] - values["source", site] for site in "AB"]
    assert (item.low, item.high) == pytest.approx(interval(*differences))


def test_seeds_belong_to_the_case():
    """Runs of one case under several seeds are no further cases: the interval stays as wide."""
    rows, _ = two_sites()
    again = [item | {"seed": seed} for item in rows for seed in (1, 2)]
    one, three = (
        table(found, order=THREE).figures["ours", "N-O", AVERAGE] for found in (rows, [*rows, *again])
    )
    assert (one.low, one.high) == pytest.approx((three.low, three.high))
    assert (one.cases, three.cases, one.seeds, three.seeds) == (19, 19, 1, 3)


def test_harm_by_hand():
    """Losses of 0.5, 1.5, 3 and 10 points and a gain, each against its own source; at another site a gain."""
    losses = (0.005, 0.015, 0.03, 0.10, -0.05)
    rows = [row("ours", str(i), 0.7 - loss, own=0.7) for i, loss in enumerate(losses)]
    rows += [row("ours", "b", 0.05, own=0.02, site="B"), row("ours", "c", 0.92, own=0.9, site="B")]
    rows += [row("ours", "new", 0.0, own=None, site="B")]  # nothing there, nothing predicted by the source
    found = table(rows, order=ORDER[1:2]).harm
    first, second, whole = (found["ours", "N-O", name] for name in ("A", "B", AVERAGE))
    assert first.below == {1: 0.6, 2: 0.4, 5: 0.2}
    third = pytest.approx(1 / 3)  # what is painted where there is nothing is lost
    assert second.below == {1: third, 2: third, 5: third}
    assert whole.below == pytest.approx({1: (0.6 + 1 / 3) / 2, 2: (0.4 + 1 / 3) / 2, 5: (0.2 + 1 / 3) / 2})
    assert (first.worst, first.worst_case) == (pytest.approx(-0.10), "3, seed 0")
    assert (whole.worst, whole.worst_case) == (-1.0, "B/new, seed 0")
    assert first.change_5th == pytest.approx(np.percentile([-loss for loss in losses], 5))
    assert second.value_5th == pytest.approx(np.percentile([0.0, 0.05, 0.92], 5))
    assert whole.value_5th == pytest.approx((first.value_5th + second.value_5th) / 2)
    assert (first.below_dice_10, second.below_dice_10) == (0.0, pytest.approx(2 / 3))
    assert whole.below_dice_10 == pytest.approx(1 / 3)
    assert (whole.cases, whole.runs) == (8, 8)


def test_an_organ_painted_where_there_is_none_is_a_loss():
    """Three cases hold no organ: the source finds none, and a row paints one; another does not."""
    rows = [row(name, str(i), 0.9, own=0.9) for name in ("source", "tent", "ours") for i in range(5)]
    empty = {"source": None, "tent": None, "ours": 0.0}
    rows += [row(name, f"empty {i}", value, own=None) for name, value in empty.items() for i in range(3)]
    found = table(rows, ("A",), THREE)
    assert found.figures["ours", "N-O", "A"].mean == pytest.approx(5 * 0.9 / 8)
    assert found.harm["ours", "N-O", "A"].below[1] == pytest.approx(3 / 8)
    assert found.harm["ours", "N-O", "A"].worst == -1.0
    assert found.paired.baseline["ours", "N-O"].average.difference == pytest.approx(-3 / 8)
    assert found.harm["tent", "N-O", "A"].below[1] == 0.0
    assert found.paired.baseline["tent", "N-O"].average.difference == 0.0
    assert found.figures["tent", "N-O", "A"].cases == 5  # where all are empty nothing is compared


def test_a_failed_case_is_no_empty_mask():
    rows = [row("source", "a", 0.0, own=0.0), row("ours", "a", None, own=None) | {"status": "failed"}]
    rows += [row(name, "b", 0.9, own=0.9) for name in ("source", "ours")]
    found = table(rows, ("A",), THREE)
    assert found.harm["ours", "N-O", "A"].worst == 0.0
    assert found.paired.baseline["ours", "N-O"].average.difference == 0.0


def test_harm_counts_every_seed():
    """A mean over seeds would say that nothing was lost."""
    rows = [row("ours", "1", 0.8 + change, seed=seed, own=0.8) for seed, change in enumerate((-0.1, 0.1))]
    found = table(rows, ("A",), ORDER[1:2]).harm["ours", "N-O", AVERAGE]
    assert (found.below[1], found.worst, found.worst_case) == (0.5, pytest.approx(-0.1), "A/1, seed 0")
    assert (found.cases, found.runs) == (1, 2)


def test_exactly_a_point_is_not_more_than_a_point():
    rows = [row("ours", "1", 0.79, own=0.80), row("ours", "2", 0.7899, own=0.80)]
    assert table(rows, ("A",), ORDER[1:2]).harm["ours", "N-O", "A"].below[1] == 0.5


def test_an_unchanged_row_has_no_worst_run():
    rows = [row("source", "1", 0.8, own=0.8), row("source", "2", 0.3, own=0.3)]
    found = table(rows, ("A",), ORDER[:1]).harm["source", "N-O", AVERAGE]
    assert (found.worst, found.worst_case, found.below[1]) == (0.0, "", 0.0)


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


def tile(name, case, right, *, site="A", seed=0, protocol="N-O", own=0.0):
    status = "ok" if right is not None else "failed"
    return {
        "row": name, "protocol": protocol, "site": site, "case": case, "seed": seed, "right": right,
        "right_source": own, "status": status,
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
    own = [float(value) for value in right["source"]]
    rows = [tile(name, str(i), float(v), own=own[i]) for name, of in right.items() for i, v in enumerate(of)]
    rows += [tile("ours", str(i), 1.0, seed=1, own=own[i]) for i in range(4)]
    rows += [tile("ours", "broken", None)]
    found = summarise(rows, sites=("A",), order=ORDER[:2], baseline="source", metric=ACCURACY)
    assert found.figures["source", "N-O", "A"].mean == 0.5
    figure = found.figures["ours", "N-O", "A"]
    assert (figure.mean, figure.seeds, figure.cases) == (0.875, 2, 4)
    assert figure.std == pytest.approx(np.std([0.75, 1.0], ddof=1))
    item = found.paired.baseline["ours", "N-O"].sites["A"]
    assert item.difference == pytest.approx(0.375)
    assert item.p == pytest.approx(2 * (1 + 3) / 2**3)  # won two, lost half of one: 2 against 1
    assert found.harm["ours", "N-O", "A"].below[1] == 1 / 8  # of four tiles under two seeds
    assert found.failed["ours", "N-O"] == 1


def test_intervals_of_many_tiles():
    values = (np.random.default_rng(0).random(BCA_LIMIT + 1) < 0.9).astype(float)
    low, high = interval(values)
    error = np.sqrt(0.9 * 0.1 / len(values))
    assert low == pytest.approx(values.mean() - 1.96 * error, abs=error / 3)
    assert high == pytest.approx(values.mean() + 1.96 * error, abs=error / 3)
