"""What is chosen by the steadiness of a case's mask, without labels: statistics, and one of several runs.

A mask is steady if it stays where the slices are zoomed. No loss asks for that, and it tells good masks of
one volume from bad ones far better than any loss does.

*Shares.* Batch norms that use the statistics of the case undo what a scanner does to all of its images, and
they mistake anatomy for it: a case with much fat, or little of the organ in its field, is normalised into
what the network never saw. How much of them is right differs from case to case. A method that can work with
several shares names them, and the one with the steadiest mask is taken.

*Restarts.* What is learned from a single case depends on what is drawn. A method may ask to learn several
times, each time from where it started, and the network with the steadiest mask is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tesla_med.engine.postprocess import largest_of
from tesla_med.engine.signals import ZOOMS, consistency, stack, zoomed_mask
from tesla_med.models.base import predicted_class
from tesla_med.prepare.fill import hidden
from tesla_med.tta.base import TTAMethod

AT_SHARE, SHARE = "consistency_at_share_{:g}", "statistics_share"
OF_RUN, RUN = "consistency_of_run_{}", "run_taken"


@torch.no_grad()
def steadiness(
    method: TTAMethod, images: Tensor, fill: Tensor | None = None, *, largest: bool = False
) -> float:
    """Return how well the masks of a case as it is, reduced and enlarged agree: mean Dice, in [0, 1].

    Args:
        method: whose predicting network is asked.
        images: (N, C, *spatial) in [0, 1], all slices of the case in order.
        fill: (N, *spatial) bool, pixels where no mask has foreground; None for nowhere.
        largest: whether masks will keep their largest component only.
    """
    with method.deployed(images) as network:
        probs = method.probabilities(network, images)
        masks = [stack(predicted_class(probs))]
        masks += [zoomed_mask(method, network, images, zoom) for zoom in ZOOMS]
    masks = [hidden(mask, fill) for mask in masks]
    if largest:
        masks = [largest_of(mask) for mask in masks]
    return consistency(masks[0], masks[1:], probs.shape[1])


def choose_share(
    method: TTAMethod, images: Tensor, fill: Tensor | None = None, *, largest: bool = False
) -> dict[str, float]:
    """Let a method use the share of the statistics of a case that suits it best; do nothing if it has none.

    Arguments as for :func:`steadiness`; the network is asked under each of ``method.shares``.

    Returns:
        The steadiness under each share, in [0, 1], and the share that was taken, by name; of equal ones the
        first. Empty if there was nothing to choose from.
    """
    if len(method.shares) < 2:
        return {}
    found = {}
    for share in method.shares:
        method.use_share(share)
        found[share] = steadiness(method, images, fill, largest=largest)
    best = max(found, key=lambda share: found[share])
    method.use_share(best)
    return {AT_SHARE.format(share): value for share, value in found.items()} | {SHARE: best}


class Restarts:
    """Learn from a case as often as a method asks for, and keep the network with the steadiest mask.

    Iterate, learn from the case inside the loop, and say in ``finite`` whether every loss was. Every run
    starts from the state at the beginning; the first draws what a single run would, so that one run alone is
    just that. A run that is not finite is not taken. Arguments as for :func:`steadiness`.

    Attributes:
        finite: of the run that goes on; after the loop, whether any run was.
        found: the steadiness of each run and the number of the one that was taken, from 1; empty for one.
    """

    def __init__(
        self, method: TTAMethod, images: Tensor, fill: Tensor | None = None, *, largest: bool = False
    ) -> None:
        self.method, self.finite = method, True
        self.about: dict[str, Any] = {"images": images, "fill": fill, "largest": largest}
        self.found: dict[str, float] = {}

    def __iter__(self) -> Iterator[Restarts]:
        """Yield itself before each run."""
        if self.method.restarts == 1:
            yield self
            return
        start, best = self.method.state_dict(), -1.0
        kept: dict[str, Any] | None = None
        for number in range(1, self.method.restarts + 1):
            if number > 1:
                self.method.load_state_dict(start)
                self.method.draw_anew(number)
            self.finite = True
            yield self
            value = steadiness(self.method, **self.about) if self.finite else -1.0
            if self.finite:
                self.found[OF_RUN.format(number)] = value
            if value > best:
                best, kept = value, self.method.state_dict()
                self.found[RUN] = number
        self.finite = kept is not None
        self.method.load_state_dict(kept or start)
