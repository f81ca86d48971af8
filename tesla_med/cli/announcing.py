"""How long a run will take, said before it starts: the same figures as those of ``--dry-run``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tesla_med.cli.console import Screen, duration
from tesla_med.scoring.text import counted
from tesla_med.types import Progress

if TYPE_CHECKING:
    from tesla_med.actions.forecast import Forecast
    from tesla_med.plan import Plan

log = logging.getLogger(__name__)
MANY = 1000
"""Items that take less than a second each are counted in such numbers."""


def announced(screen: Screen, plan: Plan, progress: Progress) -> Progress:
    """Return progress that says how long the run will take when the run first tells of its work."""
    from tesla_med.actions.usage import resident

    if screen.quiet:
        return progress
    said: list[str] = []
    base = resident()

    def tell(stage: str, done: int, total: int) -> None:
        if not said:
            said.append(stage)
            _announce(screen, plan, progress, base, (stage, done, total))
        progress(stage, done, total)

    return tell


def _announce(screen: Screen, plan: Plan, progress: Progress, base: int, first: tuple[str, int, int]) -> None:
    from tesla_med.actions.forecast import few_of, forecast

    stage, done, total = first
    left, share = len(plan.refs), 1 - done / max(total, 1)
    by_item = stage == f"{plan.task.item}s"
    if by_item and done == total:
        return
    try:
        sample = few_of(plan)
        if not sample.counts:
            return
        found = forecast(
            plan,
            sample,
            base,
            units=left * share if by_item else left,
            passes=1.0 if by_item else share,
            progress=progress,
        )
    except Exception as error:  # the run itself goes on, and says what is wrong
        log.info("no estimate: %s", error, exc_info=error)
        return
    for line in sentences(plan, found, share if by_item else 1.0):
        screen.aside(line)


def sentences(plan: Plan, found: Forecast, share: float = 1.0) -> list[str]:
    """Return what is said of a run: time and memory, and for a long one what would be faster.

    Args:
        plan: of the run.
        found: its forecast.
        share: of the items, that is to be done.
    """
    items = round(share * len(plan.items.names))
    per = _per_items(plan, found.seconds_per_unit)
    graphics = "" if found.device_memory_mib is None else f", {_memory(found.device_memory_mib)} on the GPU"
    lines = [
        f"Estimate: {per}, {duration(found.seconds)} in all for {counted(items, plan.task.item)} "
        f"on {plan.device}; memory of the process {_memory(found.memory_mib)}{graphics}"
    ]
    if found.faster:
        ways = (
            text if seconds is None else f"{text}: {_per_items(plan, seconds)}"
            for text, seconds in found.faster
        )
        lines.append(f"Faster: {'; '.join(ways)}")
    return lines


def figures(found: Forecast) -> dict[str, Any]:
    """Return the same for JSON."""
    return {
        "seconds": found.seconds,
        "seconds_per_unit": found.seconds_per_unit,
        "memory_mib": found.memory_mib,
        "device_memory_mib": found.device_memory_mib,
        "faster": [{"what": text, "seconds_per_unit": seconds} for text, seconds in found.faster],
    }


def _per_items(plan: Plan, seconds_per_unit: float) -> str:
    item = plan.task.item
    seconds = seconds_per_unit * len(plan.refs) / max(len(plan.items.names), 1)
    if plan.task.unit == item:
        return f"{duration(seconds) if seconds >= 1 else 'under 1 s'} per {item}"
    return f"{duration(MANY * seconds)} per {MANY} {item}s"


def _memory(mib: float) -> str:
    return f"{mib:.0f} MiB" if mib < 1024 else f"{mib / 1024:.1f} GiB"
