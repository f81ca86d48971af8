"""What is shown of a run, whatever its task."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.cli.console import Screen
from tesla_med.scoring.predicted import predicted_table
from tesla_med.scoring.text import counted, metric_title, percent, points

SHOWN = 20
"""At most this many items are named one by one."""


def show_run(screen: Screen, result: Any) -> int:
    """Show the outcome of a run, and return the exit code."""
    by_case = result.metric == "dice"
    metric = metric_title(result.metric)
    scored = result.mean is not None
    method = result.method or "adapted"
    frozen = method == "source"  # against itself it says nothing
    if by_case:
        _show_cases(screen, result, method, metric)
    if scored:
        before, after = percent(result.mean_source), percent(result.mean)
        means = f"{after} %" if frozen else f"source {before} %, {method} {after} %"
        screen.say(f"{f'Mean {metric}{_of_scored(result)}' if by_case else metric}: {means}")
    for item in result.failed[:SHOWN]:
        sys.stderr.write(f"{item.case}: {item.status}: {item.reason}\n")
    if len(result.failed) > SHOWN:
        more = len(result.failed) - SHOWN
        sys.stderr.write(f"and {more} more; {result.out / 'run.json'} lists all\n")
    noun = "case" if by_case else "tile"
    if result.predicted.counts:
        screen.table(*predicted_table(result.predicted, noun, frozen=frozen))
    for text in result.predicted.remarks:
        screen.remark(text)
    not_made(result.reports_failed, "--resume makes it again")
    for note in result.notes:
        screen.note(note)
    screen.remarks(result.remarks, noun)
    if result.diverged and result.diverged == result.units:
        sys.stderr.write("adaptation diverged throughout: every result is the source model's\n")
    if by_case:
        screen.say(f"Masks: {result.out / 'masks'}")
    else:
        table = result.out / "predictions.csv"
        blank = sum(item.status == "blank" for item in result.results)
        read = len(result.results) - len(result.failed) - blank
        without = f", {blank} without tissue" if blank else ""
        screen.say(f"{counted(read, 'tile')}, {len(result.failed)} not read{without}. Predictions: {table}")
    for path in result.files:
        if path.name == "report.html":
            screen.say(f"Report: {path}")
    screen.result(_content(result, by_case))
    return 0 if result.complete else 1


def _of_scored(result: Any) -> str:
    """Return of how many cases a mean is, in words, where that is not all."""
    count = sum(item.headline is not None for item in result.results)
    return f" of {count} of {len(result.results)} cases" if count < len(result.results) else ""


def not_made(reports: Mapping[str, str], remedy: str) -> None:
    """Name on standard error the reports that could not be made."""
    for name, reason in reports.items():
        sys.stderr.write(f"report {name}: not made: {reason}; the results are complete, {remedy}\n")


def _show_cases(screen: Screen, result: Any, method: str, metric: str) -> None:
    frozen, scored = method == "source", result.mean is not None
    both = [f"source {metric} %", f"{method} {metric} %", "change"]
    figures = ([f"{metric} %"] if frozen else both) if scored else []
    columns = ["case", "status", *figures, "slices", *([] if frozen else ["used"]), "seconds"]
    rows = []
    for item in result.results:
        before, after = item.headline_source, item.headline
        share = f" {100 * item.share:.0f} %" if item.used == "partial" and item.share else ""
        used = [] if frozen else [(item.used or "") + share]
        texts = [percent(before), percent(after), points(item.dice_change)]
        shown = (texts[1:2] if frozen else texts) if scored else []
        rows.append([item.case, item.status, *shown, str(item.slices), *used, f"{item.seconds:.1f}"])
    screen.table(columns, rows)


def _content(result: Any, by_case: bool) -> dict[str, Any]:
    common = {
        "out": result.out,
        "files": list(result.files),
        "notes": list(result.notes),
        "reports_failed": dict(result.reports_failed),
        "predicted": result.predicted.counts,
        "remarks": list(result.predicted.remarks),
        "skipped": [{"file": path, "reason": reason} for path, reason in result.skipped],
    }
    if by_case:
        cases = [item.model_dump(mode="json", exclude={"calibration"}) for item in result.results]
        return common | {
            "mean_dice": result.mean_dice,
            "mean_dice_source": result.mean_dice_source,
            "cases": cases,
        }
    return common | {
        "tiles": sum(item.status not in ("failed", "blank") for item in result.results),
        "blank": sum(item.status == "blank" for item in result.results),
        "failed": {item.case: item.reason for item in result.failed},
        "accuracy": result.mean,
        "accuracy_source": result.mean_source,
    }


def not_used(skipped: Sequence[tuple[Path, str]]) -> str:
    """Return how many files are not used, and the most frequent reasons, in words."""
    counts = Counter(reason for _, reason in skipped).most_common(2)
    why = f" ({', '.join(f'{count} x {reason}' for reason, count in counts)})" if counts else ""
    return f"{counted(len(skipped), 'file')} not used{why}"


def shape_text(shape: Sequence[int] | None) -> str:
    """Return a grid's size."""
    return "-" if shape is None else "x".join(str(size) for size in shape)


def spacing_text(spacing: Sequence[float] | None) -> str:
    """Return a voxel size."""
    return "-" if spacing is None else "x".join(f"{step:.4g}" for step in spacing)


def labels_text(labels: Sequence[int | str] | None) -> str:
    """Return label values or class names."""
    return "none" if labels is None else ",".join(str(value) for value in labels)
