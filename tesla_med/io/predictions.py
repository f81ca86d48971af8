"""Tables of predictions on tiles, and the labels that belong to them, whoever made them."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from tesla_med.errors import DataError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.names import fold
from tesla_med.io.tiles import find_tiles
from tesla_med.types import Record

PREFIX = "p_"
REQUIRED = ("tile", "prediction")
SUM_TOLERANCE = 1e-3  # probabilities are written with six decimals


class TileTable(Record):
    """A table as read: one entry a row; class indices are -1 where a cell is empty."""

    path: str
    classes: tuple[str, ...]
    tiles: tuple[str, ...]
    labels: tuple[int, ...] | None
    prediction: tuple[int, ...]
    source: tuple[int, ...] | None
    probs: tuple[tuple[float, ...], ...]


def _rows(path: Path, needed: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and rows of a CSV in which no tile comes twice."""
    check_fetched(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a CSV with columns {', '.join(needed)}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as handle:
            reader = csv.DictReader(handle, strict=True)
            columns = list(reader.fieldnames or [])
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8: {error}") from None
    lacking = [name for name in needed if name not in columns]
    if lacking:
        raise DataError(
            f"{path}: column {', '.join(lacking)} missing; expected {', '.join(needed)},"
            f" found {', '.join(columns) or 'none'}"
        )
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise DataError(f"{path}, line {number}: expected {len(columns)} cells as in the first line")
    twice = [name for name, count in Counter(row["tile"] for row in rows).items() if count > 1]
    if twice:
        raise DataError(f"{path}: tile {twice[0]!r} occurs more than once ({len(twice)} such); keep one row")
    if not rows:
        raise DataError(f"{path}: no row below the column names; expected one row per tile")
    return columns, rows


def read_predictions(path: Path) -> TileTable:
    """Read a table.

    Raises:
        DataError: it is no such table; names the line and what was expected.
    """
    columns, rows = _rows(path, REQUIRED)
    classes = tuple(name.removeprefix(PREFIX) for name in columns if name.startswith(PREFIX))
    if len(classes) < 2:
        raise DataError(
            f"{path}: columns of probabilities missing; expected {PREFIX}<class> for each of two or more"
            " classes"
        )
    probs, taken = [], []
    for number, row in enumerate(rows, 2):
        where = f"{path}, line {number}, tile {row['tile']!r}"
        winner = _index(row["prediction"], classes, where, "prediction")
        taken.append(winner)
        cells = [row[PREFIX + name] for name in classes]
        probs.append(_distribution(cells, where) if winner >= 0 else (float("nan"),) * len(classes))

    def column(name: str) -> tuple[int, ...] | None:
        if name not in columns:
            return None
        return tuple(
            _index(row[name], classes, f"{path}, line {number}, tile {row['tile']!r}", name)
            for number, row in enumerate(rows, 2)
        )

    return TileTable(
        path=str(path),
        classes=classes,
        tiles=tuple(row["tile"] for row in rows),
        labels=column("label"),
        prediction=tuple(taken),
        source=column("source_prediction"),
        probs=tuple(probs),
    )


def _index(text: str, classes: Sequence[str], where: str, column: str) -> int:
    if not text.strip():
        return -1
    if text not in classes:
        raise DataError(f"{where}: {column} {text!r} is not a class; expected one of {', '.join(classes)}")
    return classes.index(text)


def _distribution(cells: Sequence[str], where: str) -> tuple[float, ...]:
    try:
        values = tuple(float(cell) for cell in cells)
    except ValueError:
        raise DataError(
            f"{where}: probabilities must be numbers, got {', '.join(map(repr, cells))}"
        ) from None
    if not all(0 <= value <= 1 for value in values):
        raise DataError(f"{where}: probabilities must lie in [0, 1], got {', '.join(cells)}")
    if abs(sum(values) - 1) > SUM_TOLERANCE:
        raise DataError(f"{where}: probabilities sum to {sum(values):.6g}; expected 1")
    return values


def labels_of(
    table: TileTable, path: Path, references: Path | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the class index of every row, -1 where there is none, and labelled tiles that have no row."""
    if references is None:
        if table.labels is None:
            raise DataError(f"{path}: column label missing; give labels with --references")
        return table.labels, ()
    references = Path(references)
    if references.is_dir():
        truth = _folder_labels(references, table.classes, path.parent / "run.json")
    else:
        _, rows = _rows(references, ("tile", "label"))
        truth = {}
        for number, row in enumerate(rows, 2):
            where = f"{references}, line {number}, tile {row['tile']!r}"
            value = _index(row["label"], table.classes, where, "label")
            if value >= 0:
                truth[row["tile"]] = value
    partner = _partners(table.tiles, truth)
    found = set(partner.values())
    labels = tuple(truth[partner[tile]] if tile in partner else -1 for tile in table.tiles)
    return labels, tuple(sorted(name for name in truth if name not in found))


def _partners(tiles: Sequence[str], truth: Mapping[str, int]) -> dict[str, str]:
    """Return the labelled tile of each tile: the same path, else the same file name where it is unique."""
    partner = {tile: tile for tile in tiles if tile in truth}
    ours, theirs = (
        Counter(PurePosixPath(name).name for name in names if name not in partner) for names in (tiles, truth)
    )
    by_name = {PurePosixPath(name).name: name for name in truth if name not in partner}
    for tile in tiles:
        name = PurePosixPath(tile).name
        if tile not in partner and ours[name] == 1 and theirs[name] == 1:
            partner[tile] = by_name[name]
    return partner


def _folder_labels(folder: Path, classes: Sequence[str], record: Path) -> dict[str, int]:
    folders = {name: index for index, name in enumerate(classes)} | _site_folders(record, classes)
    present = [item for item in folder.iterdir() if item.is_dir()]
    if not {fold(item.name) for item in present} & {fold(name) for name in folders}:
        raise DataError(
            f"{folder}: no sub-folder of a class; expected {', '.join(folders)}; found"
            f" {', '.join(sorted(item.name for item in present)[:6]) or 'none'}"
        )
    tiles = find_tiles(folder, folders)
    return {name: int(label) for name, label in zip(tiles.names, tiles.labels, strict=True)}


def _site_folders(record: Path, classes: Sequence[str]) -> dict[str, int]:
    """Return the folders of the site that a run was made for, from its ``run.json``; empty without one."""
    try:
        settings = json.loads(record.read_text(encoding="utf-8"))["settings"]
        names = {item["value"]: item["name"] for item in settings["pipeline"]["classes"]}
        pairs = [(folder, names[value]) for folder, value in settings["site"]["tiles"].items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {folder: classes.index(name) for folder, name in pairs if name in classes}


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a ``predictions.csv``."""
    with path.open(encoding="utf-8", newline="") as stream:
        yield from csv.DictReader(stream)
