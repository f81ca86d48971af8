"""What the HTML report shows, as plain values: numbers become text here, nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tesla_med.config.models import QualityConfig
from tesla_med.engine.quality import needs_review
from tesla_med.records import CaseResult, ClassScore, mean_of_known
from tesla_med.reports._run_content import BLANK, NOT_APPLICABLE, number, signed, tone
from tesla_med.scoring.calibration import ALL_CLASSES
from tesla_med.scoring.metrics import METRICS, Metric

ARROW = " → "
OWN_COLUMNS = ("dice", "volume_ml")
"""Metrics that the tables show in columns of their own."""
STATUS_TEXT = {
    "ok": "ok",
    "empty": "no foreground found",
    "blank": "constant image, not adapted",
    "unscored": "reference does not fit",
    "collapsed": "adaptation collapsed",
    "failed": "failed",
    "corrected": "corrected by hand, not scored",
}
USED_TEXT = {
    "source": "source mask kept",
    "partial": "partly adapted",
    "adapted": "adapted",
    "corrected": "corrected by hand",
}


@dataclass(frozen=True)
class Tile:
    """One headline figure."""

    label: str
    value: str
    detail: str = ""
    tone: str = ""


@dataclass(frozen=True)
class ClassRow:
    """The figures of one class of one case as text."""

    name: str
    dice_source: str
    dice: str
    change: str
    tone: str
    figures: tuple[str, ...]
    volume_source: str
    volume: str
    volume_change: str
    agreement: str
    predicted: tuple[str, str]
    remark: str
    bar: tuple[float, float] | None


@dataclass(frozen=True)
class CaseRow:
    """One case of the table."""

    anchor: str
    name: str
    status: str
    status_text: str
    used: str
    used_text: str
    review: bool
    seconds: str
    remarks: tuple[str, ...]
    classes: tuple[ClassRow, ...] = field(default=())


def severity(result: CaseResult, quality: QualityConfig) -> tuple[int, float, float, str]:
    """Sort key, worst first: failed, unscored, not trusted, to review, the largest drop, the lowest Dice.

    Without references the predicted Dice takes the place of the Dice.
    """
    usual = 2 if result.trusted is False else 3 if needs_review(result, quality) else 4
    rank = {"failed": 0, "unscored": 1}.get(result.status, usual)
    ours, change = result.mean_dice, result.dice_change
    drop = 0.0 if change is None else min(0.0, round(change, 4))
    known = result.predicted_dice if ours is None else ours
    return (rank, drop, 2.0 if known is None else known, result.case)


def has_references(results: Sequence[CaseResult]) -> bool:
    """Whether any case was scored against a reference."""
    return any(score.voxels_reference is not None for item in results for score in item.scores)


def figure_metrics(results: Sequence[CaseResult]) -> list[Metric]:
    """Return the metrics that have one column each: all that were measured but Dice and volume."""
    referenced = has_references(results)
    return [
        metric
        for metric in METRICS.in_order()
        if metric.name not in OWN_COLUMNS and (referenced or not metric.needs_reference)
    ]


def heading(metric: Metric) -> tuple[str, ...]:
    """Return the lines of the heading of a column."""
    lines = (metric.title, metric.unit, f"source{ARROW}adapted" if metric.of_source else "")
    return tuple(line for line in lines if line)


def definitions() -> list[tuple[str, str]]:
    """Return title and meaning of every metric but Dice, which has a longer one."""
    return [
        (metric.title, f"{_sentence(metric.what, metric.unit)} Empty masks: {metric.empty}.")
        for metric in METRICS.in_order()
        if metric.name != "dice"
    ]


def _sentence(what: str, unit: str) -> str:
    return f"{what[:1].upper()}{what[1:]}{f', in {unit}' if unit else ''}."


def physical_titles() -> str:
    """Return the titles of the metrics that need a physical voxel size, as a list in words."""
    return ", ".join(metric.title for metric in METRICS.in_order() if metric.physical)


def tiles(results: Sequence[CaseResult], calibration: Mapping[str, Any]) -> list[Tile]:
    """Return the headline figures; those that do not exist are left out."""
    counts = Counter(item.status for item in results)
    shown = [Tile("Cases", str(len(results)), f"{len(results) - counts['failed']} with a mask")]
    changes = [(change, item.case) for item in results if (change := item.dice_change) is not None]
    if changes:
        source = mean_of_known(item.mean_dice_source for item in results)
        ours = mean_of_known(item.mean_dice for item in results)
        change = sum(value for value, _ in changes) / len(changes)
        shown.append(
            Tile(
                "Mean Dice",
                f"{number(source, 3)} → {number(ours, 3)}",
                f"{signed(change)} over {len(changes)} of {len(results)} cases",
                tone(change),
            )
        )
        worst, case = min(changes)
        shown.append(Tile("Worst change", signed(worst), case, tone(worst)))
    if "region" in calibration:
        before, after = (calibration["region"][model][ALL_CLASSES]["ece"] for model in ("source", "adapted"))
        if before is not None and after is not None:
            detail = f"{signed(after - before)}, calibration region"
            shown.append(Tile("ECE", f"{before:.3f} → {after:.3f}", detail, tone(before - after)))
    taken = Counter(item.used for item in results if item.status != "failed")
    if taken["source"] or taken["partial"]:
        parts = [f"{taken['partial']} partly", f"{taken['adapted']} in full"]
        shown.append(Tile("Source mask kept", str(taken["source"]), "adapted " + ", ".join(parts)))
    untrusted = sum(item.trusted is False for item in results)
    troubles = [f"{untrusted} not trusted"] if untrusted else []
    troubles += [
        f"{counts[key]} {key}" for key in ("failed", "empty", "unscored", "blank", "collapsed") if counts[key]
    ]
    total = str(counts["failed"] + untrusted)
    shown.append(Tile("In doubt", total, ", ".join(troubles) or "nothing to report"))
    return shown


def case_rows(
    results: Sequence[CaseResult],
    agreement: Mapping[str, Mapping[int, float | None]],
    quality: QualityConfig,
) -> list[CaseRow]:
    """Return the rows of the case table, worst first.

    Args:
        results: the cases.
        agreement: Dice between source and adapted mask by case and label, where it is known.
        quality: says which cases are to be reviewed.
    """
    rows, shown = [], figure_metrics(results)
    for number_in_run, item in sorted(enumerate(results, 1), key=lambda pair: severity(pair[1], quality)):
        remarks = [text for text in (item.reason, *item.notes) if text]
        rows.append(
            CaseRow(
                anchor=f"case-{number_in_run}",
                name=item.case,
                status=item.status,
                status_text=STATUS_TEXT[item.status],
                used=item.used or "",
                used_text=_used_text(item),
                review=item.status != "failed" and needs_review(item, quality),
                seconds=f"{item.seconds:.1f} s" if item.seconds else "",
                remarks=tuple(remarks),
                classes=tuple(
                    _class_row(score, agreement.get(item.case, {}), shown) for score in item.scores
                ),
            )
        )
    return rows


def _used_text(result: CaseResult) -> str:
    if result.used is None:
        return ""
    words = {0.0: "normalisation statistics only", 1.0: "mixed normalisation statistics"}
    share = ", " + words.get(result.share or 0.0, f"{100 * (result.share or 0.0):.0f} %")
    return USED_TEXT[result.used] + (share if result.used == "partial" else "")


def class_summary(results: Sequence[CaseResult]) -> list[dict[str, Any]]:
    """Return one row per class with means over the cases where each figure exists."""
    by_label: dict[int, list[ClassScore]] = {}
    for item in results:
        for score in item.scores:
            by_label.setdefault(score.label, []).append(score)
    shown = figure_metrics(results)
    return [_summary_row(scores, shown) for _, scores in sorted(by_label.items())]


def has_blank_volumes(results: Sequence[CaseResult]) -> bool:
    """Whether some case has scores without a volume, because its voxel size is nominal."""
    return any(score.volume_ml is None for item in results for score in item.scores)


def _figure(metric: Metric, score: ClassScore) -> str:
    """Return the value of a metric, with that of the source mask before it where it is measured."""
    return _joined(number(score.value(name), metric.places) for name in reversed(metric.columns))


def _joined(texts: Iterable[str]) -> str:
    parts = list(texts)
    return BLANK if set(parts) == {BLANK} else ARROW.join(parts)


def _class_row(score: ClassScore, agreement: Mapping[int, float | None], shown: Sequence[Metric]) -> ClassRow:
    known = score.dice is not None and score.dice_source is not None
    change = score.dice_change
    return ClassRow(
        name=score.name,
        dice_source=_dice(score, score.dice_source),
        dice=_dice(score, score.dice),
        change="" if change is None else signed(change),
        tone=tone(change or 0.0),
        figures=tuple(_figure(metric, score) for metric in shown),
        volume_source=_volume(score.volume_ml_source),
        volume=_volume(score.volume_ml),
        volume_change=_relative(score.volume_ml_source, score.volume_ml),
        agreement=number(agreement.get(score.label), 3),
        predicted=_predicted(score),
        remark=_remark(score),
        bar=(score.dice_source, score.dice) if known else None,  # type: ignore[arg-type]
    )


def _predicted(score: ClassScore) -> tuple[str, str]:
    """Return the predicted Dice and its interval."""
    if score.predicted_dice is None or score.predicted_low is None or score.predicted_high is None:
        return BLANK, ""
    return f"{score.predicted_dice:.2f}", f"{score.predicted_low:.2f} to {score.predicted_high:.2f}"


def has_predictions(results: Sequence[CaseResult]) -> bool:
    """Whether some case has a predicted Dice."""
    return any(item.predicted_dice is not None for item in results)


def _remark(score: ClassScore) -> str:
    if score.voxels_reference is None:
        return ""
    if score.voxels_reference == 0:
        return "both empty" if score.voxels == 0 else "reference empty: false positive"
    return "missed" if score.voxels == 0 else ""


def _summary_row(scores: Sequence[ClassScore], shown: Sequence[Metric]) -> dict[str, Any]:
    metrics = METRICS.in_order()
    changes = [change for item in scores if (change := item.dice_change) is not None]
    remarks = Counter(_remark(item) for item in scores)
    mean = sum(changes) / len(changes) if changes else 0.0

    def average(name: str) -> str:
        known = [value for score in scores if (value := score.value(name)) is not None]
        digits = next(metric.places for metric in metrics if name in metric.columns)
        return f"{sum(known) / len(known):.{digits}f}" if known else BLANK

    return {
        "name": scores[0].name,
        "label": str(scores[0].label),
        "scored": str(sum(item.dice is not None for item in scores)),
        "not_applicable": str(remarks["both empty"]),
        "missed": str(remarks["missed"]),
        "false_positive": str(remarks["reference empty: false positive"]),
        "dice_source": average("dice_source"),
        "dice": average("dice"),
        "change": signed(mean) if changes else "",
        "tone": tone(mean) if changes else "",
        "better": str(sum(tone(value) == "good" for value in changes)),
        "worse": str(sum(tone(value) == "bad" for value in changes)),
        "figures": [_joined(map(average, reversed(metric.columns))) for metric in shown],
        "volume_source": average("volume_ml_source"),
        "volume": average("volume_ml"),
    }


def _dice(score: ClassScore, value: float | None) -> str:
    if value is None and score.voxels_reference is not None:
        return NOT_APPLICABLE
    return number(value, 3)


def _volume(value: float | None) -> str:
    return BLANK if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _relative(before: float | None, after: float | None) -> str:
    if before is None or after is None or before <= 0:
        return ""
    return f"{100 * (after - before) / before:+.0f} %".replace("-", "−")
