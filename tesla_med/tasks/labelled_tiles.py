"""Labelled tiles for training: load, keep as 8-bit, split, draw. Batched and seeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from tesla_med.augment.training import TILE_FAMILIES
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import DataError
from tesla_med.io.cases import site_folder
from tesla_med.io.tiles import UNLABELLED, TileSet, find_tiles, reading
from tesla_med.prepare.tiles import TileBatch, stream
from tesla_med.tasks.labelled import LabelledSource, Part
from tesla_med.tasks.subjects import subjects_of
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
        subjects: ``site/subject`` of each tile; empty: each is its own.
        change: (images in [0, 1], generator on the CPU) -> varied images; None: as the family says.
        left_out: ``site/tile: reason`` of each tile that has no label, cannot be read or shows no tissue.
    """

    metric: ClassVar[str] = "accuracy"
    images: Tensor
    labels: Tensor
    names: Sequence[str]
    sites: Sequence[str]
    subjects: Sequence[str] = ()
    split_by: dict[str, str] = field(default_factory=dict)
    change: Vary | None = None
    left_out: Sequence[str] = ()

    @property
    def shapes(self) -> list[str]:
        """The number of tiles of each class, and their size."""
        counts = torch.bincount(self.labels.cpu()).tolist()
        return [f"{tuple(self.images.shape)}, tiles by class {counts}"]

    def split(self, fraction: float, generator: torch.Generator) -> tuple[TilePart, TilePart]:
        """Return training and validation tiles, split by subject.

        One subject at least is held out, and one trained on, where there are two; of one subject, or with a
        fraction of 0, no tile is held out.
        """
        positions: dict[str, list[int]] = {}
        for position, subject in enumerate(self.subjects or self.names):
            positions.setdefault(subject, []).append(position)
        groups = list(positions.values())
        order = [groups[index] for index in torch.randperm(len(groups), generator=generator).tolist()]
        count = min(max(1, round(fraction * len(order))), len(order) - 1) if fraction > 0 else 0
        held, used = order[:count], order[count:]
        first, second = (
            torch.tensor([*chain.from_iterable(part)], dtype=torch.int64) for part in (used, held)
        )
        return self._part(first), self._part(second)

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

    Tiles without a label, unreadable ones and those without enough tissue are left out, with the reason.

    Raises:
        DataError: there are none.
    """
    progress = progress or (lambda *_: None)
    index = {value: position for position, value in enumerate(pipeline.values)}
    images: list[Tensor] = []
    labels: list[int] = []
    names: list[str] = []
    origin: list[str] = []
    subjects: list[str] = []
    split_by: dict[str, str] = {}
    left_out: list[str] = []
    sets: list[TileSet] = [find_tiles(site_folder(volumes, site), site.tiles) for site in sites]
    total, done = sum(len(item.paths) for item in sets), 0
    assert pipeline.preprocessing.size is not None  # noqa: S101 - the task has checked it
    for site, tiles in zip(sites, sets, strict=True):
        kept = np.flatnonzero(tiles.labels != UNLABELLED).tolist()
        patients, split_by[site.id] = _patients(tiles, site)
        every = tiles.names
        unlabelled = np.flatnonzero(tiles.labels == UNLABELLED).tolist()
        left_out += [f"{site.id}/{every[position]}: no label" for position in unlabelled]
        done += len(unlabelled)
        for batch in stream(tiles, kept, 64, pipeline.preprocessing.size, **reading(pipeline.preprocessing)):
            images += list((255 * batch.images).round().to(torch.uint8))
            labels += [index[int(tiles.labels[position])] for position in batch.index]
            names += [f"{site.id}/{every[int(position)]}" for position in batch.index]
            subjects += [f"{site.id}/{patients[int(position)]}" for position in batch.index]
            origin += [site.id] * len(batch.index)
            unused = _unused(batch, tiles, pipeline.preprocessing.least_tissue)
            left_out += [f"{site.id}/{every[position]}: {reason}" for position, reason in unused.items()]
            done += len(batch.index) + len(unused)
            progress("load", done, total)
    if not images:
        ids, first = ", ".join(site.id for site in sites), f", such as {left_out[0]}" if left_out else ""
        raise DataError(f"{volumes}: no labelled tile of site(s) {ids} that can be used{first}")
    known = names, origin, subjects, split_by
    return LabelledTiles(torch.stack(images), torch.tensor(labels), *known, left_out=left_out)


def _unused(batch: TileBatch, tiles: TileSet, least_tissue: float) -> dict[int, str]:
    """Return why tiles of a batch are not among its images, by position in the set."""
    paths = tiles.paths
    found = {position: text.removeprefix(f"{paths[position]}: ") for position, text in batch.failed.items()}
    for position in batch.blank:
        share = f"{100 * batch.tissue[position]:.1f} % of its pixels show tissue"
        found[position] = f"blank: {share}, less than {100 * least_tissue:g} %"
    return dict(sorted(found.items()))


def _patients(tiles: TileSet, site: SiteConfig) -> tuple[tuple[str, ...], str]:
    """Return whose each tile is: its name below the folder of its class tells."""
    paths = [PurePath(name).with_suffix("") for name in tiles.names]
    inside = [PurePath(*path.parts[1:]) if len(path.parts) > 1 else path for path in paths]
    own, by = subjects_of([path.as_posix() for path in inside], site.files.subject, "tile")
    alone = [who == path.as_posix() for who, path in zip(own, inside, strict=True)]
    pairs = zip(own, paths, alone, strict=True)  # 0.png of two classes are two tiles
    return tuple(path.as_posix() if flat else who for who, path, flat in pairs), by
