"""``predictions.csv`` and ``report/metrics.json`` of a run on tiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tesla_med.io.files import write_json, write_text
from tesla_med.records import TileResult
from tesla_med.reports.base import REPORTS, Report
from tesla_med.scoring.classes import class_figures
from tesla_med.scoring.predicted import predicted_tiles
from tesla_med.scoring.score import normalised_entropy

TABLE = "predictions.csv"


@REPORTS.register("predictions")
class PredictionsReport(Report):
    """The classes of all tiles: the result of a run on tiles, so it is always written."""

    name = "predictions"
    summary = "predictions.csv, one row per tile, and metrics.json"
    kinds = (TileResult,)

    def finish(self, results: Sequence[Any]) -> list[Path]:
        """Write both files; tiles that could not be read have a row without figures."""
        classes = self.run.pipeline.classes
        table, metrics = self.run.out / TABLE, self.run.report_folder / "metrics.json"
        write_text(table, predictions_csv(results, [item.name for item in classes]))
        read = [item for item in results if item.probs is not None]
        counts = {
            "tiles": len(read),
            "labelled": sum(bool(item.label) for item in read),
            "failed": sum(item.status == "failed" for item in results),
            "blank": sum(item.status == "blank" for item in results),
            "classes": [item.value for item in classes],
            "predicted": predicted_tiles(results, self.run.pipeline).counts,
        }
        write_json(metrics, counts | class_figures(results, self.run.pipeline))
        return [table, metrics]


def predictions_csv(results: Sequence[TileResult], classes: Sequence[str]) -> str:
    """Return the table, one row a tile.

    Columns: tile, label, prediction, source_prediction, entropy, status, tissue, and p_<class> of each class.
    """
    import csv
    import io

    stream = io.StringIO()
    writer = csv.writer(stream)
    columns = ["tile", "label", "prediction", "source_prediction", "entropy", "status", "tissue"]
    writer.writerow([*columns, *(f"p_{name}" for name in classes)])
    for item in results:
        seen = [item.status, "" if item.tissue is None else f"{item.tissue:.4f}"]
        if item.probs is None or item.probs_source is None:
            writer.writerow([item.case, item.label, "", "", "", *seen, *[""] * len(classes)])
            continue
        predicted = [classes[int(probs.argmax())] for probs in (item.probs, item.probs_source)]
        entropy = float(normalised_entropy(item.probs[:, None])[0])
        figures = [f"{value:.9g}" for value in item.probs]  # as exact as they are
        writer.writerow([item.case, item.label, *predicted, f"{entropy:.6g}", *seen, *figures])
    return stream.getvalue()
