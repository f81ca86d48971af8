"""What is held of a case on its way: as read, and as made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tesla_med.prepare.transforms import PreparedCase
from tesla_med.scoring import score as scoring
from tesla_med.types import Case, Prediction, Verdict, Volume

CONSTANT = Verdict(0.0, "the image is constant: there is nothing to adapt to or to segment")


@dataclass(frozen=True)
class Loaded:
    """A case as read; ``prepared`` is None for a blank image."""

    case: Case
    volume: Volume
    prepared: PreparedCase | None


@dataclass
class Masks:
    """What was made of a case on its native grid, and why this much of it was adapted."""

    source: Prediction
    adapted: Prediction
    verdict: Verdict
    scored: scoring.Scored | None = None
    entropy: npt.NDArray[np.float32] | None = None
