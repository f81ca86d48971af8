"""What a report is: hooks called while a run goes on, and files at its end."""

from __future__ import annotations

import logging
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.engine.stages import stage
from tesla_med.errors import ConfigError, TeslaMedError
from tesla_med.records import CaseResult
from tesla_med.registry import Registry
from tesla_med.types import CaseView, Earlier, Progress

if TYPE_CHECKING:
    from tesla_med.plan import Plan

log = logging.getLogger(__name__)
REPORTS: Registry[type[Report]] = Registry("report", "tesla_med.reports", "tesla_med.reports")
REPORT_FOLDER = "report"
Step: TypeAlias = tuple[int, Mapping[str, float]]
"""Number and scalars of an update."""
Counts: TypeAlias = Callable[[Sequence[Any]], list[Mapping[str, Any]]]


def counts_of(results: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Return the calibration counts that records hold."""
    return [item.calibration for item in results if item.calibration is not None]


@dataclass(frozen=True)
class RunContext:
    """What a report knows of the run before the first case.

    Attributes:
        out: output folder of the run.
        site: the site.
        pipeline: the pipeline.
        method: name of the method.
        protocol: N-O, N-M, Y-O or Y-M.
        seed: seed of the run.
        reset: when the method starts afresh: never, site or case.
        manifest: what is needed to repeat the run (versions, device, hash of the weights,
            resolved settings); JSON-able, may be nested.
        notes: remarks that apply to every case, such as where the region of interest comes from.
        folder: the folder that names of items are relative to.
        names: of all items, in the order of the run.
        kind: class of the records.
        item: what the records are of, in the singular.
        counts: gives the calibration counts of records.
    """

    out: Path
    site: SiteConfig
    pipeline: PipelineConfig
    method: str
    protocol: str
    seed: int
    reset: str
    manifest: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    folder: Path = Path()
    names: tuple[str, ...] = ()
    kind: Any = CaseResult
    item: str = "case"
    counts: Counts = counts_of

    @property
    def report_folder(self) -> Path:
        """Folder of the files written at the end; made on first use."""
        folder = self.out / REPORT_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def context_of(plan: Plan) -> RunContext:
    """Return what reports know of a run before its first unit."""
    return RunContext(
        *(plan.out, plan.site, plan.pipeline, plan.method, plan.protocol, plan.seed, plan.reset),
        manifest=plan.manifest(),
        notes=plan.notes,
        folder=plan.items.folder,
        names=plan.items.names,
        kind=plan.task.result,
        item=plan.task.item,
        counts=plan.task.counts,
    )


class Report(ABC):
    """One kind of output. Hooks are called in the order start, step and case, finish.

    Attributes:
        name: the name it is registered and chosen by.
        summary: one line that says what it writes.
        kinds: classes of the records that it can read.
        from_records: whether it can be made again from records alone.
        draws: whether it needs the arrays of a case.
        run: the run, from :meth:`start` on.
    """

    name: str = ""
    summary: str = ""
    kinds: ClassVar[tuple[type, ...]] = (CaseResult,)
    from_records: ClassVar[bool] = True
    draws: ClassVar[bool] = False
    run: RunContext

    @classmethod
    def reads(cls, kind: type) -> bool:
        """Whether the report is for records of this class."""
        return issubclass(kind, cls.kinds)

    @classmethod
    def renew(cls, run: RunContext, units: Sequence[Sequence[Any]], undone: Sequence[str]) -> None:
        """Drop what describes undone results, where a report cannot be made again from records.

        Args:
            run: the run.
            units: the records now, unit by unit.
            undone: items whose results are the source model's now.
        """
        return

    def resume(self, run: RunContext, earlier: Earlier) -> None:
        """Prepare to go on after an interrupted attempt; called before :meth:`start`.

        Args:
            run: the run.
            earlier: what of that attempt stays; its units are handed over once more after the start.
        """
        return

    def start(self, run: RunContext) -> None:
        """Get ready. :func:`make_reports` calls it."""
        self.run = run

    def step(self, step: int, scalars: Mapping[str, float]) -> None:  # noqa: B027 - optional hook
        """Take note of one step of adaptation.

        Args:
            step: number of the step, from 0, rising over the whole run.
            scalars: values by tag, for example ``loss/total``,
                ``policy/probability/<sub-policy>``, ``policy/magnitude/<op>``.
        """

    def case(self, result: CaseResult, view: CaseView | None) -> None:  # noqa: B027 - optional hook
        """Take note of one finished case.

        Args:
            result: what happened to it.
            view: its arrays, valid during the call only; None where there are none to draw
                (failed, or taken over from an earlier run).
        """

    def unit(self, records: Sequence[Any], view: CaseView | None) -> None:
        """Take note of the items of one finished unit: by default of each on its own."""
        for record in records:
            self.case(record, view)

    def finish(self, results: Sequence[Any]) -> list[Path]:
        """Write what is left to write and release every file.

        Args:
            results: every case of the run in order, those taken over from an earlier run too.

        Returns:
            The files written.
        """
        return []

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release every file; called instead of :meth:`finish` where a run breaks off."""


class Reports:
    """The reports of one run. One that raises is closed and left out from then on; the run goes on.

    As a context manager it closes their files where the run breaks off.

    Attributes:
        failed: why a report could not be made, by its name.
    """

    def __init__(self) -> None:
        self._all: dict[str, Report] = {}
        self._steps: list[Step] = []
        self.failed: dict[str, str] = {}

    @contextmanager
    def started(
        self, names: Sequence[str], run: RunContext, earlier: Earlier | None = None
    ) -> Iterator[Reports]:
        """Start one report for each distinct name, in the order given.

        Args:
            names: of the reports.
            run: the run.
            earlier: what an interrupted attempt did, where the run goes on from it.

        Raises:
            ConfigError: an unknown name.
        """
        self._all = {name: REPORTS.get(name)() for name in names}
        if earlier is not None:
            self._tell(lambda report: report.resume(run, earlier))
        self._tell(lambda report: report.start(run))
        try:
            yield self
        except BaseException:
            for report in self._all.values():
                report.close()
            raise

    def renew(
        self, name: str, run: RunContext, units: Sequence[Sequence[Any]], undone: Sequence[str]
    ) -> None:
        """Have a report drop what describes undone results; arguments as of :meth:`Report.renew`."""
        try:
            REPORTS.get(name).renew(run, units, undone)
        except Exception as error:
            self._note(name, error)

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Keep one step of adaptation until :meth:`held` is asked for it."""
        self._steps.append((step, scalars))

    def held(self) -> list[Step]:
        """Return the steps since the last call; they belong to the next unit."""
        found, self._steps = self._steps, []
        return found

    def steps(self, steps: Sequence[Step]) -> None:
        """Tell every report of some steps of adaptation."""
        for number, scalars in steps:
            self._tell(partial(_step, number=number, scalars=scalars))

    def unit(self, records: Sequence[Any], view: CaseView | None, steps: Sequence[Step] = ()) -> None:
        """Tell every report of the steps that led to a unit, and of its items."""
        with stage("report"):
            self.steps(steps)
            self._tell(lambda report: report.unit(records, view))

    def earlier(self, records: Sequence[Any], view: Callable[[], CaseView | None]) -> None:
        """Tell every report of a unit of an earlier attempt; its arrays are read where one of them draws."""
        drawn = view() if any(report.draws for report in self._all.values()) else None
        self.unit(records, drawn, self.held())

    def finish(self, results: Sequence[Any], progress: Progress = lambda *_: None) -> list[Path]:
        """Write everything, and return the files."""
        files: list[Path] = []
        total = len(self._all)

        def write(report: Report) -> None:
            files.extend(report.finish(results))

        for done, name in enumerate(list(self._all)):
            progress("reports", done, total)
            with stage("report"):
                self._try(name, write)
        progress("reports", total, total)
        return files

    def _tell(self, call: Callable[[Report], None]) -> None:
        for name in list(self._all):
            self._try(name, call)

    def _try(self, name: str, call: Callable[[Report], None]) -> None:
        try:
            call(self._all[name])
        except Exception as error:
            self._note(name, error)
            broken = self._all.pop(name)
            with suppress(Exception):
                broken.close()

    def _note(self, name: str, error: Exception) -> None:
        known = str(error) if isinstance(error, TeslaMedError) else ""
        self.failed[name] = known or f"unexpected {type(error).__name__}: {str(error) or 'no details'}"
        log.info("report %s", name, exc_info=error)


def _step(report: Report, number: int, scalars: Mapping[str, float]) -> None:
    report.step(number, scalars)


def make_reports(names: Sequence[str], run: RunContext) -> list[Report]:
    """Return started reports, one for each distinct name, in the order given.

    Raises:
        ConfigError: an unknown name.
    """
    reports = [REPORTS.get(name)() for name in dict.fromkeys(names)]
    for report in reports:
        report.start(run)
    return reports


def reports_of(task: Any, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the reports of a run, those that belong to its output first.

    Args:
        task: says which reports there are by default and always, and of what.
        names: of the reports asked for; None: those of the task.

    Raises:
        ConfigError: an unknown report, or one that is not for this task.
    """
    chosen = tuple(dict.fromkeys((*task.always, *(task.reports if names is None else names))))
    for name in chosen:
        if not REPORTS.get(name).reads(task.result):
            raise ConfigError(f"report {name!r} is not for {task.item}s; leave it out of 'reports'")
    return chosen
