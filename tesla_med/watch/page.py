"""``watch.html``: one self-contained page on what came, what became of it, and whether the site drifts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tesla_med import __version__
from tesla_med.io.files import write_text
from tesla_med.plan import Plan
from tesla_med.runs.manifest import NOT_A_DEVICE
from tesla_med.watch.drift import ALPHA, Drift
from tesla_med.watch.history import PAGE, History, Seen
from tesla_med.watch.statistics import IN_WORDS

LATEST = 200
"""Cases in the table of the page; ``history.csv`` holds all."""
LISTED = 50
"""Files that are not used, at most."""


@dataclass(frozen=True)
class Shown:
    """What is known at one moment.

    Attributes:
        seen: cases that are done, in order.
        figures: values that are tested for drift, by name; one per case, None where there is none.
        aside: cases that cannot be done as they are, with the reason.
        waiting: cases whose files have not settled.
        lone: cases that are named as masks of images that are not there.
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
    lone: Sequence[str] = ()


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
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        shown=shown,
        verdicts=Counter(item.verdict for item in shown.seen),
        drifts=[(item, drift_text(item, shown.periods[1]), _when(item, shown.seen)) for item in shown.drifts],
        tested=len(shown.seen) >= sum(shown.periods),
        alpha=ALPHA,
        rows=[(item, f"cases/{item.case}/report/report.html", history.run(item.case)) for item in latest],
        skipped=list(shown.skipped)[:LISTED],
        unlisted=max(0, len(shown.skipped) - LISTED),
        charts=charts(shown),
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


@dataclass(frozen=True)
class Chart:
    """One figure over all cases, as the page draws it: 1000 wide, 100 high, top is high.

    Attributes:
        title: of the figure.
        low: value at the bottom.
        high: value at the top.
        dots: path of SVG that makes a dot per case.
        doubted: the same of cases on which no mask is trusted, of the predicted Dice only.
        shaded: where the reference period ends.
        drifted: whether it has drifted now.
    """

    title: str
    low: float
    high: float
    dots: str
    doubted: str
    shaded: float
    drifted: bool


def charts(shown: Shown) -> list[Chart]:
    """Return a chart for each figure that there is, the predicted Dice first."""
    names = [name for name, values in shown.figures.items() if any(value is not None for value in values)]
    names.sort(key=lambda name: name != "predicted_dice")
    now = {item.name for item in shown.drifts if item.present}
    return [_chart(name, shown, drifted=name in now) for name in names]


def _chart(name: str, shown: Shown, *, drifted: bool) -> Chart:
    known = [(index, value) for index, value in enumerate(shown.figures[name]) if value is not None]
    values, dice = [value for _, value in known], name == "predicted_dice"
    low, high = (0.0, 1.0) if dice else (min(values), max(values))
    span, count = (high - low) or 1.0, max(len(shown.seen), 1)
    dots: dict[bool, list[str]] = {False: [], True: []}
    for index, value in known:
        across, down = 1000 * (index + 0.5) / count, 95 - 90 * (value - low) / span
        dots[dice and shown.seen[index].trusted is False].append(f"M{across:.1f} {down:.1f}h0")
    shaded = 1000 * min(shown.periods[0], count) / count
    return Chart(IN_WORDS[name], low, high, "".join(dots[False]), "".join(dots[True]), shaded, drifted)
