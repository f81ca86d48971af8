"""The newest images, kept for further steps, with what the network has said of each before.

TTAC learns from them again at every batch and filters its pseudo-labels by them (Su et al., NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Replay:
    """Images, first in, first out, each with a moving average of its probabilities over visits.

    Args:
        size: number of images that are kept; a newer batch is kept whole even if it is larger.
        share: of the newest probabilities in the average, in (0, 1].

    Attributes:
        images: (n, C, *spatial), the oldest first; None while it is empty.
        weight: (n, *spatial) of their pixels; None where all count.
        average: (n, L, *spatial) moving averages, zeros of images that have not been visited; None before
            the first visit.
    """

    def __init__(self, size: int, share: float) -> None:
        self.size = size
        self.share = share
        self.images: Tensor | None = None
        self.weight: Tensor | None = None
        self.average: Tensor | None = None

    def __len__(self) -> int:
        return 0 if self.images is None else len(self.images)

    def push(self, images: Tensor, weight: Tensor | None) -> None:
        """Add the images (n, C, *spatial) of a batch, and drop the oldest ones if there are too many.

        Images of another shape take the place of all.
        """
        if self.images is None or self.images.shape[1:] != images.shape[1:]:
            self.images, self.weight, self.average = images[:0], None, None
        before, kept = len(self.images), max(self.size, len(images))
        if weight is not None or self.weight is not None:
            shape = (before, *images.shape[2:])
            old = images.new_ones(shape) if self.weight is None else self.weight
            new = images.new_ones(len(images), *shape[1:]) if weight is None else weight.to(images)
            self.weight = torch.cat([old, new])[-kept:]
        if self.average is not None:
            unseen = self.average.new_zeros(len(images), *self.average.shape[1:])
            self.average = torch.cat([self.average, unseen])[-kept:]
        self.images = torch.cat([self.images, images])[-kept:]

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the positions (n,) of all images in random batches, in order within a batch."""
        for part in torch.split(torch.randperm(len(self), generator=generator), size):
            yield part.sort().values

    def visit(self, positions: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Average probabilities with those of earlier visits; return these averages before and after.

        Args:
            positions: (n,) of the images.
            probs: (n, L, *spatial).

        Returns:
            Twice (n, L, *spatial); the first are zeros at a first visit, the second then ``probs``.
        """
        if self.average is None:
            self.average = probs.new_zeros(len(self), *probs.shape[1:])
        places = positions.to(probs.device)
        before = self.average[places]
        first = before.sum(dim=1, keepdim=True) == 0
        after = torch.where(first, probs, torch.lerp(before, probs, self.share))
        self.average[places] = after
        return before, after

    def state(self) -> dict[str, Any]:
        """Return copies of everything by name."""
        items = {"images": self.images, "weight": self.weight, "average": self.average}
        return {name: None if item is None else item.clone() for name, item in items.items()}

    def restore(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Replace everything by copies of what :meth:`state` returned."""
        for name, item in state.items():
            setattr(self, name, None if item is None else item.to(device, copy=True))
