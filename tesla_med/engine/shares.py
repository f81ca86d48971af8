"""Choice of the share of a case's own normalisation statistics, case by case, without labels.

Batch norms that use the statistics of the case undo what a scanner does to all of its images, and they
mistake anatomy for it: a case with much fat, or little of the organ in its field, is normalised into what the
network never saw. How much of them is right differs from case to case. A method that can work with several
shares names them; of these the one is taken under which the mask stays most when the slices are zoomed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tesla_med.engine.postprocess import largest_of
from tesla_med.engine.signals import ZOOMS, consistency, stack, zoomed_mask
from tesla_med.models.base import predicted_class
from tesla_med.prepare.fill import hidden
from tesla_med.tta.base import TTAMethod

SIGNAL, SHARE = "consistency_at_share_{:g}", "statistics_share"


@torch.no_grad()
def choose_share(
    method: TTAMethod, images: Tensor, fill: Tensor | None = None, *, largest: bool = False
) -> dict[str, float]:
    """Let a method use the share of the statistics of a case that suits it best; do nothing if it has none.

    Args:
        method: its predicting network is asked under each of ``method.shares``.
        images: (N, C, *spatial) in [0, 1], all slices of the case in order.
        fill: (N, *spatial) bool, pixels where no mask has foreground; None for nowhere.
        largest: whether masks will keep their largest component only.

    Returns:
        The consistency under each share, in [0, 1], and the share that was taken, by name; empty if there
        was nothing to choose from.
    """
    if len(method.shares) < 2:
        return {}
    found = {share: _consistency(method, share, images, fill, largest=largest) for share in method.shares}
    best = max(found, key=lambda share: found[share])
    method.use_share(best)
    return {SIGNAL.format(share): value for share, value in found.items()} | {SHARE: best}


def _consistency(
    method: TTAMethod, share: float, images: Tensor, fill: Tensor | None, *, largest: bool
) -> float:
    method.use_share(share)
    with method.deployed(images) as network:
        probs = method.probabilities(network, images)
        masks = [stack(predicted_class(probs))]
        masks += [zoomed_mask(method, network, images, zoom) for zoom in ZOOMS]
    masks = [hidden(mask, fill) for mask in masks]
    if largest:
        masks = [largest_of(mask) for mask in masks]
    return consistency(masks[0], masks[1:], probs.shape[1])
