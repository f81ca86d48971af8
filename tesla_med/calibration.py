"""How far class probabilities can be trusted: binned calibration error, Brier score, log-loss.

Figures are sums over voxels, so that counts of cases add up exactly to the counts of a site.
Each is kept for the unadapted model ("source") and the method ("adapted"), over two areas
("region", "all" voxels), for every class value and for "all" classes together:

* one class: confidence is its probability, correct is that the voxel belongs to it;
  Brier (p - y)^2; log-loss of the yes-or-no question.
* "all": confidence is the highest probability of the voxel, correct is that this class is the true
  one; Brier sum over classes of (p_c - y_c)^2, in [0, 2]; log-loss -ln p of the true class.

The region is what matters in segmentation: background far from the structure is easy, and there
are so many such voxels that they hide a badly calibrated structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError
from tesla_med.metrics import bounding_box
from tesla_med.types import BoolArray, IntArray

EPSILON = 1e-12
TOLERANCE = 1e-4
AREAS = ("region", "all")
MODELS = ("source", "adapted")
ALL_CLASSES = "all"
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
) -> dict[str, Any]:
    """Count one case for both models, both areas, every class and all classes.

    Args:
        probs_source: (L, I, J, K) float32 in [0, 1], the unadapted model.
        probs: (L, I, J, K) float32 in [0, 1], the method.
        reference: (I, J, K) class *indices* 0 to L - 1.
        region: (I, J, K) bool, see :func:`calibration_region`.
        values: label value of each class, L of them; they are the keys of the result.
        bins: number of bins.

    Returns:
        Plain numbers, lists and dicts, to be given to :func:`merge`.

    Raises:
        DataError: a probability outside [0, 1] or not finite, shapes that differ, or an index
            that is no class.
    """
    for what, array in (("source", probs_source), ("adapted", probs)):
        if array.shape != (len(values), *reference.shape):
            raise DataError(
                f"{what} probabilities must be ({len(values)} classes, *{reference.shape}), got {array.shape}"
            )
    if reference.shape != region.shape:
        raise DataError(f"reference {reference.shape} and region {region.shape} differ in shape")
    if reference.size and not 0 <= int(reference.min()) <= int(reference.max()) < len(values):
        raise DataError(
            f"reference must hold class indices 0 to {len(values) - 1}, got"
            f" {int(reference.min())} to {int(reference.max())}"
        )
    result: dict[str, Any] = {"cases": 1, "bins": bins, "values": [int(value) for value in values]}
    for model, array in zip(MODELS, (probs_source, probs), strict=True):
        inside = _count_voxels(array[:, region], reference[region], values, bins)
        outside = _count_voxels(array[:, ~region], reference[~region], values, bins)
        result[model] = {
            "region": {key: item.to_json() for key, item in inside.items()},
            "all": {key: (item + outside[key]).to_json() for key, item in inside.items()},
        }
    return result


def merge(counts: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Add up the results of :func:`count_case`; None where there are none.

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
            }
    return total


def summarise(merged: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the content of ``calibration.json``.

    ``result["region" | "all"]["source" | "adapted"]["all" | class value]`` holds ece, brier, nll,
    voxels, clipped and bins (edges, confidence, accuracy, count). Without any scored case there
    are no figures, only ``scored_cases`` 0 and a sentence that says so.
    """
    if merged is None:
        return {"scored_cases": 0, "note": "no case has a usable reference, so nothing was measured"}
    result: dict[str, Any] = {
        "scored_cases": merged["cases"],
        "number_of_bins": merged["bins"],
        "values": merged["values"],
        "epsilon": EPSILON,
    }
    for area in AREAS:
        result[area] = {
            model: {
                key: CalibrationCounts.from_json(item).summary() for key, item in merged[model][area].items()
            }
            for model in MODELS
        }
    return result


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
    from scipy.ndimage import binary_dilation

    union: BoolArray = reference != 0
    for mask in masks:
        if mask.shape != reference.shape:
            raise DataError(f"masks must have one shape, got {reference.shape} and {mask.shape}")
        union = union | (mask != 0)
    if dilation <= 0 or not union.any():
        return union
    axis = slice_axis % union.ndim
    radii = [0 if item == axis else dilation for item in range(union.ndim)]
    grids = np.ogrid[tuple(slice(-radius, radius + 1) for radius in radii)]
    disc = sum(np.square(grid) for grid in grids) <= dilation**2
    box = tuple(
        slice(max(0, part.start - radius), part.stop + radius)
        for part, radius in zip(bounding_box(union), radii, strict=True)
    )
    region = np.zeros_like(union)
    region[box] = binary_dilation(union[box], structure=disc)
    return region


def _count_voxels(
    probs: npt.NDArray[np.float32], reference: IntArray, values: Sequence[int], bins: int
) -> dict[str, CalibrationCounts]:
    """Count (L, V) probabilities against (V,) class indices."""
    _check_probabilities(probs)
    best = probs.argmax(axis=0)
    confidence = np.clip(_pick(probs, best), 0.0, 1.0)
    of_truth = np.clip(_pick(probs, reference), 0.0, 1.0)
    squares = sum(float(np.square(channel.astype(np.float64)).sum()) for channel in probs)
    brier = squares - 2.0 * float(of_truth.sum()) + len(reference)
    counted = {ALL_CLASSES: _counts(confidence, best == reference, of_truth, brier, bins)}
    for index, value in enumerate(values):
        counted[str(int(value))] = count_binary(probs[index], reference == index, bins)
    return counted


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
