"""Calibration of the rows of a comparison, over what is the same for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tesla_med.compare.statistics import Key
from tesla_med.config.resolve import other_sites
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring.calibration import FIGURES, CalibrationCounts
from tesla_med.tasks.base import Task

Calibration = dict[tuple[str, str, str], dict[str, float | None]]
"""(row, protocol, site) -> ece, brier, nll; each None where nothing was counted."""
Bins = dict[Key, list[Mapping[str, Any]]]
"""(row, protocol) -> bins of each site."""


def count_calibration(
    tasks: Mapping[str, Task], runs: Mapping[str, Mapping[Key, RunFolder]], volumes: Path
) -> tuple[Calibration, Bins]:
    """Return the calibration of finished runs of one seed.

    Args:
        tasks: by site.
        runs: by site and by row and protocol.
        volumes: folder of the images.
    """
    found: Calibration = {}
    bins: Bins = {}
    for site, task in tasks.items():
        items = task.find(volumes, other_sites(task.site))
        sums: dict[Key, CalibrationCounts] = {}
        for counted in task.recount(items, runs[site]):
            for key, item in counted.items():
                sums[key] = sums[key] + item if key in sums else item
        for (label, protocol), item in sums.items():
            figures = item.summary()
            found[label, protocol, site] = {name: figures[name] for name in FIGURES}
            bins.setdefault((label, protocol), []).append(figures["bins"])
    return found, bins
