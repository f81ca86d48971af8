"""Figures of a comparison: tidy rows in, means, intervals and paired tests out. Pure functions.

A *case value* of volumes is the mean Dice over a case's foreground classes, in [0, 1], both-empty classes
left out; of tiles it is 1 where the tile's class is right, else 0. A site's figure is the mean over its
cases, for tiles the accuracy; ``average`` is the mean over sites; the standard deviation is over seeds.
Tests pair the cases of a row with those of the baseline, each the mean over its seeds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.scoring.metrics import compared

AVERAGE = "average"
RESAMPLES = 2000
CASE_COLUMNS = ("site", "case", "row", "method", "protocol", "seed", "label", "class")
RUN_COLUMNS = ("status", "used", "seconds", "slices")
"""Columns of the tidy rows of volumes before and after those of the metrics."""
TILE_COLUMNS = (
    *("site", "case", "row", "method", "protocol", "seed", "label", "prediction", "source_prediction"),
    *("right", "right_source", "status"),
)
BCA_LIMIT = 5000
"""Cases up to which an interval is corrected for bias and skew, at a cost that grows with their square."""
Doubles = npt.NDArray[np.float64]
Key = tuple[str, str]
"""Row and protocol."""


@dataclass(frozen=True)
class Metric:
    """What a table is about. Values are in [0, 1], and higher is better.

    Attributes:
        name: of the value of a case, as in ``comparison.json``.
        column: of the tidy rows, that holds it.
        list_columns: gives the columns of the tidy rows.
        case: what a case is called.
        piece: what time is given for.
        as_error: whether tables show 100 % less the value.
        of_class: column of the tidy rows with the name of the class.
    """

    name: str
    column: str
    list_columns: Callable[[], tuple[str, ...]]
    case: str
    piece: str
    as_error: bool = False
    of_class: str = "class"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the tidy rows."""
        return self.list_columns()


def columns() -> tuple[str, ...]:
    """Return the columns of the tidy rows of volumes: with every metric that needs a reference."""
    return (*CASE_COLUMNS, *compared(), *RUN_COLUMNS)


DICE = Metric("dice", "dice", columns, "case", "slice")
ACCURACY = Metric("accuracy", "right", lambda: TILE_COLUMNS, "tile", "tile", as_error=True, of_class="label")
METRICS = {item.name: item for item in (DICE, ACCURACY)}
"""By the headline metric of a task."""


@dataclass(frozen=True)
class Figure:
    """One cell of a table: mean and standard deviation over seeds, and a 95 % interval over cases."""

    mean: float
    std: float | None
    low: float | None
    high: float | None
    cases: int
    seeds: int


@dataclass(frozen=True)
class Paired:
    """A row against the baseline over all cases of all sites.

    Attributes:
        cases: pairs.
        difference: mean, in Dice or accuracy.
        low: lower end of its 95 % bootstrap interval, None with fewer than two pairs.
        high: the upper end.
        p: two-sided; of Dice, of Wilcoxon's signed-rank test, None without two pairs that differ; of
            tiles, of McNemar's exact test, None without a pair that differs.
        p_holm: corrected over the rows of the table.
        harmed: cases more than a point (0.01) below the baseline; tiles classified correctly less often.
        worst: smallest difference.
    """

    cases: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    harmed: int
    worst: float


@dataclass(frozen=True)
class Cost:
    """What a row took: seconds per slice or tile over its cells, and the peak memory of any of them."""

    seconds_per_slice: float | None
    peak_memory_mib: float | None


@dataclass(frozen=True)
class Summary:
    """A finished table.

    Attributes:
        sites: columns, in order.
        rows: (row, protocol) in order.
        figures: (row, protocol, site or ``average``) -> figure; what was not run is not in it.
        paired: (row, protocol) -> test against the baseline, which is left out.
        costs: (row, protocol) -> cost.
        baseline: name of the row that others are compared with.
        calibration: (row, protocol, site) -> region ECE, Brier and NLL, by name.
        failed: number of cases without a mask by (row, protocol).
        metric: what the figures are.
        reliability: (row, protocol) -> edges, count, confidence and accuracy of bins, over all sites.
        classes: names, in order, where there is more than one.
        by_class: (row, protocol, class or ``average``) -> figure over the cases of all sites.
    """

    sites: tuple[str, ...]
    rows: tuple[Key, ...]
    figures: Mapping[tuple[str, str, str], Figure]
    paired: Mapping[Key, Paired]
    costs: Mapping[Key, Cost]
    baseline: str
    calibration: Mapping[tuple[str, str, str], Mapping[str, float | None]] = field(default_factory=dict)
    failed: Mapping[Key, int] = field(default_factory=dict)
    metric: Metric = DICE
    reliability: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    by_class: Mapping[tuple[str, str, str], Figure] = field(default_factory=dict)


