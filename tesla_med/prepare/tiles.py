"""Batches of tiles as a network takes them: read, stains normalised where asked for, resized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tesla_med.errors import DataError
from tesla_med.io.tiles import Picture, TileSet, read_tile
from tesla_med.prepare.stream import ahead

_WHITE, _BLACK, _INK = 0.82, 0.15, 0.3
"""Smallest channel of white, largest of black, saturation of ink."""


@dataclass(frozen=True)
class TileBatch:
    """Some tiles, and those among them that could not be read.

    Attributes:
        index: (n,) positions in the set.
        images: (n, 3, H, W) float32 in [0, 1].
        notes: position -> notes, where there are any.
        failed: position -> reason.
        tissue: position -> share of its pixels that show tissue, of every tile that was read.
        blank: positions of tiles that show too little tissue to be used; they are not in ``images``.
    """

    index: npt.NDArray[np.int64]
    images: Tensor
    notes: dict[int, tuple[str, ...]]
    failed: dict[int, str]
    tissue: dict[int, float] = field(default_factory=dict)
    blank: frozenset[int] = frozenset()


def tissue_share(array: npt.NDArray[np.float32]) -> float:
    """Return the share of pixels of (3, H, W) RGB in [0, 1] that are not white, black or pen.

    White is what lies between pieces of tissue, black what lies outside the slide or under a marker; green
    and blue ink has a hue that haematoxylin and eosin never have. Grey counts as tissue.
    """
    high, low = array.max(axis=0), array.min(axis=0)
    white, black = low > _WHITE, high < _BLACK
    red, green, blue = array
    turquoise = (green >= red) & (high > 0) & (high - low > _INK * high)
    blue_ink = (blue == high) & (green > red + 0.3 * (high - low)) & (high - low > _INK * high)
    return float(1.0 - (white | black | turquoise | blue_ink).mean())


def stream(
    tiles: TileSet,
    order: Sequence[int],
    batch: int,
    size: tuple[int, int],
    *,
    normalise: bool = False,
    least_tissue: float = 0.0,
    least_side: int = 1,
) -> Iterator[TileBatch]:
    """Read tiles batch by batch, two batches ahead, each resized to (H, W) with anti-aliasing.

    No more than three batches are in memory, however many tiles there are.

    Args:
        tiles: the set.
        order: positions in it, in the order of reading.
        batch: tiles at once.
        size: (H, W).
        normalise: bring stains to those of a reference (:mod:`tesla_med.prepare.stain_normalisation`);
            tiles where that cannot work stay as they are, with a note.
        least_tissue: tiles with a smaller share of tissue are blank.
        least_side: tiles with a shorter side, in pixels, fail.
    """
    parts = [[int(item) for item in order[start : start + batch]] for start in range(0, len(order), batch)]
    options: dict[str, Any] = {
        "normalise": normalise,
        "least_tissue": least_tissue,
        "least_side": least_side,
    }
    return ahead(parts, lambda positions: load_batch(positions, tiles, size, **options), 2)


def load_batch(
    positions: Sequence[int],
    tiles: TileSet,
    size: tuple[int, int],
    *,
    normalise: bool = False,
    least_tissue: float = 0.0,
    least_side: int = 1,
) -> TileBatch:
    """Read the tiles at these positions of the set, each resized to (H, W); see :func:`stream`."""
    images: list[Tensor] = []
    index: list[int] = []
    notes: dict[int, tuple[str, ...]] = {}
    failed: dict[int, str] = {}
    tissue: dict[int, float] = {}
    blank: set[int] = set()
    for position in positions:
        try:
            picture = read_tile(tiles.paths[position], least_side)
            tissue[position] = tissue_share(picture.array)
            if tissue[position] < least_tissue:
                blank.add(position)
                continue
            if normalise:
                picture = _normalised(picture)
        except DataError as error:
            failed[position] = str(error)
            continue
        index.append(position)
        images.append(_resized(torch.from_numpy(picture.array), size))
        if picture.notes:
            notes[position] = picture.notes
    stacked = torch.stack(images) if images else torch.zeros(0, 3, *size)
    return TileBatch(np.array(index, np.int64), stacked, notes, failed, tissue, frozenset(blank))


def _normalised(picture: Picture) -> Picture:
    from tesla_med.prepare.stain_normalisation import normalise_stains

    result = normalise_stains(picture.array)
    notes = () if result.reason is None else (result.reason,)
    return Picture(result.array, picture.notes + notes)


def _resized(image: Tensor, size: tuple[int, int]) -> Tensor:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    from torchvision.transforms.v2 import functional

    changed: Tensor = functional.resize(image, list(size), antialias=True)
    return changed.clamp(0, 1)
