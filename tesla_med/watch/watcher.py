"""The loop: look through the folder, take up what has settled, keep what became of it, tell people."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tesla_med.adapt import run_plan
from tesla_med.config.paths import user_path
from tesla_med.config.resolve import other_sites
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.files import sha256_of
from tesla_med.io.locks import output_lock
from tesla_med.io.names import fold
from tesla_med.plan import Plan, RunRequest, open_plan, resolve_request
from tesla_med.prepare.stream import named_error
from tesla_med.runs.folder import RUN_FILE
from tesla_med.scoring.text import some
from tesla_med.types import UPDATES_OF, Items, Progress
from tesla_med.watch.board import Board
from tesla_med.watch.drift import LEAST, REFERENCE, WINDOW, Drift, find_drifts
from tesla_med.watch.history import History, Seen, seen_of
from tesla_med.watch.inbox import Found, Inbox
from tesla_med.watch.page import Shown, drift_text, write_page
from tesla_med.watch.statistics import NAMES, image_statistics

log = logging.getLogger(__name__)
POLL, SETTLE = 30.0, 30.0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Watched:
    """What a watch did, and what it leaves.

    Attributes:
        out: output folder.
        done: cases done now.
        seen: cases done in all, in the order in which they were.
        aside: cases that cannot be done as they are, with the reason.
        waiting: names of cases whose files had not settled.
        reports_failed: of cases done now, reports that could not be made, with the reason.
        lone: names of cases that wait as they are named as masks of images that are not there.
        changed: names of cases whose image has changed since it was done.
        drifts: figures that have drifted, the latest first.
        stopped: whether it was asked to stop.
        problem: why the folder could not be looked through the last time, or "".
    """

    out: Path
    done: tuple[Seen, ...]
    seen: tuple[Seen, ...]
    aside: dict[str, str]
    waiting: tuple[str, ...]
    changed: tuple[str, ...]
    drifts: tuple[Drift, ...]
    stopped: bool = False
    problem: str = ""
    lone: tuple[str, ...] = ()
    reports_failed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the folder could be looked through, nothing is set aside, and every report is made."""
        return not (self.aside or self.problem or self.reports_failed)


def watch_folder(
    request: RunRequest,
    *,
    once: bool = False,
    poll: float = POLL,
    settle: float = SETTLE,
    reference: int = REFERENCE,
    window: int = WINDOW,
    progress: Progress = lambda *_: None,
    tell: Tell = lambda _: None,
) -> Watched:
    """Adapt to every case that comes into a folder, once, each on its own (reset ``case``).

    Ctrl-C ends it, and the command's SIGTERM, too; whatever ends it, the same call goes on.

    Args:
        request: as for a run on the folder ``volumes``; ``out`` is that of the watch, ``reset`` is not used.
        once: do what is there and return.
        poll: seconds between two looks.
        settle: seconds for which the files of a case must not have changed.
        reference: cases with which later ones are compared; see :mod:`tesla_med.watch.drift`.
        window: latest cases that are compared.
        progress: called as the work on a case goes on.
        tell: called with a line on everything that happens.

    Raises:
        ConfigError: as for a run; or the task has no cases that stand on their own.
        DataError: the folder is not there at the start.
        CheckpointError: as for a run.
        OutputError: the output folder is in use, was begun with other settings, or cannot be written.
    """
    for option, value in (("--reference", reference), ("--window", window)):
        if value < LEAST:
            raise ConfigError(f"{option} {value}: a drift can be told from chance with {LEAST} cases or more")
    plan = _open(request)
    folder = user_path(request.volumes)
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; create or mount it, or give the one to watch")
    others = other_sites(plan.site) if request.site is not None else []
    inbox = Inbox(folder, plan.site, others, plan.pipeline.channels, settle)
    with output_lock(plan.out, request.lock):
        watcher = _Watcher(plan, inbox, (reference, window), progress, tell)
        return watcher.watch(once=once, poll=poll)


def _open(request: RunRequest) -> Plan:
    """Return the plan of a run without cases: the model is loaded once."""
    resolved = resolve_request(replace(request, reset=None), find=False)
    resolved.task.refuse({"watch"})
    plan = open_plan(replace(request, reset="case"), resolved)
    if request.out is None:
        plan = replace(plan, out=Path("runs") / plan.site.id / "watch")
    for text in plan.notes:
        log.info("%s", text)
    return plan


