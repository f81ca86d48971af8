"""Calibration counts of many cases added up: figures, their intervals over resampled cases, and differences.

Intervals come from resampling cases, since voxels of one case are anything but independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tesla_med.errors import DataError
from tesla_med.scoring.calibration import (
    ALL_CLASSES,
    AREAS,
    EPSILON,
    FIGURES,
    MODELS,
    CalibrationCounts,
    Doubles,
)
from tesla_med.types import BoolArray

DIFFERENCE = "difference"
INTERVAL_LEVEL = 0.95
BOOTSTRAP_DRAWS = 1000
BOOTSTRAP_SEED = 0


def merge(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Add up the results of :func:`count_case`; None where there are none.

    An area that some of them lack, such as the boundary in counts of earlier versions, is left out:
    its figures would be those of other cases than the rest.

    Raises:
        DataError: they differ in the number of bins or in the classes.
    """
    total: dict[str, Any] | None = None
    for item in counts:
        if total is None:
            total = dict(item)
            continue
        if (item["bins"], item["values"]) != (total["bins"], total["values"]):
            raise DataError(
                f"calibration counts do not add up: {total['bins']} bins of classes {total['values']} against"
                f" {item['bins']} bins of classes {item['values']}; score all cases with the same settings"
            )
        total["cases"] += item["cases"]
        for model in MODELS:
            total[model] = {
                area: {
                    key: (CalibrationCounts.from_json(old) + CalibrationCounts.from_json(new)).to_json()
                    for (key, old), new in zip(
                        total[model][area].items(), item[model][area].values(), strict=True
                    )
                }
                for area in AREAS
                if area in total[model] and area in item[model]
            }
    return total


def summarise(merged: Mapping[str, Any] | None, cases: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return the content of ``calibration.json``.

    ``result["region" | "boundary" | "all"]["source" | "adapted"]["all" | class value]`` holds ece,
    brier, nll, the interval of each (``ece_interval`` and so on: [low, high] or None), voxels,
    clipped and bins (edges, confidence, accuracy, count). Beside the models, "difference" holds
    adapted minus source of the three figures with their intervals. Without any scored case there
    are no figures, only ``scored_cases`` 0 and a sentence that says so.

    Args:
        merged: from :func:`merge`.
        cases: the counts of single cases that were merged, to be resampled; without them, or with
            fewer than two, the intervals are None.
    """
    if merged is None:
        return {"scored_cases": 0, "note": "no case has a usable reference, so nothing was measured"}
    result: dict[str, Any] = {
        "scored_cases": merged["cases"],
        "number_of_bins": merged["bins"],
        "values": merged["values"],
        "epsilon": EPSILON,
        "intervals": {"level": INTERVAL_LEVEL, "draws": BOOTSTRAP_DRAWS, "seed": BOOTSTRAP_SEED},
    }
    for area in (item for item in AREAS if item in merged["source"]):
        bounds = bootstrap_intervals(cases, area)
        result[area] = {
            model: {
                key: _with_intervals(CalibrationCounts.from_json(item).summary(), bounds.get((model, key)))
                for key, item in merged[model][area].items()
            }
            for model in MODELS
        }
        source, adapted = (result[area][model] for model in MODELS)
        result[area][DIFFERENCE] = {
            key: _with_intervals(_difference(source[key], adapted[key]), bounds.get((DIFFERENCE, key)))
            for key in source
        }
    return result


def bootstrap_intervals(
    cases: Sequence[Mapping[str, Any]],
    area: str,
    draws: int = BOOTSTRAP_DRAWS,
    seed: int = BOOTSTRAP_SEED,
) -> dict[tuple[str, str], dict[str, list[float]]]:
    """Return percentile intervals at ``INTERVAL_LEVEL`` of ECE, Brier score and log-loss.

    As many cases as there are get drawn with replacement, and the figures are those of the drawn
    cases together. Both models are given the same draws, so that the interval of their difference
    is one of pairs. Draws without any voxel in the area are left out. The ECE of a resample is
    somewhat larger than that of all cases, so for a nearly perfect model the interval may lie above it.

    Args:
        cases: results of :func:`count_case` with the same classes and bins, all of which have the area.
        area: one of ``AREAS``.
        draws: number of resamples.
        seed: of the generator; the same cases in the same order have the same intervals.

    Returns:
        By ("source", "adapted" or "difference", target) and figure: [low, high]. Empty where fewer
        than two cases have voxels in the area.
    """
    found = [item for item in cases if item["source"][area][ALL_CLASSES]["voxels"]]
    if len(found) < 2:
        return {}
    size = len(cases)
    weights = (
        np.random.default_rng(seed).multinomial(size, np.full(size, 1.0 / size), draws).astype(np.float64)
    )
    keys = list(cases[0]["source"][area])
    by_model = [_resample([item[model][area] for item in cases], keys, weights) for model in MODELS]
    resampled = np.stack([*by_model, by_model[1] - by_model[0]])
    tails = (1.0 - INTERVAL_LEVEL) / 2.0
    low, high = np.quantile(resampled[:, :, _has_voxels(cases, area, weights)], (tails, 1.0 - tails), axis=2)
    return {
        (model, key): {
            figure: [float(low[i, k, j]), float(high[i, k, j])] for k, figure in enumerate(FIGURES)
        }
        for i, model in enumerate((*MODELS, DIFFERENCE))
        for j, key in enumerate(keys)
    }


def _difference(source: Mapping[str, Any], adapted: Mapping[str, Any]) -> dict[str, Any]:
    """Return adapted minus source of each figure, None where either does not exist."""
    return {
        figure: None
        if source[figure] is None or adapted[figure] is None
        else adapted[figure] - source[figure]
        for figure in FIGURES
    }


def _with_intervals(figures: Mapping[str, Any], bounds: Mapping[str, list[float]] | None) -> dict[str, Any]:
    """Return the figures, each followed by its interval."""
    result: dict[str, Any] = {}
    for key, value in figures.items():
        result[key] = value
        if key in FIGURES:
            result[f"{key}_interval"] = None if bounds is None else bounds[key]
    return result


def _has_voxels(cases: Sequence[Mapping[str, Any]], area: str, weights: Doubles) -> BoolArray:
    """Return which draws, (draws, cases) times drawn, hold a voxel of the area."""
    voxels = np.array([item["source"][area][ALL_CLASSES]["voxels"] for item in cases], np.float64)
    drawn: BoolArray = weights @ voxels > 0
    return drawn


def _resample(items: Sequence[Mapping[str, Any]], keys: Sequence[str], weights: Doubles) -> Doubles:
    """Return the figures of every draw.

    Args:
        items: the counts of one model and area by target, for each of C cases.
        keys: the T targets.
        weights: (draws, C) how often each case was drawn.

    Returns:
        (3 figures, draws, T); not finite where a draw has no voxel.
    """

    def drawn(name: str) -> Doubles:
        table = np.array([[item[key][name] for key in keys] for item in items], np.float64)
        sums: Doubles = np.tensordot(weights, table, axes=1)
        return sums

    voxels = drawn("voxels")
    gap = np.abs(drawn("correct") - drawn("confidence")).sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        figures: Doubles = np.stack([gap, drawn("brier"), drawn("nll")]) / voxels
    return figures
