"""The pictures of a run on tiles that several reports show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tesla_med.reports.base import RunContext
from tesla_med.reports.calibration import reliability_png, summarise_results
from tesla_med.reports.confusion import confusion_png
from tesla_med.reports.contact_sheet import contact_sheet
from tesla_med.scoring.classes import class_figures


def tile_pictures(results: Sequence[Any], run: RunContext) -> dict[str, bytes]:
    """Return PNG files by name: the least certain tiles and, with labels, confusion and reliability."""
    pictures = {"uncertain": contact_sheet(results, run.folder, run.pipeline)}
    figures = class_figures(results, run.pipeline)
    if figures:
        pictures["confusion"] = confusion_png(figures, run.pipeline)
        drawn = reliability_png(summarise_results(results, run), run.pipeline)
        if drawn is not None:
            pictures["reliability"] = drawn
    return pictures
