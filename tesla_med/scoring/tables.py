"""Score a ``predictions.csv`` of tiles against labels: its own column, a folder a class, or another CSV."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError
from tesla_med.io.patterns import fold
from tesla_med.scoring.calibration import count_items
from tesla_med.scoring.classes import confusion_figures
from tesla_med.scoring.summary import merge, summarise
from tesla_med.scoring.text import decimals, percent, some
from tesla_med.types import Record

TABLE = "predictions.csv"
PREFIX = "p_"
REQUIRED = ("tile", "prediction")
SUM_TOLERANCE = 1e-3  # probabilities are written with six decimals
TILE_COLUMNS = ("class", "tiles", "right", "accuracy", "accuracy_source")


class TileScores(Record):
    """Figures of one model on labelled tiles.

    Attributes:
        accuracy: share of tiles whose predicted class is the label.
        error: 1 - accuracy.
        accuracy_by_class: the same of each class's tiles; None where it has none.
        mean_class_accuracy: mean of those that exist.
        confusion: tiles; rows are labels, columns predictions.
        ece: expected calibration error of the winning class; None without probabilities, as the next two.
        brier: mean over tiles of the squared distance from the label's unit vector.
        nll: mean negative log-likelihood, in nats.
    """

    accuracy: float
    error: float
    accuracy_by_class: tuple[float | None, ...]
    mean_class_accuracy: float
    confusion: tuple[tuple[int, ...], ...]
    ece: float | None = None
    brier: float | None = None
    nll: float | None = None


class TileEvaluation(Record):
    """What was scored, and what could not be.

    Attributes:
        classes: names, in the order of the columns ``p_<class>``.
        tiles: rows of the table.
        scored: tiles with a prediction and a label.
        unread: tiles that the run could not read, so that their row has no prediction.
        only_predictions: tiles without a label.
        only_references: labelled tiles that the table lacks.
        adapted: scores of the column ``prediction`` and the probabilities.
        source: scores of the column ``source_prediction``, of which no probabilities are written.
        files: those written.
    """

    classes: tuple[str, ...]
    tiles: int
    scored: int
    unread: tuple[str, ...]
    only_predictions: tuple[str, ...]
    only_references: tuple[str, ...]
    adapted: TileScores
    source: TileScores | None = None
    files: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every tile has a prediction."""
        return not self.unread

    def remarks(self) -> list[str]:
        """Return what could not be scored, in words."""
        lists = (
            (self.unread, "without a prediction"),
            (self.only_predictions, "without a label"),
            (self.only_references, "labelled but not in the table"),
        )
        return [f"{len(names)} {text}: {some(names)}" for names, text in lists if names]

    def errors(self) -> list[str]:
        """Return nothing: tiles that were not read are among the remarks."""
        return []

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Return title, column names and rows of what is shown."""
        rows = [
            [row["class"], str(row["tiles"]), percent(row["accuracy_source"]), percent(row["accuracy"])]
            for row in class_rows(self)
        ]
        shares = [percent(None if model is None else model.accuracy) for model in (self.source, self.adapted)]
        rows.append(["all", str(self.scored), *shares])
        counts = [
            [name, *map(str, row)] for name, row in zip(self.classes, self.adapted.confusion, strict=True)
        ]
        figures = [
            ["ECE", decimals(self.adapted.ece, 3)],
            ["Brier score", decimals(self.adapted.brier, 3)],
            ["NLL, nats", decimals(self.adapted.nll, 3)],
        ]
        return [
            ("", ["class", "tiles", "source accuracy %", "adapted accuracy %"], rows),
            ("Adapted: predicted class by label", ["label", *self.classes], counts),
            ("", ["calibration, adapted", ""], figures),
        ]

    def record(self) -> dict[str, Any]:
        """Return everything, as plain values."""
        return {**self.model_dump(mode="json"), "coverage": self.coverage}

    @property
    def coverage(self) -> str:
        """How many tiles the scores cover, in words."""
        return f"scored {self.scored} of {self.tiles} tiles"


class _Table(Record):
    """A table as read: one entry a row; class indices are -1 where a cell is empty."""

    path: str
    classes: tuple[str, ...]
    tiles: tuple[str, ...]
    labels: tuple[int, ...] | None
    prediction: tuple[int, ...]
    source: tuple[int, ...] | None
    probs: tuple[tuple[float, ...], ...]


def is_tile_table(predictions: Path) -> bool:
    """Whether ``predictions`` is a CSV file, or the output folder of a run on tiles."""
    path = Path(predictions)
    return (path / TABLE).is_file() if path.is_dir() else path.suffix.lower() == ".csv"


def evaluate_tiles(
    predictions: Path,
    references: Path | None = None,
    *,
    out: Path | None = None,
    strict: bool = False,
    bins: int = 15,
) -> TileEvaluation:
    """Score a table of predictions on tiles.

    Args:
        predictions: ``predictions.csv``, or the folder of a run that holds one. Columns: ``tile``,
            ``prediction``, ``p_<class>`` of two or more classes, and ``label`` and ``source_prediction``
            if known.
        references: None takes the column ``label``. A CSV gives the columns ``tile`` and ``label``. A folder
            holds a sub-folder a class, named as the class or as the site's configuration in the ``run.json``
            beside the table names it. Tiles meet by their path, else by their file name where that is unique.
        out: where ``metrics.csv`` and ``summary.json`` are written; None writes nothing.
        strict: refuse tiles without a prediction or a label, and labels without a tile.
        bins: of the calibration error.

    Raises:
        DataError: a file is missing or no such table; a column is missing; a tile comes twice; a class is
            unknown; probabilities are no distribution; nothing can be scored; or ``strict`` finds something
            that is not.
    """
    path = Path(predictions)
    path = path / TABLE if path.is_dir() else path
    table = _read_predictions(path)
    labels, missing = _labels(table, path, references)
    known = np.array([value >= 0 for value in labels])
    read = np.array([value >= 0 for value in table.prediction])
    scored = known & read
    unread = tuple(tile for tile, ok in zip(table.tiles, read, strict=True) if not ok)
    without = tuple(tile for tile, ok in zip(table.tiles, known, strict=True) if not ok)
    if not scored.any():
        raise DataError(
            f"{path}: no tile has both a prediction and a label; give labels with --references, a folder with"
            " a sub-folder a class or a CSV with columns tile and label"
        )
    if strict and (unread or without or missing):
        raise DataError(
            f"{path}: scored {int(scored.sum())} of {len(table.tiles)} tiles, but strict was asked for:"
            f" {_some('not read', unread)}{_some('without a label', without)}{_some('not in it', missing)}"
        )
    index, count = np.array(labels)[scored], len(table.classes)
    adapted = _scores(index, np.array(table.prediction)[scored], np.array(table.probs)[scored], count, bins)
    source = None
    if table.source is not None:
        source = _scores(index, np.array(table.source)[scored], None, count, bins)
    result = TileEvaluation(
        classes=table.classes,
        tiles=len(table.tiles),
        scored=int(scored.sum()),
        unread=unread,
        only_predictions=without,
        only_references=missing,
        adapted=adapted,
        source=source,
    )
    return result if out is None else _write(result, Path(out))


# ------------------------------------------------------------ reading


def _rows(path: Path, needed: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and rows of a CSV in which no tile comes twice."""
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
        raise DataError(f"{path}: tile {twice[0]!r} comes more than once ({len(twice)} such); keep one row")
    if not rows:
        raise DataError(f"{path}: no row below the column names; expected one a tile")
    return columns, rows


