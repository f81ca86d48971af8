"""``watch.html``: one self-contained page on what came, what became of it, and whether the site drifts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tesla_med import __version__
from tesla_med.io.files import write_text
from tesla_med.plan import NOT_A_DEVICE, Plan
from tesla_med.reports.drawing import INK, WRONG, data_uri, png_of
from tesla_med.watch.drift import ALPHA, Drift
from tesla_med.watch.history import PAGE, History, Seen
from tesla_med.watch.statistics import IN_WORDS

LATEST = 200
"""Cases in the table of the page; ``history.csv`` holds all."""
LISTED = 50
"""Files that are not used, at most."""
DOT = "#c2500a"


@dataclass(frozen=True)
class Shown:
    """What is known at one moment.

    Attributes:
        seen: cases that are done, in order.
        figures: values that are tested for drift, by name; one per case, None where there is none.
        aside: cases that cannot be done as they are, with the reason.
        waiting: cases whose files have not settled.
        changed: cases whose image has changed since it was done.
        skipped: files that are not used, with the reason.
        drifts: the latest first.
        periods: cases of the reference period and of the window.
        problem: why the folder cannot be looked through, or "".
    """

    seen: Sequence[Seen]
    figures: Mapping[str, Sequence[float | None]]
    aside: Mapping[str, str]
    waiting: Sequence[str]
    changed: Sequence[str]
    skipped: Sequence[tuple[Path, str]]
    drifts: Sequence[Drift]
    periods: tuple[int, int]
    problem: str = ""


def write_page(plan: Plan, history: History, watched: Path, shown: Shown) -> Path:
    """Write ``watch.html``, which loads nothing from elsewhere.

    Args:
        plan: of the watch.
        history: its output folder.
        watched: the folder that is looked through.
        shown: what is to be shown.

    Raises:
        OutputError: the file cannot be written.
    """
    from tesla_med.reports.html import template

    site = plan.site
    latest = list(shown.seen)[: -LATEST - 1 : -1]
    text = template("watch.html.j2").render(
        site=f"{site.id} ({site.institution})" if site.institution else site.id,
        method=f"{plan.method} {plan.protocol}",
        version=__version__,
        notice=NOT_A_DEVICE,
        terms=site.terms,
        watched=watched.name,
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        shown=shown,
        verdicts=Counter(item.verdict for item in shown.seen),
        drifts=[(item, drift_text(item, shown.periods[1]), _when(item, shown.seen)) for item in shown.drifts],
        tested=len(shown.seen) >= sum(shown.periods),
        alpha=ALPHA,
        rows=[(item, f"cases/{item.case}/report/report.html", history.run(item.case)) for item in latest],
        skipped=list(shown.skipped)[:LISTED],
        unlisted=max(0, len(shown.skipped) - LISTED),
        picture=data_uri(picture(shown), "image/png") if shown.seen else None,
    )
    write_text(history.out / PAGE, text)
    return history.out / PAGE


def drift_text(item: Drift, window: int) -> str:
    """Return a drift in words."""
    return (
        f"{IN_WORDS[item.name]}: median {item.now:.4g} over {window} cases, {item.before:.4g} in the "
        f"reference period (p = {item.p:.1g})"
    )


def _when(item: Drift, seen: Sequence[Seen]) -> str:
    """Return since when, or from when to when, a drift was noticed."""
    first, last = (f"{seen[index].case} ({seen[index].done[:10]})" for index in (item.first, item.last))
    return f"since {first}" if item.present else f"from {first} to {last}"


def picture(shown: Shown) -> bytes:
    """Return the figures of all cases in the order in which they came, as a PNG file."""
    from matplotlib.figure import Figure

    names = [name for name, values in shown.figures.items() if any(value is not None for value in values)]
    names.sort(key=lambda name: name != "predicted_dice")
    now = {item.name for item in shown.drifts if item.present}
    rows = -(-len(names) // 2)
    figure = Figure(figsize=(11, 1.7 * rows), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False, sharex=True).ravel()
    for axis, name in zip(axes, names, strict=False):
        _draw(axis, name, shown, drifted=name in now)
    for axis in axes[len(names) :]:
        axis.set_axis_off()
    return png_of(figure, dpi=100)


def _draw(axis: Any, name: str, shown: Shown, *, drifted: bool) -> None:
    known = [(index, value) for index, value in enumerate(shown.figures[name]) if value is not None]
    doubted = {item.number for item in shown.seen if not item.trusted}
    color = [WRONG if index in doubted and name == "predicted_dice" else DOT for index, _ in known]
    axis.scatter(*zip(*known, strict=True), s=8, c=color, linewidths=0)
    axis.axvspan(-0.5, min(shown.periods[0], len(shown.seen)) - 0.5, color=INK, alpha=0.07, linewidth=0)
    axis.set_title(IN_WORDS[name] + (": has drifted" if drifted else ""), fontsize=9, loc="left")
    axis.title.set_color(WRONG if drifted else INK)
    axis.tick_params(labelsize=8)
    if name == "predicted_dice":
        axis.set_ylim(0, 1)
