"""What a row does to its worst cases, against the unadapted model of the very same runs.

Every run of a case counts, one per seed: a mean over seeds would hide a seed that fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tesla_med.compare.statistics import ROUNDING

POINTS = (1, 2, 5)
"""Losses that are counted, in points (0.01)."""
LOW_DICE = 0.10
PERCENTILE = 5.0


@dataclass(frozen=True)
class Harm:
    """Harm at one site, or over all.

    Over all sites, shares and percentiles are means of those of the sites, and the worst is that of all.

    Attributes:
        cases: how many have a value.
        runs: cases times seeds.
        below: points -> share of the runs that lie more than so many below their own source, in [0, 1];
            empty where no run has a source to be compared with. A tile is either right or wrong: for
            tiles each is the share that only the source classified correctly.
        worst: smallest change against the run's own source, in [-1, 1].
        worst_case: where that is: ``case, seed n``, over all sites ``site/case, seed n``; "" where nothing
            changed.
        change_5th: 5th percentile of the change.
        value_5th: 5th percentile of the value.
        below_dice_10: share of the runs with a value below 0.10.
    """

    cases: int
    runs: int
    below: Mapping[int, float]
    worst: float | None
    worst_case: str
    change_5th: float | None
    value_5th: float
    below_dice_10: float


def harm_at(values: Mapping[tuple[str, int], float], changes: Mapping[tuple[str, int], float]) -> Harm:
    """Return the harm at one site.

    Args:
        values: (case, seed) -> value, in [0, 1]; at least one.
        changes: by how much they are above those of the unadapted model of the run. Runs without one count
            in what is said of values alone; there may be changes of runs without a value, where the adapted
            mask is empty as there is nothing, and the source's is not.
    """
    every, lost = np.array(list(values.values())), np.array(list(changes.values()))
    worst = min(changes, key=changes.__getitem__, default=None)
    return Harm(
        cases=len({case for case, _ in values}),
        runs=len(values),
        below={points: float((lost < -points / 100 - ROUNDING).mean()) for points in POINTS if len(lost)},
        worst=None if worst is None else changes[worst],
        worst_case=f"{worst[0]}, seed {worst[1]}" if worst is not None and any(changes.values()) else "",
        change_5th=float(np.percentile(lost, PERCENTILE)) if len(lost) else None,
        value_5th=float(np.percentile(every, PERCENTILE)),
        below_dice_10=float((every < LOW_DICE).mean()),
    )


def harm_over(sites: Mapping[str, Harm]) -> Harm:
    """Return the harm over all sites, at least one, each of which counts the same."""
    items = list(sites.values())
    known = {site: item for site, item in sites.items() if item.worst is not None}
    worst = min(known, key=lambda site: known[site].worst or 0.0, default=None)
    fifth = [item.change_5th for item in items if item.change_5th is not None]
    return Harm(
        cases=sum(item.cases for item in items),
        runs=sum(item.runs for item in items),
        below={n: float(np.mean([item.below[n] for item in known.values()])) for n in POINTS if known},
        worst=None if worst is None else known[worst].worst,
        worst_case=f"{worst}/{known[worst].worst_case}" if worst and known[worst].worst_case else "",
        change_5th=float(np.mean(fifth)) if fifth else None,
        value_5th=float(np.mean([item.value_5th for item in items])),
        below_dice_10=float(np.mean([item.below_dice_10 for item in items])),
    )
