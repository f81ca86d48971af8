"""Where the organ lay in the images of the training, and how large it was: no mask should be far from it.

A network can be certain, steady and wrong: it finds the bright neighbourhood of a coil under every zoom, and
all networks that came from it find the same. That such a mask lies where no organ of the training lay, or has
a tenth of its size, is then all there is to tell. Only the card of the weights knows; networks of others have
no such card, and nothing is said of their masks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from tesla_med.models.checkpoint import ModelCard

ORGAN = "organ"
"""In ``extra`` of a card: what :class:`OrganPrior` holds."""
MEASURES = ("row", "column", "area", "height", "width")
LEAST_SPREADS = (0.04, 0.04, 0.5, 0.3, 0.3)
"""Standard deviations that are assumed at least: of positions in fields, of sizes in logarithms."""
WIDEST = 3
"""Slices whose mean area counts as the organ's."""
DEVIATION = "deviation_{}"
FALL = 4
"""Power with which the support of a mask falls beyond the limit."""


@dataclass(frozen=True)
class OrganPrior:
    """Mean and spread of ``MEASURES`` over the reference masks of the training.

    Attributes:
        mean: of each measure: centre of gravity along rows and columns, in fields; logarithms of the area in
            the widest slices as a share of the field, and of the standard deviations of the rows and of the
            columns of its pixels, in fields.
        spread: standard deviation of each, at least ``LEAST_SPREADS``.
        cases: how many masks they are from.
    """

    mean: tuple[float, ...]
    spread: tuple[float, ...]
    cases: int

    def deviation(self, mask: Tensor) -> float:
        """Return by how many standard deviations the measure that fits least is away; 0 for an empty mask.

        Args:
            mask: (N, H, W) class indices, the slices of one case.
        """
        found = measured(mask)
        if found is None:
            return 0.0
        parts = zip(found, self.mean, self.spread, strict=True)
        return max(abs(value - mean) / spread for value, mean, spread in parts)

    def deviations(self, masks: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, float]:
        """Return the deviation of every candidate's mask, as signals."""
        return {DEVIATION.format(name): self.deviation(masks[name]) for name in names}


def measured(mask: Tensor) -> tuple[float, ...] | None:
    """Return ``MEASURES`` of the foreground of (N, H, W) class indices; None where there is none."""
    inside = mask > 0
    if not bool(inside.any()):
        return None
    counts = inside.sum(dim=0).double()
    total, (height, width) = counts.sum(), mask.shape[-2:]
    centres, spreads = [], []
    for axis, size in ((1, height), (0, width)):
        shares = counts.sum(dim=axis) / total
        at = (torch.arange(size, device=mask.device).double() + 0.5) / size
        centre = float((shares * at).sum())
        variance = float((shares * (at - centre).square()).sum())
        centres.append(centre)
        spreads.append(math.log(max(math.sqrt(variance), 0.5 / size)))
    areas = inside.sum(dim=(1, 2)).double().sort(descending=True).values[:WIDEST]
    return (*centres, math.log(float(areas.mean()) / (height * width)), *spreads)


def fitted(masks: Iterable[Tensor]) -> OrganPrior | None:
    """Return the prior of reference masks (N, H, W), one a case; None for fewer than two with an organ."""
    found = [item for mask in masks if (item := measured(mask)) is not None]
    if len(found) < 2:
        return None
    values = torch.tensor(found, dtype=torch.float64)
    spread = torch.maximum(values.std(dim=0), torch.tensor(LEAST_SPREADS, dtype=torch.float64))
    return OrganPrior(tuple(values.mean(dim=0).tolist()), tuple(spread.tolist()), len(found))


def as_extra(prior: OrganPrior | None) -> dict[str, Any]:
    """Return what the card of weights keeps of a prior."""
    return {} if prior is None else {ORGAN: asdict(prior)}


def prior_of(card: ModelCard | None) -> OrganPrior | None:
    """Return the prior that a card holds; None without one, or where it cannot be understood."""
    found = None if card is None else card.extra.get(ORGAN)
    if not isinstance(found, Mapping):
        return None
    try:
        mean, spread = (tuple(float(value) for value in found[key]) for key in ("mean", "spread"))
        cases = int(found["cases"])
    except (KeyError, TypeError, ValueError):
        return None
    sound = len(mean) == len(spread) == len(MEASURES) and all(value > 0 for value in spread)
    return OrganPrior(mean, spread, cases) if sound else None


def nearness(signals: Mapping[str, float], name: str, farthest: float) -> float:
    """Return the factor of a candidate's support, in (0, 1]: below 1 where its mask is too far away."""
    return min(farthest / max(signals.get(DEVIATION.format(name), 0.0), farthest), 1.0) ** FALL
