"""Labelled tiles for training: load, keep as 8-bit, split, draw. Batched and seeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tesla_med.augment.training import TILE_FAMILIES
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import DataError
from tesla_med.io.cases import site_folder
from tesla_med.io.tiles import UNLABELLED, TileSet, find_tiles, reading
from tesla_med.prepare.tiles import stream
from tesla_med.tasks.labelled import LabelledSource, Part
from tesla_med.types import Progress

Vary = Callable[[Tensor, torch.Generator], Tensor]


class TilePart(Part):
    """Tiles of one part.

    Args:
        images: (N, 3, H, W) uint8 of all tiles; where there is room, on the device.
        labels: (N,) class indices of all tiles.
        positions: (n,) int64 on the CPU, which of them belong to the part.
        names: of all tiles.
        sites: id of the site of each of all tiles.
    """

    def __init__(
        self, images: Tensor, labels: Tensor, positions: Tensor, names: Sequence[str], sites: Sequence[str]
    ) -> None:
        self.pixels, self.labels, self.positions = images, labels, positions
        chosen = positions.tolist()
        self.names = tuple(names[position] for position in chosen)
        self.sites = tuple(sites[position] for position in chosen)
        self.images = len(chosen)

    def draw(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return tiles (size, 3, H, W) in [0, 1] and class indices (size,)."""
        chosen = self.positions[torch.randint(len(self.positions), (size,), generator=generator)]
        return self._take(chosen)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the tiles in the order of the split."""
        return map(self._take, torch.split(self.positions, size))

    def _take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        chosen = chosen.to(self.pixels.device)
        return self.pixels[chosen].float() / 255, self.labels[chosen.to(self.labels.device)]

    def score(self, predict: Callable[[Tensor], Tensor]) -> float:
        """Return the accuracy."""
        correct = 0
        for images, labels in self.batches(SCORED_AT_ONCE):
            correct += int((predict(images).argmax(1).cpu() == labels.cpu()).sum())
        return correct / max(self.images, 1)


SCORED_AT_ONCE = 1024


@dataclass
class LabelledTiles(LabelledSource):
    """All labelled tiles in memory.

    Attributes:
        images: (N, 3, H, W) uint8; where there is room, on the device.
        labels: (N,) class indices.
        names: ``site/tile`` of each.
        sites: id of the site of each.
        change: (images in [0, 1], generator on the CPU) -> varied images; None: as the family says.
    """

    metric: ClassVar[str] = "accuracy"
    images: Tensor
    labels: Tensor
    names: Sequence[str]
    sites: Sequence[str]
    change: Vary | None = None
    left_out: Sequence[str] = ()

    @property
    def shapes(self) -> list[str]:
        """The number of tiles of each class, and their size."""
        counts = torch.bincount(self.labels.cpu()).tolist()
        return [f"{tuple(self.images.shape)}, tiles by class {counts}"]

    def split(self, fraction: float, generator: torch.Generator) -> tuple[TilePart, TilePart]:
        """Return training and validation tiles; one at least of each, where there are two."""
        order = torch.randperm(len(self.images), generator=generator)
        held = order[: max(1, round(fraction * len(order)))]
        used = order[len(held) :] if len(order) > len(held) else order
        return self._part(used), self._part(held)

    def _part(self, positions: Tensor) -> TilePart:
        return TilePart(self.images, self.labels, positions, self.names, self.sites)

    def every(self) -> TilePart:
        """Return all tiles as one part."""
        return self._part(torch.arange(len(self.images)))

    def vary(
        self, images: Tensor, labels: Tensor, family: str, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return tiles varied as :data:`tesla_med.augment.training.TILE_FAMILIES` says."""
        change = self.change or TILE_FAMILIES[family]
        return (images if change is None else change(images, generator)), labels

    def restyle(self, images: Tensor, family: str, generator: torch.Generator) -> Tensor:
        """Return tiles varied as in training: a class does not depend on how a tile is turned."""
        return self.vary(images, self.labels[:0], family, generator)[0]

    def loss(self) -> Callable[[Tensor, Tensor], Any]:
        """Return cross-entropy."""
        return torch.nn.functional.cross_entropy


def load_tiles(
    pipeline: PipelineConfig, sites: Sequence[SiteConfig], volumes: Path, progress: Progress | None = None
) -> LabelledTiles:
    """Read every labelled tile of ``sites`` once and keep it as 8-bit.

    Raises:
        DataError: there are none.
    """
    progress = progress or (lambda *_: None)
    index = {value: position for position, value in enumerate(pipeline.values)}
    images: list[Tensor] = []
    labels: list[int] = []
    names: list[str] = []
    origin: list[str] = []
    sets: list[TileSet] = [find_tiles(site_folder(volumes, site), site.tiles) for site in sites]
    total = sum(len(item.paths) for item in sets)
    assert pipeline.preprocessing.size is not None  # noqa: S101 - the task has checked it
    for site, tiles in zip(sites, sets, strict=True):
        kept = np.flatnonzero(tiles.labels != UNLABELLED).tolist()
        every = tiles.names
        for batch in stream(tiles, kept, 64, pipeline.preprocessing.size, **reading(pipeline.preprocessing)):
            images += list((255 * batch.images).round().to(torch.uint8))
            labels += [index[int(tiles.labels[position])] for position in batch.index]
            names += [f"{site.id}/{every[int(position)]}" for position in batch.index]
            origin += [site.id] * len(batch.index)
            progress("load", len(images), total)
    if not images:
        raise DataError(f"{volumes}: no labelled tile of site(s) {', '.join(site.id for site in sites)}")
    return LabelledTiles(torch.stack(images), torch.tensor(labels), names, origin)
