"""What a task is: the items of a site, the units that go through a network, and what is done with a result.

A task knows the site, the pipeline and what the weights were trained on; it knows no method and no device.
Everything but ``find``, ``load``, ``finish`` and ``score`` has a default, so that a task in memory is short.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tesla_med.config.models import PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.config.request import RunRequest
from tesla_med.errors import ConfigError, TeslaMedError
from tesla_med.io.pseudonyms import Pseudonyms
from tesla_med.records import CaseResult, Predicted
from tesla_med.registry import Registry
from tesla_med.runs.folder import RunFolder
from tesla_med.types import CaseView, Check, ItemEstimate, Items, Progress, Ref, Unit

if TYPE_CHECKING:
    from tesla_med.engine.outcome import Outcome
    from tesla_med.engine.predictor import Predictor
    from tesla_med.engine.supervision import Supervision
    from tesla_med.prepare.acquisition import Acquisition
    from tesla_med.scoring.calibration import CalibrationCounts
    from tesla_med.tasks.labelled import LabelledSource

log = logging.getLogger(__name__)
TASKS: Registry[type[Task]] = Registry("task", "tesla_med.tasks", "tesla_med.tasks")
CASE_ORDER = "natural order of names, folder by folder: P1, P2, P10"
OPTIONS: Mapping[str, str] = {
    "guard": "the guard (--guard, guard.enabled)",
    "recalibrate": "recalibrate",
    "keep-largest": "keep_largest",
    "probs": "--save-probs",
    "uncertainty": "--save-uncertainty",
    "reset-case": "--reset case",
    "rollback": "rollback",
    "single": "rollback --case",
    "empty": "--empty one",
    "figures": "figures of a comparison",
    "classes": "a list of classes",
    "ignore": "--ignore",
    "values": "--values",
    "export": "export",
    "review": "review",
    "corrections": "--corrections",
    "anonymise": "--anonymise (--key)",
    "watch": "watch",
}
"""What a task may honour, and how a user asks for it."""


ROLLED_BACK = "rolled back to"
"""Begins the reason of a result that was undone."""


class Task(ABC):
    """A kind of data: what one site of it holds, and how its results are finished, scored and taken up again.

    Args:
        site: where the data come from.
        pipeline: classes, preprocessing and reports.
        trained: what the weights were trained on, if their card says so.
        wanted: what the run asks for beyond the usual: ``probs``, ``uncertainty``.

    Attributes:
        corrections: corrected masks that take part, by case; set by the plan.
        unit: what goes through the network together.
        item: what is counted, in the singular.
        metric: headline metric, a name of the registry of metrics.
        background: whether class 0 counts as a class like any other.
        spatial: number of spatial axes of an image.
        honours: names of ``OPTIONS`` that mean something here; the rest is refused by name.
        instead: what to do instead, by option that is refused.
        smallest_batch: the smallest batch that can be learned from.
        joins: whether several passes over a site cut batches across units.
        seeded: whether the seed draws the order of the units.
        links: whether the weights after each unit are kept, so that a run can go back to any of them.
        keep_every: seconds between two savings of the state of a stream; 0 saves it after every unit.
        ahead: units read ahead.
        reports: names of the reports that a pipeline has by default.
        always: names of the reports that belong to the output and are always written.
        result: the class of the records.
    """

    unit: ClassVar[str] = "case"
    item: ClassVar[str] = "case"
    metric: ClassVar[str] = "dice"
    background: ClassVar[bool] = False
    spatial: ClassVar[int] = 2
    honours: ClassVar[frozenset[str]] = frozenset(("reset-case",))
    instead: ClassVar[Mapping[str, str]] = {}
    smallest_batch: ClassVar[int] = 1
    joins: ClassVar[bool] = True
    seeded: ClassVar[bool] = False
    links: ClassVar[bool] = False
    keep_every: ClassVar[float] = 0.0
    ahead: ClassVar[int] = 1
    reports: ClassVar[tuple[str, ...]] = ("table", "calibration", "tensorboard", "html")
    always: ClassVar[tuple[str, ...]] = ()
    result: ClassVar[Any] = CaseResult

    def __init__(
        self,
        site: SiteConfig,
        pipeline: PipelineConfig,
        trained: Acquisition | None = None,
        wanted: Collection[str] = (),
    ) -> None:
        self.site, self.pipeline, self.trained = site, pipeline, trained
        self.wanted = frozenset(wanted)
        self.corrections: Mapping[str, Any] = {}
        self.prepare()

    def prepare(self) -> None:  # noqa: B027 - optional hook
        """Check the pipeline and get ready; called once.

        Raises:
            ConfigError: the pipeline lacks something that this task needs.
        """

    # ------------------------------------------------------------ what a task must say

    @abstractmethod
    def find(self, volumes: Path, others: Sequence[SiteConfig]) -> Items:
        """Return the items of the site, unread. References stay paths, torch is not imported.

        Args:
            volumes: a folder, or one file.
            others: the other sites of the pipeline, whose files are not this one's.

        Raises:
            DataError: nothing there, or nothing that can be an item.
        """

    @abstractmethod
    def load(self, ref: Ref) -> Unit:
        """Read and prepare one unit.

        Raises:
            DataError: it cannot be used.
        """

    @abstractmethod
    def finish(self, folder: RunFolder, unit: Unit, outcome: Outcome | None) -> Any:
        """Make the results of a unit out of probabilities and write them whole or not at all.

        Args:
            folder: the output folder.
            unit: as loaded.
            outcome: what the predictor said; None where the unit has no images.

        Returns:
            The task's own record of what was made, for :meth:`score` and :meth:`view`.
        """

    @abstractmethod
    def score(self, unit: Unit, finished: Any) -> list[Any]:
        """Return one record per item. Labels are read here and nowhere before."""

    # ------------------------------------------------------------ what has a default

    def as_scaled(self, unit: Unit) -> PipelineConfig:
        """Return the pipeline with the scaling of intensities that was chosen for a unit."""
        return self.pipeline

    def overview(self, items: Items) -> dict[str, Any]:
        """Return what a preview says of the items as a whole, as plain values."""
        return {}

    def refs(self, items: Items, seed: int, size: int) -> Sequence[Ref]:
        """Return every unit in order, unread.

        Args:
            items: of the site.
            seed: of the run.
            size: items per unit, where the task is free to choose.
        """
        return [Ref(name, (name,), name) for name in items.names]

    def named(self, ref: Ref) -> str:
        """Return how messages call a unit."""
        return ref.name

    def corrected(self, folder: Path, items: Items) -> Mapping[str, Any]:
        """Return the corrected masks in a folder by case, checked; without torch."""
        raise ConfigError(self.refusal("corrections"))

    def renamed(
        self, items: Items, corrections: Mapping[str, Any], request: RunRequest
    ) -> tuple[Items, Mapping[str, Any], Pseudonyms]:
        """Return items and corrections under pseudonyms, in the order of these, and the pseudonyms."""
        raise ConfigError(self.refusal("anonymise"))

    def supervision(self, refs: Sequence[Ref], predictor: Predictor) -> Supervision:
        """Return what lets the corrected cases among ``refs`` take part in the updates of a method."""
        raise ConfigError(self.refusal("corrections"))

    def check(self, ref: Ref) -> Check:
        """Return what is found of a unit of one item, without running anything."""
        try:
            unit = self.load(ref)
        except TeslaMedError as error:
            return Check(ref.name, None, None, None, (str(error),))
        shape = None if unit.images is None else tuple(unit.images.shape[2:])
        return Check(ref.name, shape, None, None, tuple(unit.failed.values()), unit.notes)

    def expected(self, ref: Ref, unit: Unit | None, problem: str) -> list[ItemEstimate]:
        """Return what the items of a unit would be in a run.

        Args:
            ref: the unit.
            unit: as loaded; None where it cannot be.
            problem: why not.
        """
        images = None if unit is None else unit.images
        count = 0 if images is None else images.shape[0]
        return [ItemEstimate(name, None, count, False, problem) for name in ref.items]

    def failed(self, ref: Ref, reason: str) -> list[Any]:
        """Return the records of a unit that has no result."""
        return [
            CaseResult(case=name, site=self.site.id, status="failed", used=None, reason=reason)
            for name in ref.items
        ]

    def lost(self, folder: RunFolder, ref: Ref, error: Exception) -> list[Any]:
        """Return the records of a unit that ended with an error, none of whose files is left."""
        from tesla_med.prepare.stream import named_error

        log.info("%s: failed", ref.name)
        self.discard(folder, ref)
        return self.failed(ref, str(named_error(self.named(ref), error)))

    def view(self, unit: Unit, finished: Any) -> CaseView | None:
        """Return what reports may draw, valid during the call only."""
        return None

    def view_again(self, folder: RunFolder, ref: Ref) -> CaseView | None:
        """Return the same of a unit of an earlier attempt, read from disk; None if it cannot be."""
        return None

    def intact(self, folder: RunFolder, ref: Ref, records: Sequence[Any], digest: str) -> bool:
        """Whether a unit need not be done again: its input is the same, its results can be read."""
        return True

    def discard(self, folder: RunFolder, ref: Ref) -> None:
        """Remove every file of a unit, so that none of an earlier attempt is mistaken for a new one."""
        folder.discard(ref.name)

    def started(self, folder: RunFolder) -> None:  # noqa: B027 - optional hook
        """Write what goes with the results of every run."""

    def undo(self, folder: RunFolder, records: Sequence[Any], where: str) -> list[Any]:
        """Give the items of one unit the unadapted model's results, and return their records anew.

        Args:
            folder: of the run.
            records: of the unit, in order.
            where: what was gone back to, in words.
        """
        raise ConfigError(self.refusal("rollback"))

    def reset_for(self, protocol: Protocol) -> Reset:
        """Return when the state of a method starts afresh under ``protocol``."""
        return self.pipeline.reset_for(protocol)

    def settings(self, items: Items) -> dict[str, Any]:
        """Return what must be the same for a run to be resumed, beyond what every task has."""
        return {
            "cases": list(items.names),
            "save_probs": "probs" in self.wanted,
            "save_uncertainty": "uncertainty" in self.wanted,
            **self._corrected(),
        }

    def _corrected(self) -> dict[str, Any]:
        """Return the hash of every corrected case with its image, under ``corrections``; {} without any."""
        found = {name: item.sha256 for name, item in self.corrections.items()}
        return {"corrections": found} if found else {}

    def names(self, settings: Mapping[str, Any], folder: RunFolder) -> tuple[str, ...]:
        """Return the names of the units of a run, in order, from its settings or its records."""
        return tuple(str(name) for name in settings["cases"])

    def predicted(self, results: Sequence[Any]) -> Predicted:
        """Return how often each class is predicted."""
        from tesla_med.scoring.predicted import predicted_cases

        return predicted_cases(results, self.pipeline)

    def counted(self, results: Sequence[Any]) -> dict[str, Any]:
        """Return what run.json says of the classes that are predicted."""
        found = self.predicted(results)
        return {"predicted": found.counts, "remarks": list(found.remarks)}

    def account(self, items: Items, results: Sequence[Any]) -> dict[str, Any]:
        """Return what run.json says of the items."""
        return {
            "order": CASE_ORDER,
            "skipped": [{"file": path.name, "reason": reason} for path, reason in items.skipped],
            "cases": [item.brief() for item in results],
            **self._corrected(),
            **self.counted(results),
        }

    def account_again(self, content: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """Return what run.json says of the items, after their records have changed.

        Args:
            content: of run.json so far.
            results: the records now.
        """
        return {"cases": [item.brief() for item in results], **self.counted(results)}

    def counts(self, results: Sequence[Any]) -> list[Mapping[str, Any]]:
        """Return calibration counts, to be given to :func:`tesla_med.scoring.summary.merge`."""
        return [item.calibration for item in results if item.calibration is not None]

    def notes(self) -> tuple[str, ...]:
        """Return remarks that hold for every item of the site."""
        return ()

    def labelled(
        self, sites: Sequence[SiteConfig], volumes: Path, progress: Progress | None = None
    ) -> LabelledSource:
        """Return what a source model can be trained on.

        Raises:
            ConfigError: this task cannot train.
        """
        raise ConfigError(f"training is not for {self.item}s of task {self.pipeline.task!r}")

    # ------------------------------------------------------------ evaluating finished results

    @classmethod
    def recognises(cls, predictions: Path) -> bool:
        """Whether ``predictions`` is a result of this task that :meth:`evaluate` can read."""
        return False

    @classmethod
    def evaluate(cls, predictions: Path, references: Path | None, **options: Any) -> Any:
        """Score finished results, whoever made them.

        Raises:
            ConfigError: this task cannot.
        """
        raise ConfigError("evaluate: not for this task")

    # ------------------------------------------------------------ comparing runs

    def recount(self, items: Items, runs: Mapping[Any, RunFolder]) -> Iterator[dict[Any, CalibrationCounts]]:
        """Yield calibration counts by run, of voxels or items that are the same for all runs.

        Args:
            items: of the site.
            runs: finished runs on it that kept their probabilities, by whatever names them.
        """
        yield from ()

    def rows(self, folder: RunFolder) -> Iterator[dict[str, Any]]:
        """Yield the rows of a comparison that a finished run gives."""
        from tesla_med.tasks._rows import rows_of

        yield from rows_of(folder, self.names(folder.read()["settings"], folder), self.result)

    # ------------------------------------------------------------ refusing

    @classmethod
    def refuse(cls, asked: Collection[str]) -> None:
        """Refuse options that mean nothing here.

        Raises:
            ConfigError: names the option and what to do instead.
        """
        for option in sorted(set(asked) - cls.honours):
            raise ConfigError(cls.refusal(option))

    @classmethod
    def refusal(cls, option: str) -> str:
        """Return the message that refuses an option."""
        instead = cls.instead.get(option, "leave it out")
        return f"{OPTIONS[option]}: not for {cls.item}s; {instead}"


def task_of(pipeline: PipelineConfig) -> type[Task]:
    """Return the task of a pipeline.

    Raises:
        ConfigError: no such task.
    """
    try:
        return TASKS.get(pipeline.task)
    except ConfigError as error:
        raise ConfigError(f"pipeline {pipeline.name}: {error}") from None
