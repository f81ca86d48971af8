"""``report/metrics.csv``: one row per case and foreground class; for tiles, one row per class."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tesla_med.records import CaseResult, ClassScore, TileResult
from tesla_med.reports.base import REPORTS, Report
from tesla_med.scoring.metrics import figure_columns
from tesla_med.scoring.tables import TILE_COLUMNS

CASE = ("case", "site", "method", "protocol", "seed")
OUTCOME = ("used", "status", "share", "trusted", "scaling", "reason")
PREDICTED = ("predicted_dice", "predicted_low", "predicted_high")


def columns() -> tuple[str, ...]:
    """Return the columns of the table: with those of every metric."""
    return (*CASE, "label", *figure_columns(), *OUTCOME, *PREDICTED)


@REPORTS.register("table")
class TableReport(Report):
    """Scores as a table; blank where a figure does not exist, never 0 in its place."""

    name = "table"
    summary = "metrics.csv: one row per case and class; for tiles, one row per class"
    kinds = (CaseResult, TileResult)

    def finish(self, results: Sequence[Any]) -> list[Path]:
        """Write the table; failed cases have rows too, with blank figures."""
        from tesla_med.io.files import write_text
        from tesla_med.io.tables import to_csv

        path = self.run.report_folder / "metrics.csv"
        if issubclass(self.run.kind, TileResult):
            write_text(path, to_csv(TILE_COLUMNS, self._class_rows(results)))
        else:
            write_text(path, to_csv(columns(), self._rows(results)))
        return [path]

    def _class_rows(self, results: Sequence[TileResult]) -> Iterator[dict[str, Any]]:
        for item in self.run.pipeline.classes:
            tiles = [tile for tile in results if tile.label == item.name and tile.correct is not None]
            right = ([tile.correct for tile in tiles], [tile.correct_source for tile in tiles])
            counts = [sum(map(bool, values)) for values in right]
            shares = [count / len(tiles) if tiles else None for count in counts]
            yield dict(zip(TILE_COLUMNS, (item.name, len(tiles), counts[0], *shares), strict=True))

    def _rows(self, results: Sequence[CaseResult]) -> Iterator[dict[str, Any]]:
        classes = self.run.pipeline.foreground
        for result in results:
            scores = result.scores or tuple(ClassScore(label=item.value, name=item.name) for item in classes)
            for score in scores:
                common = result.model_dump(include={*CASE, *OUTCOME})
                figures = {name: score.value(name) for name in (*figure_columns(), *PREDICTED)}
                yield common | {"label": score.label} | figures