def _read_predictions(path: Path) -> _Table:
    columns, rows = _rows(path, REQUIRED)
    classes = tuple(name.removeprefix(PREFIX) for name in columns if name.startswith(PREFIX))
    if len(classes) < 2:
        raise DataError(
            f"{path}: columns of probabilities missing; expected {PREFIX}<class> for each of two or more"
            " classes"
        )
    probs, taken = [], []
    for number, row in enumerate(rows, 2):
        place = f"{path}, line {number}, tile {row['tile']!r}"
        winner = _index(row["prediction"], classes, place, "prediction")
        taken.append(winner)
        cells = [row[PREFIX + name] for name in classes]
        probs.append(_distribution(cells, place) if winner >= 0 else (float("nan"),) * len(classes))

    def column(name: str) -> tuple[int, ...] | None:
        if name not in columns:
            return None
        return tuple(
            _index(row[name], classes, f"{path}, line {number}, tile {row['tile']!r}", name)
            for number, row in enumerate(rows, 2)
        )

    return _Table(
        path=str(path),
        classes=classes,
        tiles=tuple(row["tile"] for row in rows),
        labels=column("label"),
        prediction=tuple(taken),
        source=column("source_prediction"),
        probs=tuple(probs),
    )


def _index(text: str, classes: Sequence[str], place: str, column: str) -> int:
    if not text.strip():
        return -1
    if text not in classes:
        raise DataError(f"{place}: {column} {text!r} is no class; expected one of {', '.join(classes)}")
    return classes.index(text)


