"""Data that passes between the rooms: items, units, volumes, results. Nothing here imports torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from torch import Tensor

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

Progress = Callable[[str, int, int], None]
"""Called with the stage, how much of it is done, and how much there is in total."""
ZOOMS = (0.85, 1.2)
"""Factors of the size of slices for the question whether a mask stays: reduced, enlarged."""
PASSES = "passes over the site"
"""Name of a stage of progress."""
UPDATES_OF = "updates of "
"""Begins the name of a stage of progress that counts the updates of one unit, or of one pass over a site."""

Status = Literal["ok", "empty", "blank", "unscored", "collapsed", "failed", "corrected"]
Used = Literal["adapted", "partial", "source", "corrected"]


@dataclass(frozen=True)
class Case:
    """One image file with the reference files that belong to it.

    Attributes:
        name: path of the image relative to the searched folder, without extension and the folders that
            its pattern spells out, with ``/`` between folders; unique in a run and the stem of every output.
        image: the image file; of several channels the first, whose grid is the case's.
        masks: one entry per mask layer of the site configuration, ``None`` where that
            layer has no file for this case.
        region_mask: the file the region of interest is taken from, if the site asks for one.
        channels: the files of the second and further channels, ``None`` where one has no file.
        problem: why its image cannot be told, in words; "" where it can.
    """

    name: str
    image: Path
    masks: tuple[Path | None, ...] = ()
    region_mask: Path | None = None
    channels: tuple[Path | None, ...] = ()
    problem: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """The image files that there are, one per channel."""
        return (self.image, *(path for path in self.channels if path is not None))

    @property
    def labelled(self) -> bool:
        """Whether every mask layer has a file."""
        return bool(self.masks) and all(mask is not None for mask in self.masks)


@dataclass
class Volume:
    """One image in the voxel order of its file.

    Attributes:
        array: (C, I, J, K) float32, scaled intensities, all finite.
        affine: (4, 4) voxel index to RAS+ world, mm.
        spacing: voxel size along I, J, K in mm.
        header: what the writer needs to repeat the grid exactly; opaque outside ``io``.
        path: the file.
        nominal_spacing: the file's voxel size is not a physical one (see the site).
        blank: the image is constant, so there is nothing to segment.
        notes: remarks for the report (repaired voxels, assumed units, ...).
        stated: ``spacing`` as the header states it, which differs by rounding; None where it states none.
    """

    array: npt.NDArray[np.float32]
    affine: npt.NDArray[np.float64]
    spacing: tuple[float, float, float]
    header: Any
    path: Path
    nominal_spacing: bool = False
    blank: bool = False
    notes: list[str] = field(default_factory=list)
    stated: tuple[float, float, float] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Grid size (I, J, K)."""
        return (self.array.shape[1], self.array.shape[2], self.array.shape[3])


@dataclass(frozen=True)
class Items:
    """What a task found of a site.

    Attributes:
        folder: the folder that names are relative to.
        names: of the items, in the order of the run.
        skipped: what will not be used: a file or folder, and the reason.
        content: the task's own record of the items.
        remarks: what looks wrong about how they were found, in words.
    """

    folder: Path
    names: tuple[str, ...]
    skipped: tuple[tuple[Path, str], ...]
    content: Any
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ref:
    """One unit of a run, unread.

    Attributes:
        name: unique in the run; names the unit's files.
        items: names of the items in it.
        content: the task's own record of what is to be read.
    """

    name: str
    items: tuple[str, ...]
    content: Any


Elsewhere: TypeAlias = Callable[[Sequence[Ref], Progress], Iterator[tuple[Ref, list[Any]]]]
"""Has units done by other processes; yields each with the steps (number, scalars) of its updates."""


@dataclass(frozen=True)
class Scaling:
    """The scaling of the intensities of one unit to [0, 1] that was chosen.

    Attributes:
        name: which; "" for that of the training.
        reason: why it is not that of the training, in words.
        signals: what the decision was made from, by name.
    """

    name: str
    reason: str
    signals: Mapping[str, float]


@dataclass(frozen=True)
class Unit:
    """What goes through a network together: the slices of one case, or a batch of tiles.

    Attributes:
        ref: which one it is.
        images: (N, C, *spatial) float32 in [0, 1]; None where there is nothing to look at.
        content: the task's own record: the way back, what a report needs.
        sha256: of the input, where it is one file.
        notes: remarks of reading and preparing.
        failed: item -> reason of those that could not be read.
        scalings: the same images in other scalings, by their names.
        scaling: what was chosen among them, where there was a choice.
        fill: (N, *spatial) bool, where images hold no measurement; None for nowhere.
    """

    ref: Ref
    images: Tensor | None
    content: Any
    sha256: str = ""
    notes: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    scalings: Mapping[str, Tensor] = field(default_factory=dict)
    scaling: Scaling | None = None
    fill: Tensor | None = None


