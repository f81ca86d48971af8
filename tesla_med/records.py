"""What a run keeps of its items and hands to its caller: scores, records, the outcome."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, InstanceOf, PlainSerializer, model_validator

from tesla_med.types import Packed, Record, Status, Used


class Measured(Record):
    """Base of scores: values of metrics as fields, those of further metrics in ``more``, by column."""

    more: dict[str, float | None] = {}

    def value(self, name: str) -> float | None:
        """Return the value in a column, whether it is a field or not; None where it does not exist."""
        found: float | None = getattr(self, name) if name in type(self).model_fields else self.more.get(name)
        return found

    @classmethod
    def placed(cls, values: Mapping[str, float | None]) -> dict[str, Any]:
        """Return values by column as what fills a record: its own fields, and ``more`` for the rest."""
        own = {name: value for name, value in values.items() if name in cls.model_fields}
        return own | {"more": {name: value for name, value in values.items() if name not in own}}


class ClassScore(Measured):
    """Scores of one class of one case on the native grid; None is "not applicable".

    ``dice`` is n/a where reference and prediction are both empty, 0 where only one is.
    ``hd95_mm`` and ``assd_mm`` are n/a where either is empty or the spacing is nominal,
    volumes in ml are n/a where the spacing is nominal. What else is measured (see
    ``tesla_med.scoring.metrics``) is in ``more``. ``predicted_dice`` is estimated without labels, with
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

    @property
    def dice_change(self) -> float | None:
        """Dice less that of the source's mask, in [-1, 1]; None without a reference, or where all are empty.

        Beside a mask that is not empty, an empty one of an empty reference counts as 1: what adaptation
        paints where there is no organ is a loss, though one of the two Dice is n/a.
        """
        return change_of(self.dice_source, self.dice, empty=self.voxels_reference == 0)


def _packed(content: Any) -> Any:
    return Packed(content) if isinstance(content, Mapping) and not isinstance(content, Packed) else content


def _unpacked(content: Mapping[str, Any]) -> dict[str, Any]:
    return content.unpacked() if isinstance(content, Packed) else dict(content)


Counted = Annotated[InstanceOf[Packed], BeforeValidator(_packed), PlainSerializer(_unpacked)]
"""Calibration counts, packed as they are set and unpacked as they are written."""


class OfMask(Record):
    """Base of records of a case that tell which model made its mask: none did where the case failed.

    Records of earlier versions that say otherwise are read so, too.
    """

    @model_validator(mode="before")
    @classmethod
    def _none_where_failed(cls, content: Any) -> Any:
        if not isinstance(content, Mapping) or content.get("status") != "failed":
            return content
        blank = [name for name in ("used", "share", "trusted") if name in cls.model_fields]
        return {**content, **dict.fromkeys(blank)}


