"""Score a ``predictions.csv`` of tiles against labels: its own column, class folders, or another CSV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError
from tesla_med.io.predictions import labels_of, read_predictions
from tesla_med.scoring.calibration import count_items
from tesla_med.scoring.classes import confusion_figures
from tesla_med.scoring.predicted import tile_remarks
from tesla_med.scoring.summary import merge, summarise
from tesla_med.scoring.text import decimals, percent, some
from tesla_med.types import Record

TABLE = "predictions.csv"
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
        columns = zip(self.classes, zip(*self.adapted.confusion, strict=True), strict=True)
        counts = {name: {"adapted": sum(column)} for name, column in columns}
        found = [f"{len(names)} {text}: {some(names, 10)}" for names, text in lists if names]
        return [*found, *tile_remarks(counts)]

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
            holds one sub-folder per class, named after the class or as in the site's configuration in the
            ``run.json`` beside the table. Tiles match by path, else by file name where that is unique.
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
    table = read_predictions(path)
    labels, missing = labels_of(table, path, references)
    known = np.array([value >= 0 for value in labels])
    read = np.array([value >= 0 for value in table.prediction])
    scored = known & read
    unread = tuple(tile for tile, ok in zip(table.tiles, read, strict=True) if not ok)
    without = tuple(tile for tile, ok in zip(table.tiles, known, strict=True) if not ok)
    if not scored.any():
        raise DataError(
            f"{path}: no tile has both a prediction and a label; give labels with --references, a folder with"
            " one sub-folder per class or a CSV with columns tile and label"
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
    from tesla_med.io.files import write_json, write_text
    from tesla_med.io.tables import to_csv

    table, summary = out / "metrics.csv", out / "summary.json"
    result = result.model_copy(update={"files": (str(table), str(summary))})
    write_text(table, to_csv(TILE_COLUMNS, class_rows(result)))
    content = result.model_dump(mode="json", exclude={"files"})
    write_json(summary, {"coverage": result.coverage, **content})
    return result


def class_rows(result: TileEvaluation) -> list[dict[str, Any]]:
    """Return one row per class, by ``TILE_COLUMNS``: tiles, correct ones, the accuracy of both models."""
    rows = []
    for index, name in enumerate(result.classes):
        counts = result.adapted.confusion[index]
        source = None if result.source is None else result.source.accuracy_by_class[index]
        values = (name, sum(counts), counts[index], result.adapted.accuracy_by_class[index], source)
        rows.append(dict(zip(TILE_COLUMNS, values, strict=True)))
    return rows


def _some(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    return f" {len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''});"
