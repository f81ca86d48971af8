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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.errors import DataError
from tesla_med.types import BoolArray, IntArray

EPSILON = 1e-12
TOLERANCE = 1e-4
AREAS = ("region", "boundary", "all")
MODELS = ("source", "adapted")
ALL_CLASSES = "all"
FIGURES = ("ece", "brier", "nll")
Doubles = npt.NDArray[np.float64]


def meaning_of(target: str = ALL_CLASSES, noun: str = "voxel") -> tuple[str, str]:
    """Return what confidence and accuracy of a bin are, in words: the axes of a reliability diagram.

    Args:
        target: ``all``, or the name of a class.
        noun: what is counted, in the singular.
    """
    if target == ALL_CLASSES:
        return f"highest probability of a {noun}", f"share of {noun}s whose most probable class is right"
    return f"predicted probability of {target}", f"share of {noun}s that are {target}"


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
    check_probabilities(probability)
    if probability.shape != correct.shape:
        raise DataError(f"probabilities {probability.shape} and truth {correct.shape} differ in shape")
    values = np.clip(probability.astype(np.float64).ravel(), 0.0, 1.0)
    truth = correct.ravel()
    of_truth = np.where(truth, values, 1.0 - values)
    return _counts(values, truth, of_truth, float(np.square(1.0 - of_truth).sum()), bins)


def count_items(
    probs_source: npt.NDArray[np.float32],
    probs: npt.NDArray[np.float32],
    reference: IntArray,
    values: Sequence[int],
    bins: int = 15,
) -> dict[str, Any]:
    """Count items that have one class each, such as tiles, for both models: they are their own region.

    Args:
        probs_source: (L, V) float32 in [0, 1], the unadapted model.
        probs: (L, V) float32 in [0, 1], the method.
        reference: (V,) class *indices* 0 to L - 1.
        values: label value of each class, L of them; they are the keys of the result.
        bins: number of bins.

    Returns:
        Plain numbers, lists and dicts, to be given to :func:`merge`.

    Raises:
        DataError: a probability outside [0, 1] or not finite.
    """
    result: dict[str, Any] = {"cases": 1, "bins": bins, "values": [int(value) for value in values]}
    for model, array in zip(MODELS, (probs_source, probs), strict=True):
        counted = count_flat(array, reference, values, bins)
        result[model] = {"region": {key: item.to_json() for key, item in counted.items()}}
    return result


def count_flat(
    probs: npt.NDArray[np.float32], reference: IntArray, values: Sequence[int], bins: int
) -> dict[str, CalibrationCounts]:
    """Count every class, and all classes together, on flat arrays.

    Args:
        probs: (L, V) float32 in [0, 1]; V voxels, tiles or whatever has a class.
        reference: (V,) class *indices* 0 to L - 1.
        values: label value of each class, L of them; they are the keys of the result, beside ``ALL_CLASSES``.
        bins: number of bins.

    Raises:
        DataError: a probability outside [0, 1] or not finite.
    """
    check_probabilities(probs)
    counted = {ALL_CLASSES: count_predicted(probs, reference, bins)}
    for index, value in enumerate(values):
        counted[str(int(value))] = count_binary(probs[index], reference == index, bins)
    return counted


def count_predicted(probs: npt.NDArray[np.float32], reference: IntArray, bins: int) -> CalibrationCounts:
    """Count the predicted class alone of (L, V) probabilities against (V,) class indices."""
    best = probs.argmax(axis=0)
    confidence = np.clip(_pick(probs, best), 0.0, 1.0)
    of_truth = np.clip(_pick(probs, reference), 0.0, 1.0)
    squares = sum(float(np.square(channel.astype(np.float64)).sum()) for channel in probs)
    brier = squares - 2.0 * float(of_truth.sum()) + len(reference)
    return _counts(confidence, best == reference, of_truth, brier, bins)


def _counts(
    confidence: Doubles, correct: BoolArray, of_truth: Doubles, brier: float, bins: int
) -> CalibrationCounts:
    bin_index = np.searchsorted(bin_edges(bins)[1:-1], confidence, side="left")
    sums = [np.bincount(bin_index, weights=item, minlength=bins) for item in (confidence, correct)]
    return CalibrationCounts(
        np.bincount(bin_index, minlength=bins).astype(np.float64),
        sums[0].astype(np.float64),
        sums[1].astype(np.float64),
        brier,
        float(-np.log(np.maximum(of_truth, EPSILON)).sum()),
        int(np.count_nonzero(of_truth < EPSILON)),
    )


def _pick(probs: npt.NDArray[np.float32], index: IntArray) -> Doubles:
    chosen: Doubles = np.take_along_axis(probs, index[None].astype(np.intp), axis=0)[0].astype(np.float64)
    return chosen


def check_probabilities(probs: npt.NDArray[np.floating[Any]]) -> None:
    """Check that values are probabilities, of any shape.

    Raises:
        DataError: one is outside [0, 1] or not finite.
    """
    if not probs.size:
        return
    low, high = float(probs.min()), float(probs.max())
    if not (low >= -TOLERANCE and high <= 1.0 + TOLERANCE):
        raise DataError(
            f"expected probabilities in [0, 1], got values from {low:g} to {high:g};"
            " give probabilities, not logits"
        )
