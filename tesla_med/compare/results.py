"""A comparison as data: ``comparison.json`` and the rows of ``summary.csv``, unrounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tesla_med.compare.figures import ACCURACY, Metric, Summary
from tesla_med.compare.harm import POINTS, Harm
from tesla_med.compare.paired import Against
from tesla_med.compare.statistics import AVERAGE, Key
from tesla_med.config.tables import TableConfig

INTERVALS = {"level": 0.95, "method": "bootstrap (BCa), cases resampled within their site"}
CHANGE_COLUMNS = ("", "_protocol", "_change", "_low", "_high", "_p", "_p_holm")
OPPONENTS = ("baseline", "best_other")
COST_COLUMNS = ("ms_per_{piece}", "passes_per_{piece}", "peak_memory_mib")


def as_json(table: TableConfig, summary: Summary, problems: Mapping[str, str]) -> dict[str, Any]:
    """Return every figure of a comparison.

    Args:
        table: what was asked for.
        summary: what came out.
        problems: cells that could not be run, with the reason.
    """
    from tesla_med.models.checkpoint import versions

    return {
        "table": table.model_dump(mode="json"),
        "metric": summary.metric.name,
        "baseline": summary.baseline,
        "intervals": INTERVALS,
        "tests": {
            "test": "McNemar, exact" if summary.metric is ACCURACY else "Wilcoxon signed-rank",
            "correction": "Holm",
            "families": dict(summary.paired.families),
        },
        "rows": [_row(summary, key) for key in summary.rows],
        "not_run": dict(problems),
        "versions": versions(),
    }


def _row(summary: Summary, key: Key) -> dict[str, Any]:
    columns, metric, cost = (*summary.sites, AVERAGE), summary.metric, summary.costs.get(key)
    figures = {name: vars(found) for name in columns if (found := summary.figures.get((*key, name)))}
    harm = {name: harm_of(item, metric) for name in columns if (item := summary.harm.get((*key, name)))}
    errors = {site: item for (*row, site), item in summary.calibration.items() if tuple(row) == key}
    by_class = {name: vars(item) for (*row, name), item in summary.by_class.items() if tuple(row) == key}
    return {
        "row": key[0],
        "protocol": key[1],
        metric.name: figures,
        "against_baseline": _against(summary.paired.baseline.get(key)),
        "against_best_other": _against(summary.paired.best_other.get(key)),
        "harm": harm,
        "cost": None if cost is None else vars(cost),
        "calibration" if metric is ACCURACY else "region_calibration": errors,
        "failed": summary.failed.get(key, 0),
        "by_class": by_class,
    }


def _against(item: Against | None) -> dict[str, Any] | None:
    if item is None:
        return None
    return {
        "row": item.other[0],
        "protocol": item.other[1],
        "family": item.family,
        "sites": {site: vars(found) for site, found in item.sites.items()},
        AVERAGE: None if item.average is None else vars(item.average),
    }


def harm_of(item: Harm, metric: Metric) -> dict[str, Any]:
    """Return the harm that the cases of a metric can show, by the names of its files.

    A tile is either right or wrong, so of tiles there is only the share that was lost.
    """
    if metric is ACCURACY:
        return {"share_lost": item.below.get(1)}
    shares = {f"share_below_{points}_point{'s' * (points > 1)}": item.below.get(points) for points in POINTS}
    return {
        "cases": item.cases,
        "runs": item.runs,
        **shares,
        "worst_change": item.worst,
        "worst_run": item.worst_case,
        "change_5th_percentile": item.change_5th,
        "dice_5th_percentile": item.value_5th,
        "share_below_dice_10": item.below_dice_10,
    }


def summary_rows(summary: Summary) -> tuple[list[str], list[dict[str, Any]]]:
    """Return columns and rows of ``summary.csv``: one per row, protocol and site, and one over all sites.

    Costs are those of all sites and stand in the row of the average.
    """
    rows = list(_lines(summary))
    columns = ["row", "protocol", "site", summary.metric.name, "std", "low", "high", "cases", "seeds"]
    columns += [f"{opponent}{part}" for opponent in OPPONENTS for part in CHANGE_COLUMNS]
    return [*dict.fromkeys([*columns, *(name for row in rows for name in row)])], [
        dict.fromkeys(columns) | row for row in rows
    ]


def _lines(summary: Summary) -> Iterator[dict[str, Any]]:
    metric = summary.metric
    names = [name.format(piece=metric.piece) for name in COST_COLUMNS]
    nothing = dict.fromkeys(harm_of(Harm(0, 0, {}, None, "", None, 0.0, 0.0), metric))
    for key in summary.rows:
        for site in (*summary.sites, AVERAGE):
            figure, harm = summary.figures.get((*key, site)), summary.harm.get((*key, site))
            if figure is None:
                continue
            line: dict[str, Any] = {"row": key[0], "protocol": key[1], "site": site, metric.name: figure.mean}
            line |= {name: value for name, value in vars(figure).items() if name != "mean"}
            for name, found in zip(
                OPPONENTS, (summary.paired.baseline, summary.paired.best_other), strict=True
            ):
                line |= _change(name, found.get(key), site)
            line |= nothing if harm is None else harm_of(harm, metric)
            cost = summary.costs.get(key) if site == AVERAGE else None
            seconds = None if cost is None else cost.seconds_per_slice
            values = (
                None if seconds is None else 1000 * seconds,
                None if cost is None else cost.passes_per_slice,
                None if cost is None else cost.peak_memory_mib,
            )
            yield line | dict(zip(names, values, strict=True))


def _change(name: str, against: Against | None, site: str) -> dict[str, Any]:
    found = None if against is None else against.average if site == AVERAGE else against.sites.get(site)
    if against is None or found is None:
        return {}
    values = vars(found)
    row = (*against.other, found.difference, found.low, found.high, values.get("p"), values.get("p_holm"))
    return {f"{name}{part}": value for part, value in zip(CHANGE_COLUMNS, row, strict=True)}