def _distribution(cells: Sequence[str], place: str) -> tuple[float, ...]:
    try:
        values = tuple(float(cell) for cell in cells)
    except ValueError:
        raise DataError(
            f"{place}: probabilities must be numbers, got {', '.join(map(repr, cells))}"
        ) from None
    if not all(0 <= value <= 1 for value in values):
        raise DataError(f"{place}: probabilities must lie in [0, 1], got {', '.join(cells)}")
    if abs(sum(values) - 1) > SUM_TOLERANCE:
        raise DataError(f"{place}: probabilities sum to {sum(values):.6g}; expected 1")
    return values


def _labels(table: _Table, path: Path, references: Path | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
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
            place = f"{references}, line {number}, tile {row['tile']!r}"
            value = _index(row["label"], table.classes, place, "label")
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
    from tesla_med.io.tiles import find_tiles

    folders = {name: place for place, name in enumerate(classes)} | _site_folders(record, classes)
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


# ------------------------------------------------------------ scoring


def _scores(
    index: npt.NDArray[np.int64],
    winners: npt.NDArray[np.int64],
    probs: npt.NDArray[np.float64] | None,
    classes: int,
    bins: int,
) -> TileScores:
    figures = confusion_figures(index, winners, classes)
    return TileScores(**figures, **({} if probs is None else _calibration(index, probs, bins)))


def _calibration(
    index: npt.NDArray[np.int64], probs: npt.NDArray[np.float64], bins: int
) -> dict[str, float | None]:
    """Return ece, brier and nll as the run itself computes them."""
    values = tuple(range(probs.shape[1]))
    array = np.ascontiguousarray(probs.T, np.float32)
    counts = count_items(array, array, index, values, bins)
    every = summarise(merge([counts]))["region"]["adapted"]["all"]
    return {name: every[name] for name in ("ece", "brier", "nll")}


def _write(result: TileEvaluation, out: Path) -> TileEvaluation:
    from tesla_med.io.files import to_csv, write_json, write_text

    table, summary = out / "metrics.csv", out / "summary.json"
    result = result.model_copy(update={"files": (str(table), str(summary))})
    write_text(table, to_csv(TILE_COLUMNS, class_rows(result)))
    content = result.model_dump(mode="json", exclude={"files"})
    write_json(summary, {"coverage": result.coverage, **content})
    return result


def class_rows(result: TileEvaluation) -> list[dict[str, Any]]:
    """Return one row per class, by ``TILE_COLUMNS``: tiles, correct ones, the accuracy of both models."""
    rows = []
    for place, name in enumerate(result.classes):
        counts = result.adapted.confusion[place]
        source = None if result.source is None else result.source.accuracy_by_class[place]
        values = (name, sum(counts), counts[place], result.adapted.accuracy_by_class[place], source)
        rows.append(dict(zip(TILE_COLUMNS, values, strict=True)))
    return rows


def _some(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    return f" {len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''});"
