"""Find masks in a folder, tell which of them are of the same case, and check which labels one holds."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from tesla_med.errors import DataError
from tesla_med.io.volumes import VOLUME_SUFFIXES, stem, volume_suffix
from tesla_med.io.walk import walk
from tesla_med.types import IntArray

SUFFIX_PARTS = frozenset(
    (
        "mask",
        "masks",
        "seg",
        "segs",
        "segmentation",
        "segmentations",
        "label",
        "labels",
        "labelmap",
        "dseg",
        "gt",
        "groundtruth",
        "truth",
        "ref",
        "reference",
        "manual",
        "pred",
        "prediction",
    )
)
SURE_PARTS = SUFFIX_PARTS - {"gt", "truth", "ref", "reference", "manual", "pred", "prediction"}
"""Those that are hardly ever part of an image's name."""
FIRST_CHANNEL = "_0000"
"""How nnU-Net ends the name of the image of the first channel."""


def find_masks(folder: Path) -> dict[str, Path]:
    """Return every image file that :func:`tesla_med.io.walk.walk` finds, by :func:`mask_name`, in its order.

    Where a folder holds images beside their masks, as ``Case07`` and ``Case07_seg``, one without a mask is
    left out.

    Raises:
        DataError: no folder, no such file in it, or two files with one name.
    """
    if not folder.is_dir():
        what = "it is a file" if folder.exists() else "it does not exist"
        raise DataError(f"{folder}: expected a folder of masks; {what}")
    found: dict[str, Path] = {}
    beside: set[Path] = set()
    for path in walk(folder)[0]:
        if not volume_suffix(path.name):
            continue
        name = mask_name(path.relative_to(folder))
        if name in found:
            found[name] = _more_mask_like(found[name], path, name)
            beside.add(found[name].parent)
        else:
            found[name] = path
    found = {
        name: path
        for name, path in found.items()
        if path.parent not in beside or stem(path) != Path(name).name
    }
    if not found:
        raise DataError(f"{folder}: no mask found; looked for {', '.join(VOLUME_SUFFIXES)} in it and below")
    return found


def mask_name(relative: Path) -> str:
    """Return the path without extension and trailing parts that only say "this is a mask".

    Only whole parts between ``_``, ``-`` and ``.`` count: ``Case07_seg`` is Case07,
    ``Case07_segment2`` and ``Unmasked`` stay as they are.
    """
    name = stem(relative)
    return (relative.parent / [name, *shortened(name, SUFFIX_PARTS)][-1]).as_posix()


def shortened(name: str, parts: Collection[str]) -> list[str]:
    """Return a name without extension after each trailing part, of those given, that is left away."""
    found = []
    while (match := re.fullmatch(r"(.+)[_.-]([^_.-]+)", name)) and match[2].lower() in parts:
        name = match[1]
        found.append(name)
    return found


def _more_mask_like(first: Path, second: Path, name: str) -> Path:
    """Return the one whose name says that it is a mask; refuse to choose between two of a kind."""
    bare = [path for path in (first, second) if stem(path) == Path(name).name]
    if len(bare) != 1:
        raise DataError(
            f"{first} and {second} are both {name!r}; keep one of them or use a folder for each kind"
        )
    return second if bare[0] == first else first


def as_named_there(masks: Mapping[str, Path], others: Mapping[str, Path]) -> dict[str, Path]:
    """Return masks by the names that they have in another folder, where one names the first channel.

    nnU-Net calls an image ``P1_0000`` and its reference ``P1``.
    """
    found: dict[str, Path] = {}
    for name, path in masks.items():
        variants = (f"{name}{FIRST_CHANNEL}", name.removesuffix(FIRST_CHANNEL)) if name not in others else ()
        found[next((item for item in variants if item in others and item not in masks), name)] = path
    return found


def check_labels(mask: IntArray, known: Sequence[int], what: str) -> None:
    """Check that ``mask`` holds no label but those ``known`` and 0.

    Raises:
        DataError: it does; the message names the labels.
    """
    unknown = sorted({int(value) for value in np.unique(mask)} - {0, *known})
    if unknown:
        raise DataError(
            f"{what} holds label {', '.join(map(str, unknown))}, expected only"
            f" {', '.join(map(str, sorted({0, *known})))}; map its values or correct the class list"
        )
