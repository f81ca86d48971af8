"""What is written of a study: a row per cell and case, a line per site and method."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tesla_med import __version__
from tesla_med.config.study import StudyConfig
from tesla_med.errors import OutputError
from tesla_med.io.files import write_json, write_text
from tesla_med.io.tables import to_csv
from tesla_med.records import WITHOUT_RESULT, change_of, mean_of_known
from tesla_med.study.cells import CELL_FILE, Grid

STUDY_CSV, STUDY_JSON = "study.csv", "study.json"
KEY = ("cell", "site", "weights", "method", "protocol", "seed")
COLUMNS = (
    *KEY,
    *("case", "status", "used", "share", "trusted", "metric", "source", "adapted", "predicted"),
    *("reason", "seconds"),
)
PATIENCE_SECONDS = 60.0
"""A shared file system may show what another machine has renamed only after a while."""


@dataclass(frozen=True)
class Line:
    """Figures of one site under one method.

    Attributes:
        site: id.
        weights: name of the file, with as many of the folders above it as tell it from others.
        method: name.
        protocol: N-O, N-M, Y-O or Y-M.
        cells: number of seeds that are done.
        cases: rows that have a score, over all seeds.
        metric: dice, or accuracy for tiles.
        source: mean of the unadapted model over the rows that have one, in [0, 1]; None without references.
        adapted: the same of the method.
        change: mean change over the rows of which both are known (see :func:`change_in`), in [-1, 1].
        harmed: rows that lose more than a point.
        failed: rows that failed or are unscored.
        seconds: of all cells together.
    """

    site: str
    weights: str
    method: str
    protocol: str
    cells: int
    cases: int
    metric: str
    source: float | None
    adapted: float | None
    change: float | None
    harmed: int
    failed: int
    seconds: float


def read_cell(folder: Path, *, patient: bool) -> dict[str, Any]:
    """Return what a finished cell says of itself.

    Args:
        folder: of the cell.
        patient: wait for a file system that shows it late.

    Raises:
        OutputError: it is not there, or cannot be read.
    """
    path = folder / CELL_FILE
    until = time.monotonic() + (PATIENCE_SECONDS if patient else 0)
    while True:
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and isinstance(content.get("cases"), list):
                return content
            raise OutputError(f"{path}: damaged; remove the folder of the cell to have it done again")
        except FileNotFoundError:
            if time.monotonic() >= until:
                raise OutputError(
                    f"{folder}: a worker says that it is done, but it is not seen here; the folder of the "
                    "study must be on storage that all machines share"
                ) from None
            time.sleep(1)
        except (OSError, ValueError) as error:
            text = f"{path}: cannot be read ({error}); remove the folder of the cell to have it done again"
            raise OutputError(text) from None


def summarise(contents: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Return a line per site, weights, method and protocol, in the order of the study.

    Args:
        contents: of the cells that are done, with their keys.
    """
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for content in contents:
        key = tuple(str(content[name]) for name in ("site", "weights", "method", "protocol"))
        groups.setdefault(key, []).append(content)
    return [_line(key, cells) for key, cells in groups.items()]


def _line(key: tuple[str, ...], cells: Sequence[Mapping[str, Any]]) -> Line:
    rows = [row for cell in cells for row in cell["cases"]]
    scored = [row for row in rows if row["source"] is not None or row["adapted"] is not None]
    changes = [change for row in rows if (change := change_in(row)) is not None]
    site, weights, method, protocol = key
    return Line(
        site,
        weights,
        method,
        protocol,
        cells=len(cells),
        cases=len(scored),
        metric=rows[0]["metric"] if rows else "dice",
        source=mean_of_known(row["source"] for row in scored),
        adapted=mean_of_known(row["adapted"] for row in scored),
        change=mean_of_known(changes),
        harmed=sum(change < -0.01 for change in changes),
        failed=sum(row["status"] in WITHOUT_RESULT for row in rows),
        seconds=round(sum(cell["seconds"] for cell in cells), 3),
    )


def change_in(row: Mapping[str, Any]) -> float | None:
    """Return the value of the method less the source's, in [-1, 1]; None where nothing can be compared."""
    if row["status"] in WITHOUT_RESULT:
        return None
    source, adapted = row["source"], row["adapted"]
    return change_of(source, adapted, empty={source, adapted} == {None, 0.0})


def write_tables(
    out: Path,
    study: StudyConfig,
    grid: Grid,
    contents: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, str],
    summary: Sequence[Line],
    seconds: float,
) -> tuple[Path, Path]:
    """Write ``study.csv`` and ``study.json``.

    Args:
        out: folder of the study.
        study: as given.
        grid: its cells.
        contents: of the cells that are done, by name.
        failed: reasons of the others, by name.
        summary: the lines.
        seconds: from the first cell of this call to the last.

    Raises:
        OutputError: a file cannot be written.
    """
    write_text(out / STUDY_CSV, to_csv(COLUMNS, _rows(grid, contents)))
    cells = []
    for cell in grid.cells:
        known = contents.get(cell.name)
        entry: dict[str, Any] = {**cell.key, "items": cell.count, "done": known is not None}
        if known is not None:
            entry |= {key: known[key] for key in ("seconds", "host", "device")}
        entry["error"] = failed.get(cell.name)
        cells.append(entry)
    content = {
        "name": study.name,
        "version": __version__,
        "study": study.model_dump(mode="json"),
        "complete": all(cell.name in contents for cell in grid.cells) and not grid.problems,
        "seconds": round(seconds, 3),
        "sites_without_cells": [{"site": site, "error": reason} for site, reason in grid.problems],
        "cells": cells,
        "summary": [asdict(line) for line in summary],
    }
    write_json(out / STUDY_JSON, content)
    return out / STUDY_CSV, out / STUDY_JSON


def _rows(grid: Grid, contents: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for cell in grid.cells:
        if cell.name in contents:
            for row in contents[cell.name]["cases"]:
                yield {**cell.key, **row}
