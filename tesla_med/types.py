"""Data that passes between the parts: cases, volumes, predictions, results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

IntArray = npt.NDArray[np.integer[Any]]
BoolArray = npt.NDArray[np.bool_]

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and how much there is."""

Status = Literal["ok", "empty", "blank", "unscored", "collapsed", "failed"]
Used = Literal["adapted", "partial", "source"]


@dataclass(frozen=True)
class Case:
    """One image file with the reference files that belong to it.

    Attributes:
        name: path of the image relative to the searched folder, without extension and
            with ``/`` between folders; unique in a run and the stem of every output.
        image: the image file.
        masks: one entry per mask layer of the site configuration, ``None`` where that
            layer has no file for this case.
        region_mask: the file the region of interest is taken from, if the site asks for one.
    """

    name: str
    image: Path
    masks: tuple[Path | None, ...] = ()
    region_mask: Path | None = None

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
    """

    array: npt.NDArray[np.float32]
    affine: npt.NDArray[np.float64]
    spacing: tuple[float, float, float]
    header: Any
    path: Path
    nominal_spacing: bool = False
    blank: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Grid size (I, J, K)."""
        return (self.array.shape[1], self.array.shape[2], self.array.shape[3])


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
    """

    image: npt.NDArray[np.float32]
    source_mask: IntArray
    mask: IntArray
    reference: IntArray | None
    affine: npt.NDArray[np.float64]
    spacing: tuple[float, float, float]


class Record(BaseModel):
    """Base of results that are written as JSON: frozen, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ClassScore(Record):
    """Scores of one class of one case on the native grid; None is "not applicable".

    ``dice`` is n/a where reference and prediction are both empty, 0 where only one is.
    ``hd95_mm`` and ``assd_mm`` are n/a where either is empty or the spacing is nominal,
    volumes in ml are n/a where the spacing is nominal. ``predicted_dice`` is estimated without labels, with
    its 90 % interval (see ``tesla_med.engine.quality``).
    """

    label: int
    name: str
    dice: float | None = None
    dice_source: float | None = None
    hd95_mm: float | None = None
    assd_mm: float | None = None
    volume_ml: float | None = None
    volume_ml_source: float | None = None
    voxels: int = 0
    voxels_source: int = 0
    voxels_reference: int | None = None
    predicted_dice: float | None = None
    predicted_low: float | None = None
    predicted_high: float | None = None


class CaseResult(Record):
    """What happened to one case.

    ``status``: ok; empty (no foreground found); blank (constant image, not adapted);
    unscored (a reference exists but does not fit); failed (no mask written, see ``reason``).
    ``used``: which model made the mask in ``masks/``; ``share``: how much of the way from source to
    adapted it went, in [0, 1]; ``signals``: what the guard saw (see ``tesla_med.engine.guard``).
    """

    case: str
    site: str
    method: str
    protocol: str
    seed: int
    status: Status
    used: Used
    share: float | None = None
    reason: str = ""
    seconds: float = 0.0
    slices: int = 0
    input_sha256: str = ""
    entropy: float | None = None
    entropy_source: float | None = None
    signals: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    scores: tuple[ClassScore, ...] = ()
    calibration: dict[str, Any] | None = None

    @property
    def mean_dice(self) -> float | None:
        """Mean Dice over the foreground classes that have one, or None."""
        return mean_of_known([score.dice for score in self.scores])

    @property
    def predicted_dice(self) -> float | None:
        """Mean predicted Dice over the foreground classes that have one, or None."""
        return mean_of_known([score.predicted_dice for score in self.scores])

    @property
    def mean_dice_source(self) -> float | None:
        """Mean Dice of the unadapted mask over the foreground classes, or None."""
        return mean_of_known([score.dice_source for score in self.scores])


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is not None, or None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