def case_values(
    rows: Iterable[Mapping[str, Any]], metric: Metric = DICE
) -> dict[tuple[str, str, str, str, int], float]:
    """Return (row, protocol, site, case, seed) -> case value, from tidy rows of one class each."""
    found: dict[tuple[str, str, str, str, int], list[float]] = {}
    for row in rows:
        if row[metric.column] is not None:
            key = (row["row"], row["protocol"], row["site"], row["case"], row["seed"])
            found.setdefault(key, []).append(row[metric.column])
    return {key: float(np.mean(values)) for key, values in found.items()}


def summarise(
    rows: Sequence[Mapping[str, Any]],
    *,
    sites: Sequence[str],
    order: Sequence[Key],
    baseline: str,
    costs: Mapping[Key, Cost] | None = None,
    calibration: Mapping[tuple[str, str, str], Mapping[str, float | None]] | None = None,
    metric: Metric = DICE,
    classes: Sequence[str] = (),
) -> Summary:
    """Return the table of tidy rows.

    Args:
        rows: one per case and class, or per tile, with the keys of the metric's ``columns``.
        sites: columns.
        order: (row, protocol) pairs in the order of the table.
        baseline: row that others are compared with, under the same protocol if it has it, else any.
        costs: of each row.
        calibration: of each row and site.
        metric: what a case's value is.
        classes: names, in order, to give figures of; fewer than two give none.
    """
    values = case_values(rows, metric)
    figures: dict[tuple[str, str, str], Figure] = {}
    for name, protocol in order:
        mine = {key[2:]: value for key, value in values.items() if key[:2] == (name, protocol)}
        for site in sites:
            cases = {key[1:]: value for key, value in mine.items() if key[0] == site}
            if cases:
                figures[name, protocol, site] = _figure(cases)
        if mine and all((name, protocol, site) in figures for site in sites):
            figures[name, protocol, AVERAGE] = _average(mine, sites)
    paired = _paired(values, order, baseline, metric)
    lost = {(row["row"], row["protocol"], row["site"], row["case"], row["seed"]) for row in _failed(rows)}
    failed = {key: sum(item[:2] == key for item in lost) for key in order}
    names = tuple(classes) if len(classes) > 1 else ()
    return Summary(
        tuple(sites),
        tuple(order),
        figures,
        paired,
        costs or {},
        baseline,
        calibration or {},
        failed,
        metric,
        classes=names,
        by_class=_by_class(rows, metric, names) if names else {},
    )


def _by_class(
    rows: Iterable[Mapping[str, Any]], metric: Metric, classes: Sequence[str]
) -> dict[tuple[str, str, str], Figure]:
    """Return the figures by class, and their average: the mean over classes, seed by seed."""
    by_key: dict[Key, dict[str, dict[tuple[str, str, int], float]]] = {}
    for row in rows:
        name = row[metric.of_class]
        if name in classes and row[metric.column] is not None:
            groups = by_key.setdefault((row["row"], row["protocol"]), {})
            part = name, f"{row['site']}/{row['case']}", row["seed"]
            groups.setdefault(name, {})[part] = row[metric.column]
    found: dict[tuple[str, str, str], Figure] = {}
    for (label, protocol), groups in by_key.items():
        for name, cases in groups.items():
            found[label, protocol, name] = _figure({part[1:]: value for part, value in cases.items()})
        if len(groups) == len(classes):
            every = {part: value for cases in groups.values() for part, value in cases.items()}
            found[label, protocol, AVERAGE] = _average(every, classes)
    return found


def _failed(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["status"] == "failed"]


def _figure(cases: Mapping[tuple[str, int], float]) -> Figure:
    """Return the figure of (case, seed) -> value of one site."""
    by_seed = _by_seed({(case, seed): value for (case, seed), value in cases.items()})
    by_case = _means({case: [] for case, _ in cases}, ((case, value) for (case, _), value in cases.items()))
    low, high = interval(np.array(by_case))
    return Figure(float(np.mean(by_seed)), _std(by_seed), low, high, len(by_case), len(by_seed))


def _average(values: Mapping[tuple[str, str, int], float], sites: Sequence[str]) -> Figure:
    """Return the figure over sites of (site, case, seed) -> value."""
    parts = [
        _by_seed({key[1:]: value for key, value in values.items() if key[0] == site}, as_dict=True)
        for site in sites
    ]
    seeds = sorted(set.intersection(*(set(part) for part in parts))) or [0]
    fixed = [next(iter(part.values())) if len(part) == 1 else None for part in parts]
    every = sorted(set.union(*(set(part) for part in parts)))
    if any(value is not None for value in fixed):  # a row that is the same under every seed runs once
        seeds = every
    means = [
        float(np.mean([part[seed] if seed in part else np.mean(list(part.values())) for part in parts]))
        for seed in seeds
    ]
    cases = len({key[:2] for key in values})
    return Figure(float(np.mean(means)), _std(means), None, None, cases, len(means))


