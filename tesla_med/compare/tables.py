"""Tables of a comparison as text: levels, paired tests, harm, classes. The best are between asterisks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tesla_med.compare.figures import ACCURACY, Cost, Figure, Summary
from tesla_med.compare.harm import POINTS, Harm
from tesla_med.compare.paired import Against
from tesla_med.compare.statistics import AVERAGE, Key

NOT_RUN = "n/a"
DISCLAIMER = "Not a medical device."
LEVELS = (
    "Dice in %, mean over foreground classes, of the 3-D volumes on their native grids: mean over the seeds "
    "of a case, then over the cases of a site, then (average) over sites; ± standard deviation over seeds. "
)
TILE_LEVELS = (
    "Error, 100 % minus the accuracy over all labelled tiles of a site: mean over seeds and tiles, then "
    "(average) over sites; ± standard deviation over seeds; lower is better. "
)
CHANGES = (
    "Change, in points: the same average of the differences to the baseline, {baseline}, over the {case}s "
    "that both rows have. Intervals: 95 %, bootstrap (BCa) with {case}s resampled within their site, none "
    "where a site has fewer than two. "
)
HARMED = (
    "Harmed: share of the runs (one per case and seed) more than a point below the unadapted model of the "
    "same run, averaged over sites; worst: the smallest of these changes. ECE: over one region for all rows, "
    "first seed, mean over sites. "
)
LOST = (
    "Lost: share of the tiles that only the unadapted model of the same run classified correctly, over "
    "seeds, averaged over sites. ECE: over all labelled tiles, first seed, mean over sites. "
)
PASSES = (
    "Passes: forward passes of the network per {piece}, about; a backward pass counts as two; those of the "
    "unadapted model's prediction, and of the choice of the scaling where there is one, are in every row. "
)
TESTS = (
    "Change of the row in points, per site and averaged as in the first table, against the row that is "
    "named: the baseline, or the best other row, which has the highest average among those of the protocol "
    "and the baseline; of the best row that is the runner-up. It is chosen on the same {case}s, which "
    "favours the best row. p, two-sided: {test}, each {case} being the mean over its seeds, Holm-corrected "
    "over the family. "
)
WILCOXON = "Wilcoxon's signed-rank test over the cases of the site"
MCNEMAR = (
    "McNemar's exact test over the tiles of the site (over several seeds a tile is won or lost by the share "
    "of seeds that are correct)"
)
HARM = (
    "Change of each run, one per case and seed, against the unadapted model of the same run. Shares and "
    "percentiles are those of a site, averaged over sites; the worst is that of all."
)


@dataclass(frozen=True)
class Sheet:
    """One table.

    Attributes:
        stem: of the names of its files.
        title: "" for the first.
        header: of the columns.
        body: cells by line.
        notes: what the columns mean.
    """

    stem: str
    title: str
    header: Sequence[str]
    body: Sequence[Sequence[str]]
    notes: str


def sheets(summary: Summary) -> list[Sheet]:
    """Return the tables of a comparison, those without a line left out."""
    metric = summary.metric
    of_tiles = metric is ACCURACY
    notes = (
        (TILE_LEVELS if of_tiles else LEVELS) + CHANGES + (LOST if of_tiles else HARMED) + PASSES + DISCLAIMER
    )
    words = {"case": metric.case, "piece": metric.piece, "baseline": summary.baseline}
    found = [
        Sheet("table", "", *grid(summary), notes.format(**words)),
        Sheet("tests", "paired tests", *tests_grid(summary), tests_notes(summary)),
        Sheet("classes", f"{metric.name} by class, %", *class_grid(summary), ""),
    ]
    if not of_tiles:
        found.insert(2, Sheet("harm", "harm", *harm_grid(summary), HARM))
    return [sheet for sheet in found if sheet.stem == "table" or sheet.body]


def tests_notes(summary: Summary) -> str:
    """Return what the table of tests means, and its families with their sizes."""
    tested = MCNEMAR if summary.metric is ACCURACY else WILCOXON
    families = "; ".join(
        f"{name}, {count} test{'s' * (count != 1)}" for name, count in summary.paired.families.items()
    )
    named = (
        f"Families (all rows and sites of a protocol): {families}." if families else "No test could be made."
    )
    return TESTS.format(case=summary.metric.case, test=tested) + named


def grid(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the table of levels, without empty columns."""
    metric, several = summary.metric, len(summary.sites) > 1
    columns = [*summary.sites, AVERAGE] if several else list(summary.sites)
    header = [
        *("row", "protocol"),
        *(f"{column}, error %" if metric.as_error else column for column in columns),
        *("95 % interval", "change", "change, 95 % interval"),
        *(("lost, %", "") if metric.as_error else ("harmed, %", "worst")),
        *("ECE", f"ms per {metric.piece}", f"passes per {metric.piece}", "MiB"),
    ]
    best = [_best(summary, column) for column in columns]
    body = []
    for key in summary.rows:
        found = [summary.figures.get((*key, column)) for column in columns]
        body.append(
            [
                *key,
                *(_level(figure, top, metric.as_error) for figure, top in zip(found, best, strict=True)),
                *_span_of_level(summary.figures.get((*key, AVERAGE)), metric.as_error),
                *_change(summary.paired.baseline.get(key), metric.as_error),
                *_harmed(summary.harm.get((*key, AVERAGE)), metric.as_error),
                _calibration_error(summary, key),
                *_cost(summary.costs.get(key)),
            ]
        )
    return _without_empty(header, body)


