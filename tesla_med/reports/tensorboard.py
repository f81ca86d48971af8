"""``tensorboard/``: the headline metric, losses, policy, entropy and pictures as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.io.names import valid
from tesla_med.records import CaseResult, TileResult
from tesla_med.reports import _hparams, _policy
from tesla_med.reports._curves import CURVES, LAST_OF_CASE
from tesla_med.reports.base import REPORTS, Report, RunContext
from tesla_med.types import CaseView, Earlier

FOLDER = "tensorboard"


@REPORTS.register("tensorboard")
class TensorboardReport(Report):
    """Events for TensorBoard; the step of a case is its number in the run, from 0."""

    name = "tensorboard"
    summary = "TensorBoard events: headline metric per case or batch, losses, policy, pictures"
    kinds = (CaseResult, TileResult)
    from_records = False  # losses and overlays are not in the records
    draws = True

    def __init__(self) -> None:
        self._first = 0
        self._losses: dict[str, list[Any]] = {}
        self._replaced: list[Path] = []
        self._policy = _policy.PolicyHistory()

    @classmethod
    def renew(cls, run: RunContext, units: Sequence[Sequence[Any]], undone: Sequence[str]) -> None:
        """Write the events anew: losses and overlays of what stands stay, figures come from the records."""
        folder = run.out / FOLDER
        files = sorted(folder.glob("events.out.tfevents.*"))
        if not files or not undone:
            return
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from torch.utils.tensorboard import SummaryWriter

        curves = _curves_of(run)
        gone = (*curves.own(), *(f"overlay/{valid(name)}" for name in undone))
        kept = _events(files)
        for path in files:
            path.unlink()
        writer = EventFileWriter(str(folder))
        for event in kept:
            values = [item for item in event.summary.value if not _is_of(item.tag, gone)]
            if event.HasField("summary"):
                del event.summary.value[:]
                event.summary.value.extend(values)
            if values or event.HasField("file_version"):
                writer.add_event(event)
        writer.close()
        again = SummaryWriter(str(folder), filename_suffix=".renewed")
        drawn = curves(run, again)
        for unit in units:
            drawn.unit(unit, None)
        drawn.finish([item for unit in units for item in unit])
        again.close()

    def resume(self, run: RunContext, earlier: Earlier) -> None:
        """Take up the losses of the updates that stand; all else is written anew, from the records."""
        self._replaced = sorted((run.out / FOLDER).glob("events.out.tfevents.*"))
        own = (*_curves_of(run).own(), "overlay/", "run", _policy.PICTURE, _hparams.PREFIX)
        waiting = dict[tuple[str, int], Any]()
        for event in _events(self._replaced):
            for value in event.summary.value:
                if not _is_of(value.tag, own):
                    waiting[value.tag, event.step] = event
                elif value.tag == LAST_OF_CASE and event.step < len(run.names):
                    self._losses[run.names[event.step]] = list(waiting.values())
                    waiting = {}
        if earlier.steps is None:  # the losses of units that are done again have no part in the run
            self._losses = {name: found for name, found in self._losses.items() if name in earlier.items}
        else:
            every = [*(item for found in self._losses.values() for item in found), *waiting.values()]
            stand = [event for event in every if event.step < earlier.steps]
            self._losses = {"": list({_key(event): event for event in stand}.values())}
        if earlier.steps is None:
            known = (event.step for found in self._losses.values() for event in found)
            self._first = 1 + max(known, default=-1)

    def start(self, run: RunContext) -> None:
        """Open the event file; it replaces those of an earlier attempt."""
        from torch.utils.tensorboard import SummaryWriter

        super().start(run)
        self._writer: Any = SummaryWriter(str(run.out / FOLDER))
        self._curves = _curves_of(run)(run, self._writer)
        self._write_again("")
        for path in self._replaced:
            path.unlink(missing_ok=True)
        title = f"{run.site.id} ({run.site.institution}), {run.method}, {run.protocol}, seed {run.seed}"
        self._writer.add_text("run", "  \n".join([title, *run.notes]), 0)
        self._add(_hparams.started(run))

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write every value under its tag; those of the policy are for its picture."""
        number = self._first + step
        others, policy = self._policy.take(number, scalars)
        if policy is not None:
            self._add([policy], number)
        for tag, value in others.items():
            self._writer.add_scalar(tag, value, number)

    def _add(self, summaries: Sequence[Any], step: int = 0) -> None:
        for summary in summaries:
            self._writer.file_writer.add_summary(summary, step)

    def _write_again(self, name: str) -> None:
        for event in self._losses.pop(name, ()):
            self._policy.take_again(event)
            self._writer.file_writer.event_writer.add_event(event)

    def _draw_policy(self) -> None:
        picture, last = self._policy.picture(), max(self._policy.steps)
        self._writer.add_image(_policy.PICTURE, picture, last, dataformats="HWC")

    def unit(self, records: Sequence[Any], view: CaseView | None) -> None:
        """Write the figures of one unit."""
        for record in records:
            self._write_again(record.case)
        self._curves.unit(records, view)
        if self._policy.due():
            self._draw_policy()
        self._writer.flush()

    def finish(self, results: Sequence[Any]) -> list[Path]:
        """Write the final figures and close the event file."""
        self._curves.finish(results)
        if self._policy.changed():
            self._draw_policy()
        self._add(_hparams.finished())
        self._writer.close()
        folder = Path(self._writer.log_dir)
        return sorted(folder.glob("events.out.tfevents.*"))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _curves_of(run: RunContext) -> Any:
    return next(made for kind, made in CURVES.items() if issubclass(run.kind, kind))


def _events(files: Sequence[Path]) -> list[Any]:
    """Return the events of these files, as far as they can be read."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    return [event for path in files for event in LegacyEventFileLoader(str(path)).Load()]


def _key(event: Any) -> tuple[Any, ...]:
    return (event.step, *(value.tag for value in event.summary.value))


def _is_of(tag: str, names: Sequence[str]) -> bool:
    """Whether a tag is one of these, or below one that ends in a slash."""
    plain = tag.removesuffix("/text_summary")
    return any(plain.startswith(name) if name.endswith("/") else plain == name for name in names)