@dataclass(frozen=True)
class Check:
    """What was found of one item before anything is run.

    Attributes:
        case: its name.
        shape: voxels or pixels along each axis, or None where the image cannot be read.
        spacing: mm along each axis, or None.
        labels: label values of the reference, or the class of a tile; None without one.
        problems: what would make the item fail or stay unscored.
        notes: remarks of reading.
    """

    case: str
    shape: tuple[int, ...] | None
    spacing: tuple[float, ...] | None
    labels: tuple[int | str, ...] | None
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ItemEstimate:
    """What one item of a run would be; ``problem`` says why it would fail, ``notes`` are remarks.

    ``corrected``: whether a corrected mask of it takes part.
    """

    case: str
    shape: tuple[int, ...] | None
    slices: int
    labelled: bool
    problem: str = ""
    notes: tuple[str, ...] = ()
    corrected: bool = False


@dataclass(frozen=True)
class Failure:
    """A unit that could not be read, and why."""

    ref: Ref
    error: Exception


@dataclass(frozen=True)
class Earlier:
    """What a run that goes on keeps of an interrupted attempt.

    Attributes:
        items: names of the items that are not done again.
        steps: how many of its updates led to where the run goes on; None where units are independent, so
            that those of the units that are done again have no part in it.
    """

    items: frozenset[str]
    steps: float | None


@dataclass(frozen=True)
class Verdict:
    """What is said of one unit: how far it moved from the source model, and why.

    Attributes:
        share: of the way from source to adapted, in [0, 1].
        reason: why, in words.
        collapsed: the adapted mask is not one to build on: the case should leave no trace.
        signals: what the decision was made from, and what else is worth a look, by name.
        statistics: where weights are taken under a mixture of the volume's own and the source's normalisation
            statistics, the share of the volume's, in (0, 1]; else 0.
        diverged: adaptation gave values that are not finite.
        trusted: whether the mask that is taken can be trusted at all.
    """

    share: float
    reason: str
    collapsed: bool = False
    signals: dict[str, float] = field(default_factory=dict)
    statistics: float = 0.0
    diverged: bool = False
    trusted: bool = True

    @property
    def used(self) -> Used:
        """Which model the share stands for; other statistics are a partial step too."""
        if self.statistics:
            return "partial"
        return "source" if self.share == 0 else "adapted" if self.share == 1 else "partial"


@dataclass
class Prediction:
    """Class probabilities of one case on its native grid, and their argmax.

    Attributes:
        probs: (L, I, J, K) float32, sums to 1 over L.
        mask: (I, J, K) integer label *values* (not class indices).
    """

    probs: npt.NDArray[np.float32]
    mask: IntArray


@dataclass(frozen=True)
class CaseView:
    """Arrays a report may draw, all on the native grid.

    Attributes:
        image: (I, J, K) float32, first channel.
        source_mask: (I, J, K) label values of the unadapted model.
        mask: (I, J, K) label values of the method.
        reference: (I, J, K) label values, or None.
        affine: (4, 4) voxel to RAS+ mm.
        spacing: voxel size in mm.
        ignored: (I, J, K), true where the reference says "do not score" (it is 0 there); None for nowhere.
        entropy: (I, J, K) float32 in [0, 1], normalised entropy of the method, where it is kept; else None.
    """

    image: npt.NDArray[np.float32]
    source_mask: IntArray
    mask: IntArray
    reference: IntArray | None
    affine: npt.NDArray[np.float64]
    spacing: tuple[float, float, float]
    ignored: BoolArray | None = None
    entropy: npt.NDArray[np.float32] | None = None

    @cached_property
    def foreground(self) -> BoolArray:
        """Where any of the masks is not background, (I, J, K)."""
        union: BoolArray = (self.mask != 0) | (self.source_mask != 0)
        return union if self.reference is None else union | (self.reference != 0)


class Record(BaseModel):
    """Base of results that are written as JSON: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass
class Carry:
    """A method's state on its way from one site to the next, under ``reset: never``."""

    state: dict[str, Any] | None = None


class Packed(Mapping[str, Any]):
    """JSON-able content in a tenth of its memory: a run keeps the counts of all its cases to its end."""

    __slots__ = ("_bytes",)

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._bytes = zlib.compress(json.dumps(dict(content)).encode())

    def unpacked(self) -> dict[str, Any]:
        """Return the content."""
        content: dict[str, Any] = json.loads(zlib.decompress(self._bytes))
        return content

    def __getitem__(self, key: str) -> Any:
        return self.unpacked()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.unpacked())

    def __len__(self) -> int:
        return len(self.unpacked())
