"""``report/confusion.png``: the predicted classes of the tiles of each label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tesla_med.config.models import PipelineConfig
from tesla_med.io.files import write_bytes
from tesla_med.records import TileResult
from tesla_med.reports.base import REPORTS, Report
from tesla_med.reports.drawing import INK, png_of
from tesla_med.scoring.classes import class_figures


@REPORTS.register("confusion")
class ConfusionReport(Report):
    """Confusion matrices of the unadapted model and of the method, side by side."""

    name = "confusion"
    summary = "confusion.png, predicted class by label"
    kinds = (TileResult,)

    def finish(self, results: Sequence[Any]) -> list[Path]:
        """Draw the matrices; without a label there is nothing to draw."""
        path = self.run.report_folder / "confusion.png"
        figures = class_figures(results, self.run.pipeline)
        if not figures:
            path.unlink(missing_ok=True)
            return []
        write_bytes(path, confusion_png(figures, self.run.pipeline))
        return [path]


def confusion_png(figures: Mapping[str, Any], pipeline: PipelineConfig) -> bytes:
    """Return a PNG with the share of each predicted class among the tiles of a label, for both models."""
    from matplotlib.figure import Figure

    names = [item.name for item in pipeline.classes]
    figure = Figure(figsize=(9, 4.4), layout="constrained", facecolor="white")
    for part, name in zip(figure.subplots(1, 2), ("source", "adapted"), strict=True):
        counts = np.array(figures[name]["confusion"], float)
        share = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        part.imshow(share, cmap="Blues", vmin=0, vmax=1)
        for row in range(len(names)):
            for column in range(len(names)):
                colour = "white" if share[row, column] > 0.5 else INK
                text = f"{100 * share[row, column]:.0f}"
                part.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
        part.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
        part.set_yticks(range(len(names)), names, fontsize=8)
        part.set_xlabel("predicted class, % of the tiles of a label", color=INK)
        part.set_ylabel("label", color=INK)
        part.tick_params(length=0)
        part.spines[:].set_color("#aab3bf")
        accuracy = 100 * figures[name]["accuracy"]
        part.set_title(f"{name}: accuracy {accuracy:.1f} %", color=INK, fontsize=11)
    return png_of(figure)
