"""Read a finished mask with its reference, and bring the values of both to what they mean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tesla_med.errors import ConfigError, DataError, GeometryError
from tesla_med.io.masks import as_named_there, mask_name
from tesla_med.io.pseudonyms import KeyFile, Renamer
from tesla_med.scoring.text import counted, some
from tesla_med.types import IntArray


@dataclass(frozen=True)
class Meaning:
    """What values in files mean.

    Attributes:
        ignore: values of the references that mean "do not score".
        values: value in a file, of either side -> label; others stay as they are.
    """

    ignore: tuple[int, ...] = ()
    values: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse a value that is given both."""
        both = sorted(set(self.ignore) & set(self.values or {}))
        if both:
            raise ConfigError(f"value {_list(both)} is both ignored and mapped; give --ignore or --values")

    def labels(self, array: IntArray) -> IntArray:
        """Return an array of values of a file as labels."""
        result = np.array(array)
        for value, label in (self.values or {}).items():
            result[array == value] = label
        return result


def settings_of(masks: Path) -> dict[str, Any]:
    """Return the settings of the run whose ``masks/`` a folder is; none where it is not."""
    try:
        settings = json.loads((masks.parent / "run.json").read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return settings if isinstance(settings, dict) else {}


def corrected_of(masks: Path) -> tuple[str, ...]:
    """Return which masks of a folder were corrected by hand, by name, where it is ``masks/`` of a run.

    Such a mask was learned from in the run and is no result of it.
    """
    return tuple(mask_name(Path(f"{name}.nii.gz")) for name in settings_of(masks).get("corrections") or ())


def without_names(
    key: KeyFile, folders: tuple[Path, Path], ours: Mapping[str, Path], theirs: Mapping[str, Path]
) -> tuple[Renamer, dict[str, Path], dict[str, Path]]:
    """Return what renames, and predictions and references by pseudonym.

    Predictions of a run that was anonymised have theirs, as ``run.json`` says; without one they have if the
    key knows all of them as pseudonyms. References keep their names.

    Raises:
        DataError: names of both sides may be pseudonyms.
    """
    settings = settings_of(folders[0])
    site = (settings.get("site") or {}).get("id") or ""
    entries = {name: key.of_pseudonym(name) for name in ours}
    hidden = bool(settings.get("anonymised")) if settings else all(entries.values())
    if hidden and not settings and set(ours) <= set(theirs):
        raise DataError(
            f"{folders[0]}: {some(list(ours), 3)} may be pseudonyms or names, as references are called so, "
            "too; give the output folder of the run"
        )
    if not hidden:
        names = Renamer(key, (*ours, *theirs), folders, site)
        ours = {names.name(name): path for name, path in ours.items()}
        return names, ours, {names.name(name): path for name, path in theirs.items()}
    known = {entry.case: ours[name] for name, entry in entries.items() if entry is not None}
    theirs = as_named_there(theirs, known)
    names = Renamer(key, theirs, folders, site)
    return names, dict(ours), {names.name(name): path for name, path in theirs.items()}


@dataclass(frozen=True)
class Pair:
    """A mask and its reference on one grid; voxels that are not scored are 0 in both.

    Attributes:
        mask: (I, J, K) labels.
        truth: (I, J, K) labels.
        spacing: voxel size in mm, and the volume of a voxel in cubic mm.
        ignored: voxels that are not scored.
        found: labels above 0 of the mask, and of the reference.
    """

    mask: IntArray
    truth: IntArray
    spacing: tuple[tuple[float, ...], float]
    ignored: int
    found: tuple[frozenset[int], frozenset[int]]


def read_pair(prediction: Path, reference: Path, meaning: Meaning) -> Pair:
    """Read a mask and its reference.

    Raises:
        DataError: a file cannot be read, or holds something else than labels.
        GeometryError: their grids differ.
    """
    from tesla_med.io.geometry import Grid, grid_difference, placed, spacing_of, united, voxel_mm3
    from tesla_med.io.volumes import is_partial, read_mask

    mask, affine = read_mask(prediction)
    truth, other = read_mask(reference)
    if is_partial(prediction) or is_partial(reference):
        shape, target = mask.shape, affine
        if is_partial(prediction):
            shape, target = truth.shape, other
            if is_partial(reference):
                shape, target = united(mask.shape, affine, truth.shape, other, reference)
        mask = placed(mask, affine, shape, target, prediction)
        truth = placed(truth, other, shape, target, reference)
        affine = other = target
    ours, theirs = Grid(mask.shape, affine), Grid(truth.shape, other)
    if differs := grid_difference("prediction", ours, "reference", theirs):
        raise GeometryError(f"{differs}; resample one to the other or correct its header")
    ignored = np.isin(truth, meaning.ignore)
    mask, truth = meaning.labels(mask), meaning.labels(truth)
    if ignored.any():
        mask[ignored] = truth[ignored] = 0
    found = frozenset(_values(mask)), frozenset(_values(truth))
    size = spacing_of(affine), voxel_mm3(affine)
    return Pair(mask, truth, size, int(np.count_nonzero(ignored)), found)


def one_sided(found: Mapping[str, tuple[frozenset[int], frozenset[int]]]) -> list[str]:
    """Name each label that only the masks hold, or only the references, in any of the cases.

    Args:
        found: by case, the labels of its mask and of its reference.
    """
    sides = ("masks", "references")
    held = [frozenset[int]().union(*(pair[side] for pair in found.values())) for side in (0, 1)]
    texts = []
    for side, name in enumerate(sides):
        for value in sorted(held[side] - held[1 - side]):
            cases = [case for case, pair in found.items() if value in pair[side]]
            where = f"{counted(len(cases), 'case')}: {some(cases, 10)}"
            texts.append(f"value {value} is in {name} only ({where})")
    return texts


REMEDY = (
    "there is no labels.json, so that every value is scored as a class of its own; say what it means with"
    " --values FROM=TO, or leave it out of the references with --ignore VALUE"
)
"""What to do about a value that only one side holds."""


def _values(array: IntArray) -> Iterable[int]:
    return (int(value) for value in np.unique(array) if value)


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