class CaseResult(OfMask):
    """What happened to one case.

    ``status``: ok; empty (no foreground found); blank (constant image, not adapted);
    unscored (a reference exists but does not fit); failed (no mask written, see ``reason``); corrected (its
    mask was corrected by hand and took part in adaptation, so that it is not scored).
    ``used``: which model made the mask in ``masks/``, or corrected; None where the case failed; ``share``:
    how much of the way from source to adapted it went, in [0, 1]; ``signals``: what the guard saw (see
    ``tesla_med.engine.guard``); ``trusted``: False where the guard trusts no mask of the case, None where the
    case failed; ``scaling``: of the intensities, where it was chosen for the case; ``references_sha256``: of
    the files of its references and of its region, None where not noted; ``slices``, ``voxels``: of the image;
    ``fill_voxels``: of these, fill (see ``tesla_med.prepare.fill``).
    """

    case: str
    site: str
    method: str = ""
    protocol: str = ""
    seed: int = 0
    status: Status
    used: Used | None
    share: float | None = None
    trusted: bool | None = True
    scaling: str = ""
    reason: str = ""
    seconds: float = 0.0
    slices: int = 0
    voxels: int = 0
    fill_voxels: int = 0
    input_sha256: str = ""
    references_sha256: str | None = None
    entropy: float | None = None
    entropy_source: float | None = None
    signals: dict[str, float] = {}
    notes: tuple[str, ...] = ()
    scores: tuple[ClassScore, ...] = ()
    calibration: Counted | None = None

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

    @property
    def dice_change(self) -> float | None:
        """Mean change of Dice over the foreground classes that have one, or None."""
        return mean_of_known([score.dice_change for score in self.scores])

    @property
    def headline(self) -> float | None:
        """Headline metric of the case: the mean Dice."""
        return self.mean_dice

    @property
    def headline_source(self) -> float | None:
        """The same of the unadapted mask."""
        return self.mean_dice_source

    def brief(self) -> dict[str, Any]:
        """Return what run.json says of the case."""
        return {
            "case": self.case,
            "status": self.status,
            "used": self.used,
            "share": self.share,
            "trusted": self.trusted,
            "scaling": self.scaling,
            "reason": self.reason,
            "seconds": round(self.seconds, 3),
            "slices": self.slices,
            "fill_voxels": self.fill_voxels,
            "input_sha256": self.input_sha256,
            "signals": {name: round(value, 6) for name, value in self.signals.items()},
            "notes": list(self.notes),
        }

    def of_run(self, method: str, protocol: str, seed: int, seconds: float) -> CaseResult:
        """Return the record with what only the run knows."""
        update = {"method": method, "protocol": protocol, "seed": seed, "seconds": seconds}
        return self.model_copy(update=update)


@dataclass(frozen=True, slots=True)
class TileResult:
    """What happened to one tile.

    Attributes:
        case: its name.
        status: ok; blank (too little tissue, not used); failed (could not be read); collapsed (adaptation
            gave values that are not finite).
        used: which model made the prediction; None where it failed.
        reason: why, in words.
        label: name of its class, "" where it has none.
        probs: (L,) float32 of the model that was used, None where the tile could not be read.
        probs_source: (L,) float32 of the unadapted model.
        correct: whether the predicted class is the label; None without either.
        correct_source: the same of the unadapted model.
        notes: remarks of reading.
        tissue: share of its pixels that show tissue, in [0, 1]; None where the tile could not be read.
    """

    case: str
    status: Status
    used: Used | None
    reason: str = ""
    label: str = ""
    probs: npt.NDArray[np.float32] | None = None
    probs_source: npt.NDArray[np.float32] | None = None
    correct: bool | None = None
    correct_source: bool | None = None
    notes: tuple[str, ...] = ()
    tissue: float | None = None

    def __post_init__(self) -> None:
        if self.status == "failed":
            object.__setattr__(self, "used", None)

    @property
    def headline(self) -> float | None:
        """Headline metric of a tile: 1 where the predicted class is the label, else 0."""
        return None if self.correct is None else float(self.correct)

    @property
    def headline_source(self) -> float | None:
        """The same of the unadapted model."""
        return None if self.correct_source is None else float(self.correct_source)

    def of_run(self, method: str, protocol: str, seed: int, seconds: float) -> TileResult:
        """Return the record as it is: it says nothing of the run."""
        return self

    def model_dump(self, mode: str = "json") -> dict[str, Any]:
        """Return plain values; probabilities lose nothing as JSON."""
        values = {name: getattr(self, name) for name in self.__slots__}
        for key in ("probs", "probs_source"):
            values[key] = None if values[key] is None else values[key].tolist()
        return values | {"notes": list(self.notes)}

    @classmethod
    def model_validate(cls, content: Mapping[str, Any]) -> TileResult:
        """Return what :meth:`model_dump` gave.

        Raises:
            ValueError: it is something else.
        """
        values = dict(content)
        for key in ("probs", "probs_source"):
            values[key] = None if values.get(key) is None else np.array(values[key], np.float32)
        try:
            return cls(**values | {"notes": tuple(values.get("notes", ()))})
        except TypeError as error:
            raise ValueError(str(error)) from None


