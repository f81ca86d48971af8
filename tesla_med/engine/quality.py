"""Predicted Dice: an estimate without labels of how good a mask is, with an interval.

Two things that a good mask has are measured for each class and averaged to its *support*, in [0, 1]:

* agreement: the Dice with the closest of the other candidates' masks (see ``tesla_med.engine.guard``);
* consistency: the Dice with the masks that the same network finds in the zoomed slices.

The predicted Dice is linear in -ln(1.02 - support). Its two coefficients and the width of its interval
are fitted by ``benchmarks/quality.py`` on runs with references, never on the site that is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tesla_med.config.models import QualityConfig
from tesla_med.records import CaseResult, ClassScore

SUPPORT = "support_{}"
_OFFSET = 1.02


@dataclass(frozen=True)
class DiceEstimate:
    """A predicted Dice and its 90 % interval, all in [0, 1]."""

    dice: float
    low: float
    high: float


def class_agreement(first: Tensor, second: Tensor, index: int) -> float | None:
    """Return the Dice of one class of two (N, H, W) index masks, None where both lack it."""
    one, two = first == index, second == index
    total = int(one.sum()) + int(two.sum())
    return 2.0 * int((one & two).sum()) / total if total else None


def support(
    mask: Tensor, others: Sequence[Tensor], views: Sequence[tuple[Tensor, Tensor]], index: int
) -> float | None:
    """Return the support of one class.

    Args:
        mask: (N, H, W) class indices, the mask to judge.
        others: masks of other models.
        views: pairs of masks of one network, of the slices as they are and of a view of them.
        index: the class.

    Returns:
        A value in [0, 1], or None where no mask has the class.
    """
    agreed = [value for other in others if (value := class_agreement(mask, other, index)) is not None]
    steady = [value for one, two in views if (value := class_agreement(one, two, index)) is not None]
    if not agreed and not steady:
        return None
    parts = [max(agreed, default=0.0), sum(steady) / len(steady) if steady else 0.0]
    return sum(parts) / len(parts)


def feature(value: float) -> float:
    """Return -ln(1.02 - support), what the predicted Dice is linear in."""
    return -math.log(_OFFSET - min(max(value, 0.0), 1.0))


def predicted_dice(value: float, config: QualityConfig) -> DiceEstimate | None:
    """Return the predicted Dice for a support, or None where the pipeline has no coefficients."""
    if config.intercept is None:
        return None
    dice = config.intercept + config.slope * feature(value)
    low, high = dice - config.half_width, dice + config.half_width
    return DiceEstimate(*(min(max(item, 0.0), 1.0) for item in (dice, low, high)))


def with_estimates(
    scores: Sequence[ClassScore], signals: Mapping[str, float], config: QualityConfig
) -> tuple[ClassScore, ...]:
    """Return the scores with the predicted Dice of each foreground class, in class order.

    Args:
        scores: one a foreground class.
        signals: of the guard; the support of class index k is under ``support_k``.
        config: the coefficients.
    """
    result = []
    for index, score in enumerate(scores, 1):
        value = signals.get(SUPPORT.format(index))
        found = None if value is None else predicted_dice(value, config)
        update = (
            {}
            if found is None
            else {"predicted_dice": found.dice, "predicted_low": found.low, "predicted_high": found.high}
        )
        result.append(score.model_copy(update=update))
    return tuple(result)


def needs_review(result: CaseResult, config: QualityConfig) -> bool:
    """Whether no mask is trusted, or the predicted Dice of a class is below the threshold of the pipeline."""
    if not result.trusted:
        return True
    predicted = [score.predicted_dice for score in result.scores if score.predicted_dice is not None]
    return bool(predicted) and min(predicted) < config.review_below


@dataclass(frozen=True)
class Audit:
    """How well predictions did where references exist.

    Attributes:
        pairs: number of (case, class) pairs.
        correlation: Pearson's r of predicted and true Dice, None with fewer than 3 pairs or no spread.
        mean_error: mean absolute error.
        coverage: share of true values in their interval.
    """

    pairs: int
    correlation: float | None
    mean_error: float | None
    coverage: float | None


def pairs(results: Sequence[CaseResult]) -> list[tuple[ClassScore, str]]:
    """Return every score that has both a predicted and a true Dice, with the case's name."""
    return [
        (score, result.case)
        for result in results
        for score in result.scores
        if score.predicted_dice is not None and score.dice is not None
    ]


def audit(results: Sequence[CaseResult]) -> Audit:
    """Compare predictions with the truth."""
    import numpy as np

    found = [score for score, _ in pairs(results)]
    if not found:
        return Audit(0, None, None, None)
    table = np.array(
        [[item.predicted_dice, item.dice, item.predicted_low, item.predicted_high] for item in found], float
    )
    predicted, true, low, high = table.T
    spread = len(found) > 2 and predicted.std() > 1e-9 and true.std() > 1e-9
    return Audit(
        pairs=len(found),
        correlation=float(np.corrcoef(predicted, true)[0, 1]) if spread else None,
        mean_error=float(np.abs(predicted - true).mean()),
        coverage=float(((true >= low) & (true <= high)).mean()),
    )
