"""``report/predicted_dice.json`` and, where references exist, ``report/predicted_dice.png``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tesla_med.engine.quality import audit, needs_review, pairs
from tesla_med.records import CaseResult
from tesla_med.reports.base import REPORTS, Report

INK = "#27313d"
MARKERS = "osD^vP*X"


@REPORTS.register("quality")
class QualityReport(Report):
    """Predicted Dice of every case, and how good the predictions were where that can be told."""

    name = "quality"
    summary = "predicted_dice.json, audited with a scatter plot where references exist"

    def finish(self, results: Sequence[CaseResult]) -> list[Path]:
        """Write the figures, and the scatter plot where at least one pair can be compared."""
        from tesla_med.io.files import atomic_path, write_json

        folder, config = self.run.report_folder, self.run.pipeline.quality
        data, picture = folder / "predicted_dice.json", folder / "predicted_dice.png"
        write_json(
            data,
            {
                "fitted_on": config.fitted_on,
                "interval_percent": 90,
                "review_below": config.review_below,
                "review": [item.case for item in results if needs_review(item, config)],
                "audit": vars(audit(results)),
                "cases": [_case(item) for item in results if item.predicted_dice is not None],
            },
        )
        if not pairs(results):
            picture.unlink(missing_ok=True)
            return [data]
        with atomic_path(picture) as temporary:
            temporary.write_bytes(scatter_png(results))
        return [data, picture]


def _case(result: CaseResult) -> dict[str, Any]:
    names = ("label", "predicted_dice", "predicted_low", "predicted_high", "dice")
    return {
        "case": result.case,
        "predicted_dice": result.predicted_dice,
        "dice": result.mean_dice,
        "classes": [{name: getattr(score, name) for name in names} for score in result.scores],
    }


def scatter_png(results: Sequence[CaseResult]) -> bytes:
    """Draw true against predicted Dice with intervals, one marker per class.

    Args:
        results: at least one of them with both.

    Returns:
        A PNG file.
    """
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [score for score, _ in pairs(results)]
    figure = Figure(figsize=(5.4, 5.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="equal")
    for number, label in enumerate(dict.fromkeys(score.label for score in found)):
        scores = [score for score in found if score.label == label]
        predicted = [score.predicted_dice or 0.0 for score in scores]
        reach = [
            [
                max(0.0, value - (score.predicted_low or 0.0))
                for value, score in zip(predicted, scores, strict=True)
            ],
            [
                max(0.0, (score.predicted_high or 0.0) - value)
                for value, score in zip(predicted, scores, strict=True)
            ],
        ]
        axes.errorbar(
            predicted,
            [score.dice or 0.0 for score in scores],
            xerr=reach,
            fmt=MARKERS[number % len(MARKERS)],
            color=("#1f6f8b", "#b4552d", "#5a7d2a", "#7a4a8c")[number % 4],
            ecolor="#c9d1da",
            elinewidth=1,
            markersize=5,
            label=scores[0].name,
        )
    summary = audit(results)
    text = "n/a" if summary.correlation is None else f"{summary.correlation:.2f}"
    covered = "n/a" if summary.coverage is None else f"{100 * summary.coverage:.0f} %"
    axes.set_title(f"r {text}, {covered} of {summary.pairs} in their 90 % interval", color=INK, fontsize=10.5)
    lowest = min(min(score.dice or 0.0, score.predicted_low or 0.0) for score in found)
    start = max(-0.02, min(0.9, lowest - 0.05))  # below 0, so that a Dice of 0 is seen
    axes.set(xlim=(start, 1), ylim=(start, 1), xlabel="predicted Dice", ylabel="true Dice")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e8ebef", linewidth=0.8)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()