def _by_seed(cases: Mapping[tuple[str, int], float], as_dict: bool = False) -> Any:
    seeds: dict[int, list[float]] = {}
    for (_, seed), value in cases.items():
        seeds.setdefault(seed, []).append(value)
    means = {seed: float(np.mean(items)) for seed, items in sorted(seeds.items())}
    return means if as_dict else list(means.values())


def _means(groups: dict[str, list[float]], pairs: Iterable[tuple[str, float]]) -> list[float]:
    for name, value in pairs:
        groups[name].append(value)
    return [float(np.mean(items)) for items in groups.values()]


def _std(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def interval(values: Doubles) -> tuple[float | None, float | None]:
    """Return the 95 % bootstrap interval (BCa) of the mean of (n,) values; (None, None) below two.

    Where all values are the same it is that value. The draws are the same every time. Above ``BCA_LIMIT``
    values it is the plain percentile interval, which for the mean of so many is the same.
    """
    if len(values) < 2:
        return None, None
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    from scipy import stats

    bounds = (math.nan, math.nan)
    for method in ("BCa", "percentile") if len(values) <= BCA_LIMIT else ("percentile",):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = stats.bootstrap(
                (values,),
                np.mean,
                n_resamples=RESAMPLES,
                batch=max(1, 2_000_000 // len(values)),
                method=method,
                rng=np.random.default_rng(0),
            ).confidence_interval
        bounds = (float(found.low), float(found.high))
        if all(math.isfinite(bound) for bound in bounds):
            break
    return bounds


def _paired(
    values: Mapping[tuple[str, str, str, str, int], float],
    order: Sequence[Key],
    baseline: str,
    metric: Metric,
) -> dict[Key, Paired]:
    by_case: dict[tuple[str, str, str, str], list[float]] = {}
    for (name, protocol, site, case, _), value in values.items():
        by_case.setdefault((name, protocol, site, case), []).append(value)
    means = {key: float(np.mean(items)) for key, items in by_case.items()}
    protocols = [protocol for name, protocol in order if name == baseline]
    found: dict[Key, Paired] = {}
    for name, protocol in order:
        if name == baseline or not protocols:
            continue
        against = protocol if protocol in protocols else protocols[0]
        pairs = [
            (value, means[baseline, against, site, case])
            for (row, under, site, case), value in means.items()
            if (row, under) == (name, protocol) and (baseline, against, site, case) in means
        ]
        if pairs:
            test = mcnemar if metric is ACCURACY else wilcoxon
            found[name, protocol] = _test(np.array([one - other for one, other in pairs]), test)
    corrected = holm({key: item.p for key, item in found.items()})
    return {key: Paired(**{**vars(item), "p_holm": corrected[key]}) for key, item in found.items()}


def wilcoxon(differences: Doubles) -> float | None:
    """Return the two-sided p of Wilcoxon's signed-rank test of (n,) differences.

    None where fewer than two differ from 0.
    """
    from scipy import stats

    return float(stats.wilcoxon(differences).pvalue) if np.count_nonzero(differences) >= 2 else None


def mcnemar(differences: Doubles) -> float | None:
    """Return the two-sided p of McNemar's exact test of (n,) differences of paired outcomes, 1 or 0.

    A binomial test of the pairs that differ, won against lost. Over several seeds an outcome is the share
    of seeds that were right, and a pair is won or lost by the sign of its difference. None where no pair
    differs.
    """
    from scipy import stats

    won, lost = int((differences > 0).sum()), int((differences < 0).sum())
    return float(stats.binomtest(won, won + lost).pvalue) if won + lost else None


def _test(differences: Doubles, test: Callable[[Doubles], float | None]) -> Paired:
    p = test(differences)
    low, high = interval(differences)
    return Paired(
        len(differences),
        float(differences.mean()),
        low,
        high,
        p,
        None,
        int((differences < -0.01).sum()),
        float(differences.min()),
    )


def holm(values: Mapping[Key, float | None]) -> dict[Key, float | None]:
    """Return Holm's step-down correction of p values; what is None stays None and does not count."""
    known = sorted((p, key) for key, p in values.items() if p is not None)
    result: dict[Key, float | None] = dict.fromkeys(values)
    largest = 0.0
    for index, (p, key) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - index)))
        result[key] = largest
    return result
