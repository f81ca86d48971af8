"""Figures of a comparison: tidy rows in, means, intervals, paired tests and harm out. Pure functions.

A *case value* of volumes is the mean Dice over a case's foreground classes, in [0, 1], both-empty classes
left out; of tiles it is 1 where the tile's class is right, else 0. There is one average, of levels, changes
and shares alike: over the seeds of a case, then over the cases of a site, then over sites. The standard
deviation is over seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tesla_med.compare.harm import Harm, harm_at, harm_over
from tesla_med.compare.paired import Pairings, pair_rows
from tesla_med.compare.statistics import AVERAGE, Key, average, interval, mcnemar, wilcoxon
from tesla_med.records import WITHOUT_RESULT
from tesla_med.scoring.metrics import compared

CASE_COLUMNS = ("site", "case", "row", "method", "protocol", "seed", "label", "class")
RUN_COLUMNS = ("status", "used", "seconds", "slices")
"""Columns of the tidy rows of volumes before and after those of the metrics."""
TILE_COLUMNS = (
    *("site", "case", "row", "method", "protocol", "seed", "label", "prediction", "source_prediction"),
    *("right", "right_source", "status"),
)
Runs = Mapping[tuple[str, int], float]
"""(case, seed) -> value, at one site."""


@dataclass(frozen=True)
class Metric:
    """What a table is about. Values are in [0, 1], and higher is better.

    Attributes:
        name: of the value of a case, as in ``comparison.json``.
        column: of the tidy rows, that holds it.
        source_column: that of the unadapted model of the same run.
        list_columns: gives the columns of the tidy rows.
        case: what a case is called.
        piece: what time is given for.
        as_error: whether tables show 100 % less the value.
        of_class: column of the tidy rows with the name of the class.
    """

    name: str
    column: str
    source_column: str
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


DICE = Metric("dice", "dice", "dice_source", columns, "case", "slice")
ACCURACY = Metric(
    *("accuracy", "right", "right_source", lambda: TILE_COLUMNS, "tile", "tile"),
    as_error=True,
    of_class="label",
)
METRICS = {item.name: item for item in (DICE, ACCURACY)}
"""By the headline metric of a task."""


@dataclass(frozen=True)
class Figure:
    """One cell of a table: mean, standard deviation over seeds, and a 95 % interval over cases by site."""

    mean: float
    std: float | None
    low: float | None
    high: float | None
    cases: int
    seeds: int


@dataclass(frozen=True)
class Cost:
    """What a row took.

    Attributes:
        seconds_per_slice: seconds per slice or tile over its cells, reading and scoring included.
        peak_memory_mib: highest of any of its cells, on a CUDA device, else None.
        passes_per_slice: forward passes of the network per slice or tile, about; a backward pass counts as
            two. Those of the unadapted model's prediction are among them.
    """

    seconds_per_slice: float | None
    peak_memory_mib: float | None
    passes_per_slice: float | None = None


@dataclass(frozen=True)
class Summary:
    """A finished table.

    Attributes:
        sites: columns, in order.
        rows: (row, protocol) in order.
        figures: (row, protocol, site or ``average``) -> figure; what was not run is not in it.
        paired: every row against the baseline, and against the best other row of its protocol.
        harm: (row, protocol, site or ``average``) -> harm against the row's own source.
        costs: (row, protocol) -> cost.
        baseline: name of the row that others are compared with.
        calibration: (row, protocol, site) -> region ECE, Brier and NLL, by name; None: nothing counted.
        failed: number of cases without a mask by (row, protocol).
        metric: what the figures are.
        reliability: (row, protocol) -> edges, count, confidence and accuracy of bins, over all sites.
        classes: names, in order, where there is more than one.
        by_class: (row, protocol, class or ``average``) -> figure over the sites that have the class.
    """

    sites: tuple[str, ...]
    rows: tuple[Key, ...]
    figures: Mapping[tuple[str, str, str], Figure]
    paired: Pairings
    harm: Mapping[tuple[str, str, str], Harm]
    costs: Mapping[Key, Cost]
    baseline: str
    calibration: Mapping[tuple[str, str, str], Mapping[str, float | None]] = field(default_factory=dict)
    failed: Mapping[Key, int] = field(default_factory=dict)
    metric: Metric = DICE
    reliability: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    by_class: Mapping[tuple[str, str, str], Figure] = field(default_factory=dict)


def case_values(
    rows: Iterable[Mapping[str, Any]], column: str = "dice"
) -> dict[tuple[str, str, str, str, int], float]:
    """Return (row, protocol, site, case, seed) -> case value, from tidy rows of one class each.

    Args:
        rows: tidy rows.
        column: that holds the value; rows without one are left out.
    """
    found: dict[tuple[str, str, str, str, int], list[float]] = {}
    for row in rows:
        if row[column] is not None:
            key = (row["row"], row["protocol"], row["site"], row["case"], row["seed"])
            found.setdefault(key, []).append(row[column])
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
    values = _by_site(case_values(rows, metric.column))
    paired_rows = _with_empty_as_one(rows, metric)
    ours = _by_site(case_values(paired_rows, metric.column))
    own = _by_site(case_values(paired_rows, metric.source_column))
    figures: dict[tuple[str, str, str], Figure] = {}
    harm: dict[tuple[str, str, str], Harm] = {}
    for key in order:
        label, protocol = key
        mine = {site: runs for site in sites if (runs := values.get(key, {}).get(site))}
        figures |= {(*key, site): _figure([runs]) for site, runs in mine.items()}
        hurt = {site: harm_at(runs, _changes(ours[key][site], own, key, site)) for site, runs in mine.items()}
        harm |= {(*key, site): item for site, item in hurt.items()}
        if mine and len(mine) == len(sites):
            figures[label, protocol, AVERAGE] = _figure(list(mine.values()))
            harm[label, protocol, AVERAGE] = harm_over(hurt)
    paired = pair_rows(
        {key: {site: _case_means(runs) for site, runs in by.items()} for key, by in ours.items()},
        sites,
        order,
        {key: item.mean for key in order if (item := figures.get((*key, AVERAGE)))},
        baseline,
        mcnemar if metric is ACCURACY else wilcoxon,
    )
    lost = {(row["row"], row["protocol"], row["site"], row["case"], row["seed"]) for row in _failed(rows)}
    names = tuple(classes) if len(classes) > 1 else ()
    return Summary(
        tuple(sites),
        tuple(order),
        figures,
        paired,
        harm,
        costs or {},
        baseline,
        calibration or {},
        {key: sum(item[:2] == key for item in lost) for key in order},
        metric,
        classes=names,
        by_class=_by_class(rows, metric, names) if names else {},
    )


def _by_site(values: Mapping[tuple[str, str, str, str, int], float]) -> dict[Key, dict[str, Runs]]:
    found: dict[Key, dict[str, dict[tuple[str, int], float]]] = {}
    for (label, protocol, site, case, seed), value in values.items():
        found.setdefault((label, protocol), {}).setdefault(site, {})[case, seed] = value
    return {key: dict(sites) for key, sites in found.items()}


def _with_empty_as_one(rows: Sequence[Mapping[str, Any]], metric: Metric) -> list[Mapping[str, Any]]:
    """Return rows in which an empty mask of an empty reference counts as 1 where another mask has a value.

    Differences need both: the mask that is not empty has a Dice of 0, and the other has none. Where all masks
    of a class of a case are empty, nothing is compared.
    """
    columns = (metric.column, metric.source_column)

    def item(row: Mapping[str, Any]) -> tuple[Any, ...] | None:
        scored = row["status"] not in WITHOUT_RESULT
        return (row["site"], row["case"], row.get(metric.of_class)) if scored else None

    found: dict[tuple[Any, ...], set[float | None]] = {}
    for row in rows:
        if (key := item(row)) is not None:
            found.setdefault(key, set()).update(row[column] for column in columns)
    painted = {key for key, values in found.items() if values == {None, 0.0}}  # some masks, and no organ
    return [
        {**row, **{column: 1.0 for column in columns if row[column] is None}} if item(row) in painted else row
        for row in rows
    ]


def _changes(
    runs: Runs, own: Mapping[Key, Mapping[str, Runs]], key: Key, site: str
) -> dict[tuple[str, int], float]:
    """Return by how much the runs of a row at a site are above their own source, where that is known."""
    source = own.get(key, {}).get(site, {})
    return {run: value - source[run] for run, value in runs.items() if run in source}


def _by_class(
    rows: Iterable[Mapping[str, Any]], metric: Metric, classes: Sequence[str]
) -> dict[tuple[str, str, str], Figure]:
    """Return the figures by class, and their average: the mean over classes, seed by seed.

    The figure of a class is the mean over the cases of a site, then over the sites that have the class.
    """
    by_key: dict[Key, dict[str, dict[str, dict[tuple[str, int], float]]]] = {}
    for row in rows:
        name = row[metric.of_class]
        if name in classes and row[metric.column] is not None:
            groups = by_key.setdefault((row["row"], row["protocol"]), {})
            runs = groups.setdefault(name, {}).setdefault(row["site"], {})
            runs[row["case"], row["seed"]] = row[metric.column]
    found: dict[tuple[str, str, str], Figure] = {}
    for (label, protocol), groups in by_key.items():
        for name, of_sites in groups.items():
            found[label, protocol, name] = _figure(list(of_sites.values()))
        if len(groups) == len(classes):
            by_seed = _over([_over([_by_seed(runs) for runs in part.values()]) for part in groups.values()])
            mean = float(np.mean([found[label, protocol, name].mean for name in classes]))
            cases = sum(found[label, protocol, name].cases for name in classes)
            found[label, protocol, AVERAGE] = Figure(mean, _std(by_seed), None, None, cases, len(by_seed))
    return found


def _failed(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["status"] == "failed"]


def _figure(sites: Sequence[Runs]) -> Figure:
    """Return the figure of the runs of one site, or the average of those of several."""
    samples = [np.array(list(_case_means(runs).values())) for runs in sites]
    by_seed = _over([_by_seed(runs) for runs in sites])
    cases = sum(map(len, samples))
    mean = float(average(*samples))
    return Figure(mean, _std(by_seed), *interval(*samples), cases, len(by_seed))


def _case_means(runs: Runs) -> dict[str, float]:
    """Return case -> mean over its seeds."""
    found: dict[str, list[float]] = {}
    for (case, _), value in runs.items():
        found.setdefault(case, []).append(value)
    return {case: float(np.mean(values)) for case, values in found.items()}


def _by_seed(runs: Runs) -> dict[int, float]:
    """Return seed -> mean over its cases."""
    found: dict[int, list[float]] = {}
    for (_, seed), value in runs.items():
        found.setdefault(seed, []).append(value)
    return {seed: float(np.mean(values)) for seed, values in sorted(found.items())}


def _over(parts: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return seed -> mean over parts, which are sites or classes, of the seeds that all of them have.

    A part of a single seed is that of a row without randomness, the same under every seed.
    """
    several = [set(part) for part in parts if len(part) > 1]
    seeds = sorted(set.intersection(*several) if several else set(parts[0]))
    return {
        seed: float(np.mean([part.get(seed, next(iter(part.values()))) for part in parts])) for seed in seeds
    }


def _std(by_seed: Mapping[int, float]) -> float | None:
    return float(np.std(list(by_seed.values()), ddof=1)) if len(by_seed) > 1 else None
