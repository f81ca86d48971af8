"""``report/metrics.csv``: one row for each case and foreground class."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.reports.base import REPORTS, Report
from tesla_med.types import CaseResult, ClassScore

COLUMNS = (
    "case",
    "site",
    "method",
    "protocol",
    "seed",
    "label",
    "dice",
    "dice_source",
    "hd95_mm",
    "assd_mm",
    "volume_ml",
    "volume_ml_source",
    "used",
    "status",
    "share",
    "reason",
    "predicted_dice",
    "predicted_low",
    "predicted_high",
)
FIGURES = (
    *("dice", "dice_source", "hd95_mm", "assd_mm", "volume_ml", "volume_ml_source"),
    *("predicted_dice", "predicted_low", "predicted_high"),
)


@REPORTS.register("table")
class TableReport(Report):
    """Scores as a table; blank where a figure does not exist, never 0 in its place."""

    name = "table"
    summary = "metrics.csv, one row for each case and class"

    def finish(self, results: Sequence[CaseResult]) -> list[Path]:
        """Write the table; failed cases have rows too, with blank figures."""
        from tesla_med.io.files import write_text

        path = self.run.report_folder / "metrics.csv"
        write_text(path, to_csv(COLUMNS, self._rows(results)))
        return [path]

    def _rows(self, results: Sequence[CaseResult]) -> Iterator[dict[str, Any]]:
        classes = self.run.pipeline.foreground
        for result in results:
            scores = result.scores or tuple(ClassScore(label=item.value, name=item.name) for item in classes)
            for score in scores:
                common = result.model_dump(include=set(COLUMNS))
                yield common | {"label": score.label} | {name: getattr(score, name) for name in FIGURES}


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return comma-separated text with a header; None is blank, floats have 6 significant digits."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: _text(row[key]) for key in columns})
    return stream.getvalue()


def _text(value: Any) -> Any:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value
