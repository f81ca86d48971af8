"""Tiles on disk: find them in folders, and read any kind of picture as RGB in [0, 1].

A site of tiles has one folder per class (``SiteConfig.tiles`` maps folders to classes), or one folder
of tiles without labels. The mode of a file decides how it is read, never its number of channels alone.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import Preprocessing
from tesla_med.errors import DataError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.names import fold
from tesla_med.io.walk import listed, walk

TILE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
UNLABELLED = -1
ON_WHITE = "transparent pixels placed on white"


def reading(of: Preprocessing) -> dict[str, Any]:
    """Return how tiles are to be read: what :func:`tesla_med.prepare.tiles.load_batch` takes."""
    return {
        "normalise": of.stain_normalisation,
        "least_tissue": of.least_tissue,
        "least_side": of.least_side,
    }


@dataclass(frozen=True)
class Picture:
    """One tile as read.

    Attributes:
        array: (3, H, W) float32 in [0, 1].
        notes: what was done to it, in words; empty for a plain 8-bit RGB file.
    """

    array: npt.NDArray[np.float32]
    notes: tuple[str, ...] = ()


def read_tile(path: Path, least_side: int = 1) -> Picture:
    """Read one tile as RGB.

    Args:
        path: the file.
        least_side: pixels that its shorter side must have.

    Transparent pixels are put on white, as a scanner's background is; palettes are expanded; CMYK and other
    colour spaces are converted; 16-bit values are scaled by their depth; grey is repeated.

    Raises:
        DataError: missing, truncated, no picture, too small, several pages, or values without a known range.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    path = Path(path)
    check_fetched(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                pages = getattr(image, "n_frames", 1)
                if pages > 1:
                    raise DataError(f"{path}: {pages} pages in one file; expected one tile per file")
                if min(image.size) < least_side:
                    size = f"{image.size[0]}x{image.size[1]}"
                    raise DataError(f"{path}: {size} pixels; expected at least {least_side} a side")
                image.load()
                return _picture(ImageOps.exif_transpose(image), path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnidentifiedImageError:
        raise DataError(
            f"{path}: not a picture that can be read; expected {', '.join(TILE_SUFFIXES)}"
        ) from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: truncated or damaged: {error}") from None


def _picture(image: Any, path: Path) -> Picture:
    """Return any mode of Pillow as RGB."""
    mode = image.mode
    if mode.startswith("I") or mode == "F":
        return _deep(image, path)
    if mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        return _on_white(image.convert("RGBA"))
    notes: tuple[str, ...] = ()
    if mode in ("L", "1"):
        notes = ("grey, repeated in three channels",)
    elif mode == "P":
        notes = ("palette expanded",)
    elif mode != "RGB":
        notes = (f"converted from {mode}",)
    return Picture(_channels(np.asarray(image.convert("RGB"), np.float32) / 255.0), notes)


def _on_white(image: Any) -> Picture:
    pixels = np.asarray(image, np.float32) / 255.0
    alpha = pixels[..., 3:]
    notes = () if bool((alpha == 1).all()) else (ON_WHITE,)
    return Picture(_channels(pixels[..., :3] * alpha + (1.0 - alpha)), notes)


def _deep(image: Any, path: Path) -> Picture:
    """Return grey of more than 8 bits as RGB; the value that a file calls transparent is white."""
    notes: tuple[str, ...] = ("16-bit grey, scaled by its depth and repeated in three channels",)
    values = np.asarray(image, np.float64)
    if image.mode == "F":
        if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
            raise DataError(
                f"{path}: real values from {values.min():g} to {values.max():g}; expected 0 to 1, or integers"
            )
        grey = values
    elif values.min() < 0 or values.max() > 65535:
        raise DataError(f"{path}: values from {values.min():g} to {values.max():g}; expected at most 16 bits")
    else:
        grey = values / 65535.0
    clear = image.info.get("transparency")
    if isinstance(clear, int) and (transparent := values == clear).any():
        grey, notes = np.where(transparent, 1.0, grey), (*notes, ON_WHITE)
    repeated = np.repeat(grey[..., None], 3, axis=-1).astype(np.float32)
    return Picture(_channels(repeated), notes)


def _channels(pixels: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)


@dataclass(frozen=True)
class TileSet:
    """The tiles of a site.

    Attributes:
        folder: the folder that names are relative to.
        paths: in natural order, class by class.
        labels: (n,) class values, ``UNLABELLED`` where the folder of a tile is not a class.
        skipped: how many files or folders were left out, by reason.
    """

    folder: Path
    paths: tuple[Path, ...]
    labels: npt.NDArray[np.int64]
    skipped: dict[str, int]

    @property
    def labelled(self) -> bool:
        """Whether every tile has a class."""
        return bool((self.labels != UNLABELLED).all())

    @property
    def names(self) -> list[str]:
        """Names relative to the folder."""
        return [path.relative_to(self.folder).as_posix() for path in self.paths]


def find_tiles(volumes: Path, folders: dict[str, int]) -> TileSet:
    """Find the tiles of a site.

    Args:
        volumes: folder with one sub-folder per class, or with tiles directly or in any sub-folders.
        folders: sub-folder -> class value; upper and lower case are the same. Other sub-folders are
            counted and left out; if none of these exists, every tile below is one without a label.

    Raises:
        DataError: no such folder, or no tile in it.
    """
    volumes = Path(volumes)
    if not volumes.is_dir():
        raise DataError(f"{volumes}: no such folder; give a folder of tiles")
    classes = {fold(name): value for name, value in folders.items()}
    skipped: Counter[str] = Counter()
    found: list[tuple[Path, int]] = []
    below = listed(volumes)
    if present := [item for item in below if fold(item.name) in classes]:
        others = [item for item in below if item not in present and not item.name.startswith(".")]
        skipped.update({f"folder {item.name}: no class of the site": len(walk(item)[0]) for item in others})
        for item in present:
            found += [(path, classes[fold(item.name)]) for path in _tiles(item, skipped)]
    else:
        found = [(path, UNLABELLED) for path in _tiles(volumes, skipped)]
    if not found:
        names = ", ".join(folders) or "any"
        raise DataError(f"{volumes}: no tile found; looked for {', '.join(TILE_SUFFIXES)} in folders {names}")
    return TileSet(
        volumes,
        tuple(path for path, _ in found),
        np.array([label for _, label in found], np.int64),
        dict(skipped),
    )


def _tiles(folder: Path, skipped: Counter[str]) -> list[Path]:
    files, left_out = walk(folder)
    skipped.update(reason for _, reason in left_out)
    paths = [path for path in files if path.suffix.lower() in TILE_SUFFIXES]
    if others := len(files) - len(paths):
        skipped[f"not {', '.join(TILE_SUFFIXES)}"] += others
    return paths
