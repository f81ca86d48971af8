"""Figures of a classifier: accuracy, confusion and calibration of predicted classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import PipelineConfig
from tesla_med.records import TileResult
from tesla_med.scoring import calibration
from tesla_med.scoring.summary import merge, summarise

MODELS = calibration.MODELS


def confusion_figures(
    index: npt.NDArray[np.integer[Any]], predicted: npt.NDArray[np.integer[Any]], classes: int
) -> dict[str, Any]:
    """Return accuracy, in all, by class and as the mean over classes, and the confusion matrix.

    Args:
        index: (N,) class index of the label of each tile, N at least 1.
        predicted: (N,) predicted class index.
        classes: number of classes.

    Returns:
        ``accuracy``, ``error``, ``accuracy_by_class`` (None for a class without tiles),
        ``mean_class_accuracy`` and ``confusion`` (rows are labels, columns predicted classes).
    """
    from sklearn.metrics import confusion_matrix

    confusion = confusion_matrix(index, predicted, labels=range(classes))
    rows = confusion.sum(axis=1)
    by_class = [int(confusion[k, k]) / int(rows[k]) if rows[k] else None for k in range(classes)]
    known = [value for value in by_class if value is not None]
    accuracy = float(np.trace(confusion) / rows.sum())
    return {
        "accuracy": accuracy,
        "error": 1.0 - accuracy,
        "accuracy_by_class": by_class,
        "mean_class_accuracy": sum(known) / len(known),
        "confusion": confusion.tolist(),
    }


def labelled(results: Sequence[TileResult]) -> list[TileResult]:
    """Return the tiles that were read and have a label."""
    return [item for item in results if item.label and item.probs is not None]


def class_indices(results: Sequence[TileResult], pipeline: PipelineConfig) -> npt.NDArray[np.int64]:
    """Return the class index of the label of each tile; all must have one."""
    order = {item.name: index for index, item in enumerate(pipeline.classes)}
    return np.array([order[item.label] for item in results], np.int64)


def class_counts(results: Sequence[TileResult], pipeline: PipelineConfig) -> dict[str, Any] | None:
    """Return calibration counts of both models over all labelled tiles; None where there are none."""
    known = labelled(results)
    if not known:
        return None
    source, adapted = (
        np.ascontiguousarray(np.array(rows, np.float32).T)
        for rows in ([item.probs_source for item in known], [item.probs for item in known])
    )
    index = class_indices(known, pipeline)
    return calibration.count_items(source, adapted, index, pipeline.values, pipeline.report.bins)


def class_figures(results: Sequence[TileResult], pipeline: PipelineConfig) -> dict[str, Any]:
    """Return the figures of source and adapted model over all labelled tiles.

    Returns:
        ``source`` and ``adapted``, each with the figures of :func:`confusion_figures`, ``ece``, ``brier``,
        ``nll`` and ``bins``; empty without labels.
    """
    known = labelled(results)
    counts = class_counts(results, pipeline)
    if counts is None:
        return {}
    summed = summarise(merge([counts]))
    index = class_indices(known, pipeline)
    found: dict[str, Any] = {}
    for name in MODELS:
        probs = [item.probs if name == "adapted" else item.probs_source for item in known]
        predicted = np.array([int(row.argmax()) for row in probs if row is not None])
        every = summed["region"][name][calibration.ALL_CLASSES]
        found[name] = confusion_figures(index, predicted, len(pipeline.classes))
        found[name] |= {key: every[key] for key in ("ece", "brier", "nll", "bins")}
    return found
