"""Cells of a comparison that are runs on tiles: what they leave behind, as rows and figures.

Labels are those of the cells' own ``predictions.csv``, which is written after every prediction is final.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tesla_med.config.files import load_pipeline
from tesla_med.config.tables import TableConfig
from tesla_med.errors import ConfigError

CALIBRATION = ("ece", "brier", "nll", "bins")


def of_tiles(table: TableConfig) -> bool:
    """Return whether a table compares runs on tiles.

    Raises:
        ConfigError: its rows are of several tasks, or it asks for pictures that are made of volumes.
    """
    names = dict.fromkeys((table.pipeline, *(row.pipeline for row in table.rows if row.pipeline)))
    tasks = {name: load_pipeline(name).task for name in names}
    if len(set(tasks.values())) > 1:
        listed = ", ".join(f"{name} ({task})" for name, task in tasks.items())
        raise ConfigError(f"a table compares runs of one task; its pipelines are {listed}")
    tiles = "classification" in tasks.values()
    if tiles and table.figures:
        raise ConfigError(f"figures: {', '.join(table.figures)} show volumes; a table of tiles has none")
    return tiles


def predictions(path: Path) -> Iterator[dict[str, Any]]:
    """Yield tile, label, prediction, source_prediction, whether each was right, and the status.

    Args:
        path: a ``predictions.csv`` of :func:`tesla_med.tasks.tile_runs.adapt_tiles`.

    Yields:
        ``right`` and ``right_source`` are 1.0 or 0.0, None where the tile has no label or could not be
        read; ``status`` is ok, unscored or failed.
    """
    with path.open(encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            label, taken, before = row["label"], row["prediction"], row["source_prediction"]
            status = "failed" if not taken else "ok" if label else "unscored"
            scored = status == "ok"
            yield {
                "case": row["tile"],
                "label": label or None,
                "prediction": taken or None,
                "source_prediction": before or None,
                "right": float(label == taken) if scored else None,
                "right_source": float(label == before) if scored else None,
                "status": status,
            }


def calibration_of(path: Path) -> dict[str, Any] | None:
    """Return ece, brier, nll and bins of the adapted model; None without labels."""
    figures: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if "adapted" not in figures:
        return None
    return {name: figures["adapted"][name] for name in CALIBRATION}