class _Watcher:
    def __init__(
        self, plan: Plan, inbox: Inbox, drift: tuple[int, int], progress: Progress, tell: Tell
    ) -> None:
        self.plan, self.inbox, self.drift = plan, inbox, drift
        self.progress, self.tell = progress, tell
        self.history = History(plan.out)
        settings = {key: value for key, value in plan.settings().items() if key != "cases"}
        self.history.open(settings, {key: plan.manifest()[key] for key in ("notice", "terms", "versions")})
        self.seen = {item.case: item for item in self.history.read()}
        self.board = Board(plan.out, list(self.seen.values()))
        self.aside: dict[str, tuple[str, str]] = {}
        self.changed: dict[str, str] = {}
        self.waiting: tuple[str, ...] = ()
        self.lone: tuple[str, ...] = ()
        self.reports_failed: dict[str, Mapping[str, str]] = {}
        self.drifts: list[Drift] = []
        self._before = frozenset(self.seen)
        self._where = self.inbox.top = self.history.where(inbox.folder)
        self.problem, self.once = "", False
        self._published: Any = None

    def watch(self, *, once: bool, poll: float) -> Watched:
        """Work until there is nothing left to do, or for ever."""
        stopped, settle, self.once = False, self.inbox.settle, once
        self._follow_drifts(say=False)
        try:
            if once:
                self._once(settle)
            while not once:
                if not self._round():
                    time.sleep(min(settle, poll) if self.waiting else poll)
        except KeyboardInterrupt:
            stopped = True
            self.seen = {item.case: item for item in self.history.read()}
        finally:
            self.board.close()
        self._publish()
        return Watched(
            out=self.plan.out,
            done=tuple(item for item in self.seen.values() if item.case not in self._before),
            seen=tuple(self.seen.values()),
            aside={name: reason for name, (_, reason) in self.aside.items()},
            waiting=self.waiting,
            changed=tuple(self.changed),
            drifts=tuple(self.drifts),
            stopped=stopped,
            problem=self.problem,
            lone=self.lone,
            reports_failed=self.reports_failed,
        )

    def _once(self, settle: float) -> None:
        """Do what is there, with what settles in the time that this takes."""
        self._round()
        if self.waiting:
            time.sleep(settle)
        while self._round():
            pass

    # ------------------------------------------------------------ one look

    def _round(self) -> bool:
        """Look through the folder, do what has settled; return whether anything was done."""
        now = time.monotonic()
        try:
            found = self._look(now)
        except DataError as error:  # a share that is away for a while
            self._note_problem(str(error))
            self._publish()
            return False
        self._note_problem("")
        names = {item.case.name for item in found}
        self.aside = {name: about for name, about in self.aside.items() if name in names}
        self.changed = {name: state for name, state in self.changed.items() if name in names}
        todo, waiting, lone = [], [], []
        for item in found:
            if item.case.name in self.seen and not item.case.problem:
                self._compare(item)
            elif self.aside.get(item.case.name, ("", ""))[0] == item.state:
                continue
            elif item.lone:
                lone.append(item.case.name)
            elif self.inbox.settled(item, now):
                todo.append(item)
            else:
                waiting.append(item.case.name)
        self.waiting, self.lone = tuple(waiting), tuple(lone)
        self._publish()
        before = len(self.seen), len(self.aside)
        for item in todo:
            self._do(item)
            self._publish()
        return bool(todo) and before != (len(self.seen), len(self.aside))

    def _look(self, now: float) -> list[Found]:
        """Look through the folder; say what is not looked at, and keep which folder it was."""
        inbox, before = self.inbox, self.inbox.beside
        found = inbox.look(now)
        if inbox.top is not None and inbox.top != self._where:
            self.history.keep_where(inbox.folder, inbox.top)
            self._where = inbox.top
        if new := [path.name for path in inbox.beside if path not in before]:
            self.tell(f"Not looked at, as {inbox.top} is the folder of the site: {some(new)} beside it")
        return found

    def _note_problem(self, text: str) -> None:
        if text != self.problem:
            self.problem = text
            again = "" if self.once else "; trying again"
            self.tell(f"Cannot look: {text}{again}" if text else "Looking again")

    def _compare(self, item: Found) -> None:
        """See whether a case that is done has another image now: it is named, and not done again."""
        name = item.case.name
        self.aside.pop(name, None)
        seen = self.seen[name]
        if item.state == seen.state:
            self.changed.pop(name, None)
        if item.state in (seen.state, self.changed.get(name)):
            return
        try:
            same = sha256_of(item.case.files) == seen.input_sha256
        except DataError:
            return  # being replaced at this moment: the next look tells
        if same:
            self._keep(seen.model_copy(update={"state": item.state}))
            self.changed.pop(name, None)
        else:
            self.changed[name] = item.state
            self.tell(f"{name}: has changed since it was done; not done again: give a new image a new name")

    # ------------------------------------------------------------ one case

    def _do(self, item: Found) -> None:
        """Do one case; whatever is wrong with it, the others go on."""
        name = item.case.name
        try:
            if not item.case.problem:
                self._refuse_nested(name)
            volume, digest = self.inbox.read(item)
            statistics = image_statistics(volume)
        except Exception as error:
            self._set_aside(item, str(named_error(str(item.case.image), error)))
            return
        if not self.inbox.unchanged(item):
            return  # still being written: it has to settle again
        items = Items(self.plan.items.folder, (name,), (), (item.case,))
        plan = replace(self.plan, items=items, out=self.history.run(name))
        result = run_plan(plan, resume=True, progress=self._updates)
        (record,) = result.results
        if record.status == "failed":
            self._set_aside(item, record.reason)
            return
        if record.input_sha256 != digest or not self.inbox.unchanged(item):
            log.info("%s: changed while it was worked on; it is taken up again", name)
            return
        number = 1 + max((seen.number for seen in self.seen.values()), default=-1)
        seen = seen_of(number, item.state, _now(), record, statistics)
        self._keep(seen)
        self.aside.pop(name, None)
        self.board.add(seen)
        self._follow_drifts()
        score = "" if seen.predicted_dice is None else f", predicted Dice {100 * seen.predicted_dice:.1f} %"
        self.tell(f"{name}: {seen.verdict}{score}, {seen.seconds:.0f} s")
        if result.reports_failed:
            self.reports_failed[name] = dict(result.reports_failed)
        for report, reason in result.reports_failed.items():
            remedy = f"the mask is complete; once {self.history.done(name)} is removed, it is made again"
            self.tell(f"{name}: report {report} not made: {reason}; {remedy}")

    def _updates(self, stage: str, done: int, total: int) -> None:
        """Pass on progress within a case."""
        if stage.startswith(UPDATES_OF):
            self.progress(stage, done, total)

    def _refuse_nested(self, name: str) -> None:
        """Refuse a case whose run would lie in that of another, or hold it, or be one and the same.

        Raises:
            DataError: it is so.
        """
        for seen in self.seen:
            if fold(seen) == fold(name):
                raise DataError(f"{name}: {seen} was done before, whose name differs in case only; rename it")
        run, top = self.history.run(name), self.history.run("")
        above = [path for path in run.parents if path.is_relative_to(top) and (path / RUN_FILE).is_file()]
        holds = run.is_dir() and not (run / RUN_FILE).is_file() and any(run.rglob(RUN_FILE))
        if above or holds:
            other = above[0].relative_to(top).as_posix() if above else ""
            where = f"lie in that of {other}" if above else "hold those of other cases"
            raise DataError(f"{name}: its run would {where}; rename the folder")

    def _set_aside(self, item: Found, reason: str) -> None:
        self.aside[item.case.name] = (item.state, reason)
        self.tell(f"Set aside: {item.case.name}: {reason}; it is tried again when it changes")

    def _keep(self, seen: Seen) -> None:
        self.history.keep(seen)
        self.seen[seen.case] = seen

    # ------------------------------------------------------------ what people see

    def _follow_drifts(self, *, say: bool = True) -> None:
        """Look for drifts after a case, and say what is new."""
        before = {item.name for item in self.drifts if item.present}
        self.drifts = find_drifts(figures_of(list(self.seen.values())), *self.drift)
        for item in self.drifts:
            if say and item.present and item.name not in before:
                self.tell(f"Drift: {drift_text(item, self.drift[1])}")

    def _publish(self) -> None:
        """Write the table and the page, if they say anything new."""
        seen = list(self.seen.values())
        state = (
            len(seen),
            dict(self.aside),
            self.waiting,
            self.lone,
            tuple(self.changed),
            self.inbox.skipped,
            self.problem,
        )
        if state == self._published:
            return
        self.history.write_table(seen)
        shown = Shown(
            seen=seen,
            figures=figures_of(seen),
            aside={name: reason for name, (_, reason) in self.aside.items()},
            waiting=self.waiting,
            lone=self.lone,
            changed=tuple(self.changed),
            skipped=self.inbox.skipped,
            drifts=self.drifts,
            periods=self.drift,
            problem=self.problem,
        )
        write_page(self.plan, self.history, self.inbox.folder, shown)
        self._published = state


def figures_of(seen: Sequence[Seen]) -> dict[str, list[float | None]]:
    """Return what is tested for drift: figures of the images, and the predicted Dice."""
    found: dict[str, list[float | None]] = {
        name: [item.statistics.get(name) for item in seen] for name in NAMES
    }
    return found | {"predicted_dice": [item.predicted_dice for item in seen]}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
