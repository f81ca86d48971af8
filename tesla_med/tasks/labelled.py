"""Labelled data of a task as training sees them: how they are split, drawn, varied, and what is minimised."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tesla_med.prepare.acquisition import Acquisition


class Part(ABC):
    """Some labelled items: those that are trained on, or those that are held out.

    Attributes:
        names: of the items, ``site/item``.
        sites: id of the site of each.
        images: how many images (slices, tiles) there are in all.
    """

    names: tuple[str, ...]
    sites: tuple[str, ...]
    images: int

    @abstractmethod
    def draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return ``size`` images (size, C, *spatial) in [0, 1] and their labels, drawn with replacement."""

    @abstractmethod
    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield every image once, unvaried, at most ``size`` at once, with its labels."""

    def unmeasured(self, size: int) -> Iterator[Tensor | None]:
        """Yield where the images of each batch of :meth:`batches` are fill, (N, *spatial) bool, or None."""
        return itertools.repeat(None)

    def masks(self) -> Iterator[Tensor]:
        """Yield the reference masks (N, H, W) of each case; none where items are no volumes."""
        return iter(())

    @abstractmethod
    def score(self, predict: Callable[[Tensor], Tensor]) -> float:
        """Return the headline metric of a network on these items, in [0, 1].

        Args:
            predict: (N, C, *spatial) images in [0, 1] -> logits; takes batches of any size.
        """


class LabelledSource(ABC):
    """Every labelled item of the training sites.

    Attributes:
        metric: headline metric.
        left_out: items, or parts of them, that cannot be trained on, with the reason.
        split_by: what is kept together when items are held out, in words, by site.
    """

    metric: ClassVar[str] = "dice"
    left_out: Sequence[str]
    split_by: Mapping[str, str] = {}

    @property
    def acquisition(self) -> Acquisition | None:
        """Ranges of voxel size and field of view; None where these are not known."""
        return None

    @property
    @abstractmethod
    def shapes(self) -> Sequence[str]:
        """Texts that say what the items are, so that a resumed training is of the same data."""

    @abstractmethod
    def split(self, fraction: float, generator: torch.Generator) -> tuple[Part, Part]:
        """Return the items to train on and those to validate on; the latter may be empty.

        Args:
            fraction: of what is to be held out.
            generator: draws what is.
        """

    @abstractmethod
    def every(self) -> Part:
        """Return all items as one part."""

    @abstractmethod
    def vary(
        self, images: Tensor, labels: Tensor, family: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return images in [0, 1] and labels of the same shapes, varied as other sites differ.

        Args:
            images: (N, C, *spatial) in [0, 1].
            labels: of the images.
            family: ``train.augment``: none, mild or robust.
            generator: on the CPU.
        """

    @abstractmethod
    def restyle(self, images: Tensor, family: str, generator: torch.Generator) -> Tensor:
        """Return images (N, C, *spatial) in [0, 1] varied in intensity only, so that labels still fit."""

    @abstractmethod
    def loss(self) -> Callable[[Tensor, Tensor], Any]:
        """Return the loss of float32 logits and labels."""
