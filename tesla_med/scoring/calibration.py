"""How far class probabilities can be trusted: binned calibration error, Brier score, log-loss.

Figures are sums over voxels, so that counts of cases add up exactly to the counts of a site.
Each is kept for the unadapted model ("source") and the method ("adapted"), over three areas
("region", "boundary", "all" voxels), for every class value and for "all" classes together:

* one class: confidence is its probability, correct is that the voxel belongs to it;
  Brier (p - y)^2; log-loss of the yes-or-no question.
* "all": confidence is the highest probability of the voxel, correct is that this class is the true
  one; Brier sum over classes of (p_c - y_c)^2, in [0, 2]; log-loss -ln p of the true class.

The region is what matters in segmentation: background far from the structure is easy, and there
are so many such voxels that they hide a badly calibrated structure. The boundary is the band about
the edges of the reference alone, so it is the same for every method.

Intervals come from resampling cases, since voxels of one case are anything but independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError
from tesla_med.scoring.metrics import bounding_box
from tesla_med.types import BoolArray, IntArray

EPSILON = 1e-12
TOLERANCE = 1e-4
AREAS = ("region", "boundary", "all")
MODELS = ("source", "adapted")
DIFFERENCE = "difference"
ALL_CLASSES = "all"
SLAB_VOXELS = 1 << 22
"""Voxels that are counted at once."""
FIGURES = ("ece", "brier", "nll")
BOUNDARY_WIDTH = 3
"""Voxels on each side of an edge of the reference that belong to its boundary."""
INTERVAL_LEVEL = 0.95
BOOTSTRAP_DRAWS = 1000
BOOTSTRAP_SEED = 0
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CalibrationCounts:
    """Sums over the voxels of any number of cases, for one model, area and target.

    Attributes:
        count: (n,) voxels in each bin of confidence. Bins are (low, high], equally wide over
            [0, 1]; the first also holds 0, so that the last one holds exactly 1.0.
        confidence: (n,) sum of confidences in each bin.
        correct: (n,) number of correct voxels in each bin.
        brier: sum of squared errors.
        nll: sum of negative log-likelihoods, natural logarithm, probabilities at least ``EPSILON``.
        clipped: voxels whose probability of what is true lay below ``EPSILON``.
    """

    count: Doubles
    confidence: Doubles
    correct: Doubles
    brier: float = 0.0
    nll: float = 0.0
    clipped: int = 0

    @property
    def voxels(self) -> int:
        """Number of voxels counted."""
        return int(self.count.sum())

    @property
    def ece(self) -> float | None:
        """Expected calibration error in [0, 1]: mean |accuracy - confidence| of bins by voxels."""
        if not self.voxels:
            return None
        return float(np.abs(self.correct - self.confidence).sum() / self.voxels)

    def __add__(self, other: CalibrationCounts) -> CalibrationCounts:
        """Return the counts of both sets of voxels together."""
        return CalibrationCounts(
            self.count + other.count,
            self.confidence + other.confidence,
            self.correct + other.correct,
            self.brier + other.brier,
            self.nll + other.nll,
            self.clipped + other.clipped,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers and lists."""
        return {
            "voxels": self.voxels,
            "count": [int(value) for value in self.count],
            "confidence": self.confidence.tolist(),
            "correct": [int(value) for value in self.correct],
            "brier": self.brier,
            "nll": self.nll,
            "clipped": self.clipped,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> CalibrationCounts:
        """Return what :meth:`to_json` wrote."""
        count, confidence, correct = (
            np.asarray(content[key], np.float64) for key in ("count", "confidence", "correct")
        )
        rest = float(content["brier"]), float(content["nll"]), int(content["clipped"])
        return cls(count, confidence, correct, *rest)

    def summary(self) -> dict[str, Any]:
        """Return ECE, means and bins; figures without voxels are None."""
        voxels, filled = self.voxels, self.count > 0
        with np.errstate(invalid="ignore"):
            confidence = np.divide(self.confidence, self.count, where=filled, out=np.zeros_like(self.count))
            accuracy = np.divide(self.correct, self.count, where=filled, out=np.zeros_like(self.count))
        return {
            "ece": self.ece,
            "brier": self.brier / voxels if voxels else None,
            "nll": self.nll / voxels if voxels else None,
            "voxels": voxels,
            "clipped": self.clipped,
            "bins": {
                "edges": bin_edges(len(self.count)).tolist(),
                "confidence": [float(v) if f else None for v, f in zip(confidence, filled, strict=True)],
                "accuracy": [float(v) if f else None for v, f in zip(accuracy, filled, strict=True)],
                "count": [int(value) for value in self.count],
            },
        }


def joined_bins(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bins of several :meth:`CalibrationCounts.summary` as those of all their voxels together."""
    count = np.sum([part["count"] for part in parts], axis=0)
    joined: dict[str, Any] = {"edges": parts[0]["edges"], "count": [int(value) for value in count]}
    for name in ("confidence", "accuracy"):
        total = np.sum(
            [[(v or 0.0) * n for v, n in zip(part[name], part["count"], strict=True)] for part in parts],
            axis=0,
        )
        joined[name] = [float(v / n) if n else None for v, n in zip(total, count, strict=True)]
    return joined


def bin_edges(bins: int) -> Doubles:
    """Return the ``bins + 1`` edges of equally wide bins over [0, 1]."""
    return np.linspace(0.0, 1.0, bins + 1)


def count_binary(
    probability: npt.NDArray[np.floating[Any]], correct: BoolArray, bins: int
) -> CalibrationCounts:
    """Count one yes-or-no question: how often is what has this probability true?

    Args:
        probability: any shape, in [0, 1].
        correct: same shape, whether it is true.
        bins: number of bins.

    Raises:
        DataError: a probability outside [0, 1], or shapes that differ.
    """
    _check_probabilities(probability)
    if probability.shape != correct.shape:
        raise DataError(f"probabilities {probability.shape} and truth {correct.shape} differ in shape")
    values = np.clip(probability.astype(np.float64).ravel(), 0.0, 1.0)
    truth = correct.ravel()
    of_truth = np.where(truth, values, 1.0 - values)
    return _counts(values, truth, of_truth, float(np.square(1.0 - of_truth).sum()), bins)


def count_case(
    probs_source: npt.NDArray[np.float32],
    probs: npt.NDArray[np.float32],
    reference: IntArray,
    region: BoolArray,
    values: Sequence[int],
    bins: int = 15,
    boundary: BoolArray | None = None,
) -> dict[str, Any]:
    """Count one case for both models, every area, every class and all classes.

    Args:
        probs_source: (L, I, J, K) float32 in [0, 1], the unadapted model.
        probs: (L, I, J, K) float32 in [0, 1], the method.
        reference: (I, J, K) class *indices* 0 to L - 1.
        region: (I, J, K) bool, see :func:`calibration_region`.
        values: label value of each class, L of them; they are the keys of the result.
        bins: number of bins.
        boundary: (I, J, K) bool, see :func:`boundary_band`; None leaves this area out.

    Returns:
        Plain numbers, lists and dicts, to be given to :func:`merge`.

    Raises:
        DataError: a probability outside [0, 1] or not finite, shapes that differ, or an index
            that is no class.
    """
    _check_case(probs_source, probs, reference, {"region": region, "boundary": boundary}, len(values))
    result: dict[str, Any] = {"cases": 1, "bins": bins, "values": [int(value) for value in values]}
    for model, array in zip(MODELS, (probs_source, probs), strict=True):
        areas: dict[str, dict[str, CalibrationCounts]] = {}
        for part in _slabs(reference.shape):
            every_class: tuple[slice, ...] = (slice(None), *part)
            near, truth, probabilities = region[part], reference[part], array[every_class]
            inside = _count_voxels(probabilities[:, near], truth[near], values, bins)
            outside = _count_voxels(probabilities[:, ~near], truth[~near], values, bins)
            found = {"region": inside, "all": {key: item + outside[key] for key, item in inside.items()}}
            if boundary is not None:
                edge = boundary[part]
                found["boundary"] = _count_voxels(probabilities[:, edge], truth[edge], values, bins)
            for area, counts in found.items():
                before = areas.get(area)
                areas[area] = (
                    counts if before is None else {key: before[key] + item for key, item in counts.items()}
                )
        result[model] = {
            area: {key: item.to_json() for key, item in areas[area].items()}
            for area in AREAS
            if area in areas
        }
    return result


def count_region(
    probs: npt.NDArray[np.float32], reference: IntArray, region: BoolArray, bins: int = 15
) -> CalibrationCounts:
    """Count the predicted class of one model inside a region alone; see :func:`count_case`.

    Args:
        probs: (L, I, J, K) float32 in [0, 1].
        reference: (I, J, K) class *indices* 0 to L - 1.
        region: (I, J, K) bool, see :func:`calibration_region`.
        bins: number of bins.

    Raises:
        DataError: as :func:`count_case` does.
    """
    _check_case(probs, probs, reference, {"region": region}, len(probs))
    inside, truth = probs[:, region], reference[region]
    _check_probabilities(inside)
    return _all_classes(inside, truth, bins)


def _slabs(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Yield slabs of the last axis of at most ``SLAB_VOXELS``, or one plane: sums then need little memory."""
    plane = max(1, int(np.prod(shape[:-1])))
    thick = max(1, SLAB_VOXELS // plane)
    for start in range(0, max(shape[-1], 1), thick):
        yield (*(slice(None) for _ in shape[:-1]), slice(start, start + thick))


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


def calibration_region(
    reference: IntArray, *masks: IntArray, dilation: int = 3, slice_axis: int = 2
) -> BoolArray:
    """Return the voxels near any structure: all foregrounds united, then dilated within slices.

    Args:
        reference: (I, J, K) label values, 0 outside.
        *masks: further (I, J, K) masks, such as those of the unadapted and the adapted model.
        dilation: radius in voxels of the disc that dilates, 0 for none.
        slice_axis: the axis that runs from slice to slice, along which nothing is dilated.

    Raises:
        DataError: the shapes differ.
    """
    union: BoolArray = reference != 0
    for mask in masks:
        if mask.shape != reference.shape:
            raise DataError(f"masks must have one shape, got {reference.shape} and {mask.shape}")
        union = union | (mask != 0)
    if dilation <= 0 or not union.any():
        return union
    box, disc = _surroundings(union, dilation, slice_axis)
    region = np.zeros_like(union)
    region[box] = _dilate(union[box], disc)
    return region


def boundary_band(reference: IntArray, width: int = BOUNDARY_WIDTH, slice_axis: int = 2) -> BoolArray:
    """Return the voxels near an edge of the reference: the bands of all foreground classes united.

    The band of a class holds the voxels of the class with a voxel of something else within
    ``width``, and those of something else with a voxel of the class within ``width``, both within
    slices. The rim of the grid is not an edge.

    Args:
        reference: (I, J, K) label values or class indices, 0 outside.
        width: voxels on each side of the edge, the radius of a disc, at least 0; 0 gives an empty band.
        slice_axis: the axis that runs from slice to slice.

    Returns:
        (I, J, K) bool; nowhere true where the reference has no foreground.
    """
    band = np.zeros(reference.shape, dtype=np.bool_)
    if width <= 0:
        return band
    for label in np.unique(reference[reference != 0]):
        inside: BoolArray = reference == label
        box, disc = _surroundings(inside, width, slice_axis)
        band[box] |= _dilate(inside[box], disc) & _dilate(~inside[box], disc)
    return band


def _surroundings(
    mask: BoolArray, radius: int, slice_axis: int
) -> tuple[tuple[slice, ...], npt.NDArray[np.bool_]]:
    """Return the box of all voxels within ``radius`` in-plane of the mask, and a disc of that radius."""
    axis = slice_axis % mask.ndim
    radii = [0 if item == axis else radius for item in range(mask.ndim)]
    grids = np.ogrid[tuple(slice(-item, item + 1) for item in radii)]
    disc = np.asarray(sum(np.square(grid) for grid in grids) <= radius**2)
    box = tuple(
        slice(max(0, part.start - item), part.stop + item)
        for part, item in zip(bounding_box(mask), radii, strict=True)
    )
    return box, disc


def _dilate(mask: BoolArray, structure: BoolArray) -> BoolArray:
    from scipy.ndimage import binary_dilation

    grown: BoolArray = binary_dilation(mask, structure=structure)
    return grown


def _check_case(
    probs_source: npt.NDArray[np.float32],
    probs: npt.NDArray[np.float32],
    reference: IntArray,
    areas: Mapping[str, BoolArray | None],
    classes: int,
) -> None:
    for what, array in (("source", probs_source), ("adapted", probs)):
        if array.shape != (classes, *reference.shape):
            raise DataError(
                f"{what} probabilities must be ({classes} classes, *{reference.shape}), got {array.shape}"
            )
    for name, area in areas.items():
        if area is not None and area.shape != reference.shape:
            raise DataError(f"reference {reference.shape} and {name} {area.shape} differ in shape")
    if reference.size and not 0 <= int(reference.min()) <= int(reference.max()) < classes:
        raise DataError(
            f"reference must hold class indices 0 to {classes - 1}, got"
            f" {int(reference.min())} to {int(reference.max())}"
        )


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


def _count_voxels(
    probs: npt.NDArray[np.float32], reference: IntArray, values: Sequence[int], bins: int
) -> dict[str, CalibrationCounts]:
    """Count (L, V) probabilities against (V,) class indices."""
    _check_probabilities(probs)
    counted = {ALL_CLASSES: _all_classes(probs, reference, bins)}
    for index, value in enumerate(values):
        counted[str(int(value))] = count_binary(probs[index], reference == index, bins)
    return counted


def _all_classes(probs: npt.NDArray[np.float32], reference: IntArray, bins: int) -> CalibrationCounts:
    """Count the predicted class of (L, V) probabilities against (V,) class indices."""
    best = probs.argmax(axis=0)
    confidence = np.clip(_pick(probs, best), 0.0, 1.0)
    of_truth = np.clip(_pick(probs, reference), 0.0, 1.0)
    squares = sum(float(np.square(channel.astype(np.float64)).sum()) for channel in probs)
    brier = squares - 2.0 * float(of_truth.sum()) + len(reference)
    return _counts(confidence, best == reference, of_truth, brier, bins)


def _counts(
    confidence: Doubles, correct: BoolArray, of_truth: Doubles, brier: float, bins: int
) -> CalibrationCounts:
    place = np.searchsorted(bin_edges(bins)[1:-1], confidence, side="left")
    sums = [np.bincount(place, weights=item, minlength=bins) for item in (confidence, correct)]
    return CalibrationCounts(
        np.bincount(place, minlength=bins).astype(np.float64),
        sums[0].astype(np.float64),
        sums[1].astype(np.float64),
        brier,
        float(-np.log(np.maximum(of_truth, EPSILON)).sum()),
        int(np.count_nonzero(of_truth < EPSILON)),
    )


def _pick(probs: npt.NDArray[np.float32], index: IntArray) -> Doubles:
    chosen: Doubles = np.take_along_axis(probs, index[None].astype(np.intp), axis=0)[0].astype(np.float64)
    return chosen


def _check_probabilities(probs: npt.NDArray[np.floating[Any]]) -> None:
    if not probs.size:
        return
    low, high = float(probs.min()), float(probs.max())
    if not (low >= -TOLERANCE and high <= 1.0 + TOLERANCE):
        raise DataError(
            f"expected probabilities in [0, 1], got values from {low:g} to {high:g};"
            " give probabilities, not logits"
        )
