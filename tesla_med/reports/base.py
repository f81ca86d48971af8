"""What a report is: hooks called while a run goes on, and files at its end."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.registry import Registry
from tesla_med.types import CaseResult, CaseView

REPORTS: Registry[type[Report]] = Registry("report", "tesla_med.reports")
REPORT_FOLDER = "report"


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
        notes: remarks that hold for every case, such as where the region of interest comes from.
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

    @property
    def report_folder(self) -> Path:
        """Folder of the files written at the end; made on first use."""
        folder = self.out / REPORT_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Report(ABC):
    """One kind of output. Hooks are called in the order start, step and case, finish.

    Attributes:
        name: the name it is registered and chosen by.
        summary: one line that says what it writes.
        run: the run, from :meth:`start` on.
    """

    name: str = ""
    summary: str = ""
    run: RunContext

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

    def finish(self, results: Sequence[CaseResult]) -> list[Path]:
        """Write what is left to write and release every file.

        Args:
            results: every case of the run in order, those taken over from an earlier run too.

        Returns:
            The files written.
        """
        return []

    def close(self) -> None:  # noqa: B027 - optional hook
        """Release every file; called instead of :meth:`finish` where a run breaks off."""


def make_reports(names: Sequence[str], run: RunContext) -> list[Report]:
    """Return started reports, one for each distinct name, in the order given.

    Raises:
        ConfigError: an unknown name.
    """
    reports = [REPORTS.get(name)() for name in dict.fromkeys(names)]
    for report in reports:
        report.start(run)
    return reports
