"""A row of a comparison against another: changes, their intervals, tests per site, and families of tests.

Every row is compared with the baseline, and with the best other row of its protocol: that of the highest
average among the rows with another label, the baseline included. For the best row that is the runner-up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tesla_med.compare.statistics import ROUNDING, Doubles, Key, average, holm, interval

CaseMeans = Mapping[Key, Mapping[str, Mapping[str, float]]]
"""(row, protocol) -> site -> case -> value, the mean over seeds."""
Test = Callable[[Doubles], float | None]


@dataclass(frozen=True)
class Change:
    """What a row gains or loses against another, over the cases that both have.

    Attributes:
        cases: pairs.
        difference: mean over the cases of a site; of the average, mean of that over sites. In [-1, 1].
        low: lower end of its 95 % bootstrap interval, None where a site has fewer than two pairs.
        high: the upper end.
    """

    cases: int
    difference: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class SiteChange(Change):
    """A change at one site, and its test.

    Attributes:
        p: two-sided; of Dice, of Wilcoxon's signed-rank test, None without two pairs that differ; of
            tiles, of McNemar's exact test, None without a pair that differs.
        p_holm: Holm-corrected over the family.
    """

    p: float | None
    p_holm: float | None = None


@dataclass(frozen=True)
class Against:
    """A row against another.

    Attributes:
        other: the other row and its protocol.
        sites: the change at each site that both have.
        average: the change over all sites, None where one is missing.
        family: name of the family of its tests.
    """

    other: Key
    sites: Mapping[str, SiteChange]
    average: Change | None
    family: str


@dataclass(frozen=True)
class Pairings:
    """Every row against the baseline and against the best other row.

    Attributes:
        baseline: (row, protocol) -> outcome; the baseline is left out.
        best_other: the same.
        families: name -> number of distinct tests that Holm's correction counts.
    """

    baseline: Mapping[Key, Against] = field(default_factory=dict)
    best_other: Mapping[Key, Against] = field(default_factory=dict)
    families: Mapping[str, int] = field(default_factory=dict)


def pair_rows(
    means: CaseMeans,
    sites: Sequence[str],
    order: Sequence[Key],
    averages: Mapping[Key, float],
    baseline: str,
    test: Test,
) -> Pairings:
    """Return every row of a table against the baseline and against the best other row of its protocol.

    Args:
        means: the values of the cases.
        sites: of the table, in order.
        order: rows of the table, in order.
        averages: of the rows that have every site.
        baseline: label of the row that others are compared with, under the same protocol if it has that,
            else under its first.
        test: gives p of (n,) differences.
    """
    protocols = [protocol for label, protocol in order if label == baseline]
    rows = [key for key in order if key[0] != baseline]

    def its_baseline(key: Key) -> Key | None:
        return (baseline, key[1] if key[1] in protocols else protocols[0]) if protocols else None

    def best_other(key: Key) -> Key | None:
        rivals = [item for item in order if item[0] != key[0] and item[1] == key[1]]
        rivals += [item for item in (its_baseline(key),) if item is not None and item not in rivals]
        return max((item for item in rivals if item in averages), key=averages.__getitem__, default=None)

    def compared(title: str, choose: Callable[[Key], Key | None]) -> dict[Key, Against]:
        found = {}
        for key in rows:
            other = choose(key)
            differences = {} if other is None else _differences(means, key, other, sites)
            if other is not None and differences:
                name = f"{key[1]}, against {title}"
                found[key] = _against(other, differences, len(sites), name, test)
        return found

    found = compared(baseline, its_baseline), compared("the best other row", best_other)
    corrected = [_corrected(item) for item in found]
    families = {name: count for _, counts in corrected for name, count in counts.items() if count}
    return Pairings(corrected[0][0], corrected[1][0], families)


def _differences(means: CaseMeans, key: Key, other: Key, sites: Sequence[str]) -> dict[str, Doubles]:
    """Return (n,) differences of the cases that both rows have, by site."""
    found = {}
    for site in sites:
        ours, theirs = (means.get(row, {}).get(site, {}) for row in (key, other))
        pairs = [value - theirs[case] for case, value in ours.items() if case in theirs]
        if pairs:
            differences = np.array(pairs, np.float64)
            found[site] = np.where(np.abs(differences) < ROUNDING, 0.0, differences)
    return found


def _against(
    other: Key, differences: Mapping[str, Doubles], number_of_sites: int, family: str, test: Test
) -> Against:
    tests = {
        site: SiteChange(len(values), float(values.mean()), *interval(values), test(values))
        for site, values in differences.items()
    }
    samples, whole = tuple(differences.values()), None
    if len(samples) == number_of_sites:
        whole = Change(sum(map(len, samples)), float(average(*samples)), *interval(*samples))
    return Against(other, tests, whole, family)


def _corrected(found: Mapping[Key, Against]) -> tuple[dict[Key, Against], dict[str, int]]:
    """Return the outcomes with corrected p values, and the number of tests of each family.

    Two rows that are each other's best other row are one test.
    """
    families: dict[str, dict[tuple[frozenset[Key], str], float | None]] = {}
    for name, pair, site, item in _each_test(found):
        families.setdefault(name, {})[pair, site] = item.p
    corrected = {name: holm(values) for name, values in families.items()}
    sizes = {name: sum(p is not None for p in values.values()) for name, values in families.items()}
    outcome = {}
    for key, against in found.items():
        pair, ps = frozenset((key, against.other)), corrected[against.family]
        tests = {site: replace(item, p_holm=ps[pair, site]) for site, item in against.sites.items()}
        outcome[key] = replace(against, sites=tests)
    return outcome, sizes


def _each_test(found: Mapping[Key, Against]) -> Iterator[tuple[str, frozenset[Key], str, SiteChange]]:
    for key, against in found.items():
        for site, item in against.sites.items():
            yield against.family, frozenset((key, against.other)), site, item