class ItemResult(Protocol):
    """What every record of an item has, whatever the task."""

    @property
    def case(self) -> str:
        """Name of the item."""

    @property
    def status(self) -> Status:
        """What became of it."""

    @property
    def used(self) -> Used | None:
        """Which model made the result; None where there is none."""

    @property
    def reason(self) -> str:
        """Why, in words."""

    @property
    def headline(self) -> float | None:
        """The task's headline metric; None where it cannot be told."""

    @property
    def headline_source(self) -> float | None:
        """The same of the unadapted model."""

    def of_run(self, method: str, protocol: str, seed: int, seconds: float) -> ItemResult:
        """Return the record with what only the run knows."""

    def model_dump(self, *, mode: str) -> dict[str, Any]:
        """Return plain values for JSON."""


@dataclass(frozen=True)
class Predicted:
    """How often each class is predicted.

    Attributes:
        counts: by name of a class and model (``source``, ``adapted``) the tiles, or the cases that hold it;
            of cases also ``voxels_source`` and ``voxels_adapted``.
        remarks: classes that are never predicted, or nearly always, in words.
    """

    counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteResult:
    """Outcome of a run.

    Attributes:
        out: the output folder.
        results: one record per item, in order.
        files: report files written.
        skipped: files that were not used, with the reason.
        notes: remarks that hold for the whole run.
        metric: name of the headline metric.
        diverged: how many units fell back to the source model because adaptation gave values that are not
            finite.
        units: how many units the run had.
        reports_failed: reports that could not be made, with the reason.
        predicted: how often each class is predicted.
        method: that adapted.
    """

    out: Path
    results: tuple[Any, ...]
    files: tuple[Path, ...]
    skipped: tuple[tuple[Path, str], ...]
    notes: tuple[str, ...]
    metric: str = "dice"
    diverged: int = 0
    units: int = 0
    reports_failed: Mapping[str, str] = field(default_factory=dict)
    predicted: Predicted = Predicted()
    method: str = ""

    @property
    def failed(self) -> tuple[Any, ...]:
        """Items without a result, or whose reference does not fit."""
        return tuple(item for item in self.results if item.status in ("failed", "unscored"))

    @property
    def complete(self) -> bool:
        """Whether every item and report is done, and adaptation did not diverge on all items."""
        diverged = self.units and self.diverged == self.units
        return not self.failed and not self.reports_failed and not diverged

    @property
    def remarks(self) -> tuple[tuple[str, str], ...]:
        """What was noticed of single items, (name, text): notes, and why a result cannot be trusted."""
        found: list[tuple[str, str]] = []
        for item in self.results:
            found += [(item.case, text) for text in item.notes]
            found += [(item.case, item.reason)] if getattr(item, "trusted", True) is False else []
        return tuple(found)

    @property
    def mean(self) -> float | None:
        """Mean of the headline metric over items, or None without references."""
        return mean_of_known(item.headline for item in self.results)

    @property
    def mean_source(self) -> float | None:
        """The same of the unadapted model."""
        return mean_of_known(item.headline_source for item in self.results)

    @property
    def mean_dice(self) -> float | None:
        """Mean over cases of the mean foreground Dice, or None without references."""
        return self.mean if self.metric == "dice" else None

    @property
    def mean_dice_source(self) -> float | None:
        """The same of the unadapted model."""
        return self.mean_source if self.metric == "dice" else None


WITHOUT_RESULT = ("failed", "unscored")  # status without a mask, or with a reference that does not fit


def change_of(before: float | None, after: float | None, *, empty: bool) -> float | None:
    """Return the difference of two values in [0, 1]; None where nothing can be compared.

    Args:
        before: of the source model; None where there is none.
        after: of the method.
        empty: whether the reference is: then a mask that is not has a Dice of 0 and an empty one has none,
            and beside the other it counts as 1.
    """
    if empty and (before is None) != (after is None):
        before, after = (1.0 if value is None else value for value in (before, after))
    return None if before is None or after is None else after - before


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of what is not None, or None where nothing is."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