def tests_grid(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the paired tests; a line per row and row that it is compared with."""
    error, paired = summary.metric.as_error, summary.paired
    header = ["row", "protocol", "against", "change", "95 % interval", *summary.sites]
    body = []
    for key in summary.rows:
        for best, found in ((False, paired.baseline.get(key)), (True, paired.best_other.get(key))):
            if found is not None:
                name = f"{found.other[0]} {found.other[1]}{', the best other' if best else ''}"
                tests = [found.sites.get(site) for site in summary.sites]
                cells = [
                    NOT_RUN if item is None else f"{_points(item.difference, error)}{_p(item.p_holm)}"
                    for item in tests
                ]
                body.append([*key, name, *_change(found, error), *cells])
    return _without_empty(header, body)


def harm_grid(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of the harm of volumes over all sites, of the rows that have every site."""
    header = [
        *("row", "protocol", "cases", "runs"),
        *(f"> {points} point{'s' * (points > 1)} below, %" for points in POINTS),
        *("5th percentile of change", "worst change", "worst run", "5th percentile of Dice", "Dice < 10, %"),
    ]
    body = []
    for key in summary.rows:
        item = summary.harm.get((*key, AVERAGE))
        if item is not None:
            below = [f"{100 * item.below[points]:.1f}" if item.below else "" for points in POINTS]
            changes = ["" if value is None else _points(value) for value in (item.change_5th, item.worst)]
            low = [f"{100 * value:.1f}" for value in (item.value_5th, item.below_dice_10)]
            body.append([*key, str(item.cases), str(item.runs), *below, *changes, item.worst_case, *low])
    return _without_empty(header, body)


def class_grid(summary: Summary) -> tuple[list[str], list[list[str]]]:
    """Return header and cells of accuracy or Dice by class; no line without several classes."""
    columns = [*summary.classes, AVERAGE]
    body = []
    if summary.by_class:
        best = {
            column: max(
                (figure.mean for (*_, name), figure in summary.by_class.items() if name == column),
                default=None,
            )
            for column in columns
        }
        for key in summary.rows:
            found = [(summary.by_class.get((*key, column)), best[column]) for column in columns]
            body.append([*key, *(_level(figure, top) for figure, top in found)])
    return ["row", "protocol", *columns], body


def figure_text(figure: Figure, as_error: bool = False) -> str:
    """Return mean and deviation in %, as in 81.2 ± 0.4; ``as_error``, 100 less the mean."""
    deviation = "" if figure.std is None else f" ± {100 * figure.std:.1f}"
    mean = 1.0 - figure.mean if as_error else figure.mean
    return f"{100 * mean:.1f}{deviation}"


# ------------------------------------------------------------ cells


def _without_empty(header: list[str], body: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    used = [index for index in range(len(header)) if any(line[index] for line in body)]
    return [header[index] for index in used], [[line[index] for index in used] for line in body]


def _best(summary: Summary, column: str) -> float | None:
    found = (summary.figures.get((*key, column)) for key in summary.rows)
    return max((figure.mean for figure in found if figure is not None), default=None)


def _level(figure: Figure | None, best: float | None, as_error: bool = False) -> str:
    if figure is None:
        return NOT_RUN
    text = figure_text(figure, as_error)
    return f"**{text}**" if figure.mean == best else text


def _span_of_level(figure: Figure | None, as_error: bool) -> tuple[str]:
    if figure is None or figure.low is None or figure.high is None:
        return ("",)
    low, high = (1.0 - figure.high, 1.0 - figure.low) if as_error else (figure.low, figure.high)
    return (f"{100 * low:.1f} to {100 * high:.1f}",)


def _points(value: float, as_error: bool = False) -> str:
    return f"{100 * (0.0 - value if as_error else value):+.1f}"


def _p(value: float | None) -> str:
    return "" if value is None else " (p <0.001)" if value < 0.001 else f" (p {value:.3f})"


def _change(against: Against | None, as_error: bool) -> tuple[str, str]:
    """Return the change of the average and its interval."""
    whole = None if against is None else against.average
    if whole is None:
        return "", ""
    if whole.low is None or whole.high is None:
        return _points(whole.difference, as_error), ""
    ends = (whole.high, whole.low) if as_error else (whole.low, whole.high)
    return _points(whole.difference, as_error), " to ".join(_points(end, as_error) for end in ends)


def _harmed(harm: Harm | None, as_error: bool) -> tuple[str, str]:
    if harm is None or harm.worst is None:
        return "", ""
    return f"{100 * harm.below[1]:.1f}", "" if as_error else _points(harm.worst)


def _calibration_error(summary: Summary, key: Key) -> str:
    known = {site: item["ece"] for (*row, site), item in summary.calibration.items() if tuple(row) == key}
    if any(site not in known for site in summary.sites):
        return ""
    errors = [error for site in summary.sites if (error := known[site]) is not None]
    return f"{sum(errors) / len(errors):.3f}" if len(errors) == len(summary.sites) else NOT_RUN


def _cost(cost: Cost | None) -> tuple[str, str, str]:
    if cost is None:
        return "", "", ""
    seconds, passes, memory = cost.seconds_per_slice, cost.passes_per_slice, cost.peak_memory_mib
    return (
        "" if seconds is None else f"{1000 * seconds:.0f}",
        "" if passes is None else f"{passes:.3g}",
        "" if memory is None else f"{memory:.0f}",
    )
