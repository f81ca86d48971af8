"""Predicted Dice: an estimate without labels of how good a mask is, with an interval.

Three things that a good mask has are measured for each class and joined to its *support*, in [0, 1]:

* larger, smaller: the Dice with the masks that the same network finds in the enlarged slices, and in the
  reduced ones;
* agreement: the Dice with the closest of the other candidates' masks (see ``tesla_med.engine.guard``).

Their distances from 1.02 are averaged on a logarithmic scale, so that a single one that fails counts.
The predicted Dice is linear in the square of the support times the Dice that the network is expected to
reach on images like those of its training, and the interval widens as it falls. The coefficients are fitted
by ``benchmarks/quality.py`` on runs with references, never on the site that is judged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from tesla_med.config.models import QualityConfig
from tesla_med.records import CaseResult, ClassScore

SUPPORT = "support_{}"
SHARES = {"larger": 0.36, "smaller": 0.14, "agreement": 0.5}
"""Weight of each part of the support, on a logarithmic scale."""
_CARE = 3
"""Power of the usual value of a part by which its weight falls."""
USUAL_DICE = 0.88
"""What networks of this kind reach on held-out images of their own sites."""
OFFSET = 1.02
"""What agreements are subtracted from before a logarithm is taken, so that 1 has one."""


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


def relative(value: float, usual: float) -> float:
    """Return an agreement as a share of the usual one, at most 1."""
    return min(value / max(usual, 1e-6), 1.0)


def support(
    mask: Tensor,
    others: Sequence[Tensor],
    larger: Tensor,
    smaller: Tensor,
    index: int,
    steadiness: tuple[float, float] = (1.0, 1.0),
) -> float | None:
    """Return the support of one class.

    Args:
        mask: (N, H, W) class indices, the mask to judge.
        others: masks of other networks.
        larger: of the same network, found in the enlarged slices.
        smaller: found in the reduced ones.
        index: the class.
        steadiness: the usual consistency with the reduced and with the enlarged slices.

    Returns:
        A value in [0, 1], or None where no mask has the class.
    """
    agreed = [value for other in others if (value := class_agreement(mask, other, index)) is not None]
    parts = {
        "larger": class_agreement(mask, larger, index),
        "smaller": class_agreement(mask, smaller, index),
        "agreement": max(agreed, default=None),
    }
    if all(value is None for value in parts.values()):
        return None
    return joined({name: value or 0.0 for name, value in parts.items()}, steadiness)


def joined(parts: Mapping[str, float], steadiness: tuple[float, float] = (1.0, 1.0)) -> float:
    """Return the support of the parts named in ``SHARES``, all in [0, 1].

    A part counts relative to the usual value, and the less the lower that is: a network which loses the
    structure in enlarged slices of its training too says nothing by losing it.
    """
    usual = {"smaller": steadiness[0], "larger": steadiness[1], "agreement": 1.0}
    shares = {name: share * usual[name] ** _CARE for name, share in SHARES.items()}
    logarithm = sum(
        share * math.log(OFFSET - relative(parts[name], usual[name])) for name, share in shares.items()
    )
    return min(max(OFFSET - math.exp(logarithm / sum(shares.values())), 0.0), 1.0)


def usual_dice(known: float | None) -> float:
    """Return what a network is expected to reach on images like those of its training.

    Its Dice on held-out images is often that of two patients, so a third of its distance from ``USUAL_DICE``
    is believed.

    Args:
        known: that Dice, in (0, 1]; None where it is not known.
    """
    return USUAL_DICE if known is None else USUAL_DICE + (known - USUAL_DICE) / 3.0


def feature(value: float) -> float:
    """Return what the predicted Dice is linear in: the square of the support."""
    return min(max(value, 0.0), 1.0) ** 2


def predicted_dice(value: float, config: QualityConfig) -> DiceEstimate | None:
    """Return the predicted Dice for a support, or None where the pipeline has no coefficients."""
    if config.intercept is None:
        return None
    dice = config.intercept + config.slope * usual_dice(config.source_dice) * feature(value)
    dice = min(max(dice, 0.0), 1.0)
    half = config.half_width + config.growth * (1.0 - dice)
    low, high = dice - half, dice + half
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
    if result.trusted is False:
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
