"""Units that do not depend on each other, done by several processes of one machine, one for each card.

Passes over a site (M), after which cases do not depend on each other, are made by all processes together,
each from its share of every batch (``tta/_mechanics/ranks.py``).

The process of the run hands out the units, reads the records as they come, in the order of the run, and draws
the reports, so that everything but the passes is where it is in a run of one process. A worker that ends
before its units are done is told of; what is left is then done in the process of the run.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tesla_med.errors import ConfigError
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring.text import counted
from tesla_med.types import PASSES, Progress, Ref

if TYPE_CHECKING:
    from tesla_med.plan import Plan, RunRequest

log = logging.getLogger(__name__)
CODE = "from tesla_med.actions.spread import work; work()"
THREADS_VARIABLE = "OMP_NUM_THREADS"
_ENDED = "ended"
BREATH = 0.05
"""Seconds between two looks at processes that learn together."""


def visible_cards(device: str) -> list[str]:
    """Return what CUDA_VISIBLE_DEVICES may be set to for one card each; none where the CPU computes.

    No card is touched, so that the process holds no memory on any.
    """
    if device == "cpu" or ":" in device:
        return []
    import torch

    count = torch.cuda.device_count()
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index) for index in range(count)] if given is None else given.split(",")
    return [name.strip() for name in names[:count]]


def spread(plan: Plan, jobs: int | None = None) -> Plan:
    """Return a plan whose units are done by several processes, or the same where one does.

    Args:
        plan: of the run.
        jobs: processes; None: one for each visible card, if there are several and units are independent.

    Raises:
        ConfigError: several processes are asked for, and the units depend on each other in a way that no
            processes can share.
    """
    cards = visible_cards(plan.request.device)
    count = min(len(cards) if jobs is None else jobs, len(plan.refs))
    if (jobs or 1) > 1 and learns_together(plan):
        if plan.device.type != "cpu" and count > len(cards):
            raise ConfigError(
                f"--jobs {count}: processes that learn together need a card each, and {len(cards)} of device "
                f"{plan.request.device} may be used; choose fewer, or --device cuda"
            )
        return replace(plan, elsewhere=Together(plan, count, cards)) if count > 1 else plan
    if not plan.independent and (jobs or 1) > 1:
        raise ConfigError(
            f"--jobs {jobs}: every {plan.task.unit} goes on from the state of the one before (method "
            f"{plan.method}, protocol {plan.protocol}, reset {plan.reset}), so one process must do them all; "
            "leave --jobs out, or choose a recipe with reset: case"
        )
    if count <= 1 or not plan.independent:
        return plan
    return replace(plan, elsewhere=Workers(plan, count, cards))


def learns_together(plan: Plan) -> bool:
    """Whether processes can make the passes of a run over its site together.

    They can if the method says so and cases, not tiles, are passed over, without corrected masks, by a model
    of this project's own form that learns from whole images in a given precision.
    """
    from tesla_med.models.loading import foreign_form
    from tesla_med.tta.base import METHODS

    if not plan.protocol.endswith("M") or plan.independent:
        return False
    usual = plan.task.joins and not plan.task.corrections and plan.pipeline.precision != "auto"
    own = foreign_form(plan.weights) is None and plan.model.patch is None
    return usual and own and METHODS.get(plan.method).joins(plan.params(plan.method))


@dataclass(frozen=True)
class Order:
    """What a worker is asked to do: of the units of a run those with these names, in this order.

    Attributes:
        meeting: where processes that make the passes over the site together meet; None: there are no passes.
        rank: of the worker among them.
        count: of workers.
    """

    request: RunRequest
    out: Path
    names: tuple[str, ...]
    meeting: Path | None = None
    rank: int = 0
    count: int = 1


class Workers:
    """The processes of a run; called with the units to be done, it yields them as they are done, in order.

    Args:
        plan: of the run.
        count: processes.
        cards: what each of them may see, in turn; none where the CPU computes.

    Attributes:
        devices: on how many devices they compute.
    """

    def __init__(self, plan: Plan, count: int, cards: Sequence[str]) -> None:
        self._plan, self._count, self._cards = plan, count, cards
        self.devices = max(1, min(count, len(cards)))

    def __call__(
        self, refs: Sequence[Ref], progress: Progress = lambda *_: None
    ) -> Iterator[tuple[Ref, list[Any]]]:
        """Yield each unit that was done with its steps; those of a worker that was lost are missing."""
        count, task = min(self._count, len(refs)), self._plan.task
        if count <= 1:
            return
        stage, total = f"{task.item}s", len(self._plan.items.names)
        done = total - sum(len(ref.items) for ref in refs)
        progress(stage, done, total)
        workers = [self._start(number, count, refs[number::count]) for number in range(count)]
        try:
            for position, ref in enumerate(refs):
                steps = workers[position % count].next()
                if steps is None:
                    continue
                yield ref, steps
                done += len(ref.items)
                progress(stage, done, total)
        finally:
            for worker in workers:
                worker.end()

    def _start(self, number: int, count: int, refs: Sequence[Ref], meeting: Path | None = None) -> _Worker:
        request = replace(self._plan.request, lock=False)
        environment = dict(os.environ)
        environment.setdefault(THREADS_VARIABLE, str(max(1, (os.cpu_count() or 1) // count)))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if self._cards:
            environment["CUDA_VISIBLE_DEVICES"] = self._cards[number % len(self._cards)]
        if meeting is not None and "lo" in (name for _, name in socket.if_nameindex()):  # all are here
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        names = tuple(ref.name for ref in refs)
        order = Order(request, self._plan.out, names, meeting, number, count)
        return _Worker(number, order, self._plan.task.unit, environment)


class Together(Workers):
    """Processes that pass over the site together; units are yielded when all of them are done.

    They have ended by then, and one of them has written the weights of the site. If a worker is lost none is
    yielded, and the process of the run does everything: masks of one run come from one model.
    """

    def __call__(
        self, refs: Sequence[Ref], progress: Progress = lambda *_: None
    ) -> Iterator[tuple[Ref, list[Any]]]:
        """Yield every unit with its steps, or none."""
        count = min(self._count, len(refs))
        if count <= 1:
            return
        with tempfile.TemporaryDirectory() as folder:
            meeting = Path(folder) / "meeting"
            workers = [self._start(number, count, refs[number::count], meeting) for number in range(count)]
            try:
                found = self._heard(workers, len(refs), progress)
            finally:
                for worker in workers:
                    worker.end()
        if found is None:
            RunFolder(self._plan.out).discard("adapted")
            return
        yield from ((ref, found[position % count].pop(0)) for position, ref in enumerate(refs))

    def _heard(self, workers: Sequence[_Worker], total: int, progress: Progress) -> list[list[Any]] | None:
        """Return the steps of all units, by worker, when all workers have ended; None if one was lost."""
        found: list[list[Any]] = [[] for _ in workers]
        running = len(workers)
        while running:
            heard = [worker.heard() for worker in workers]
            for worker, steps, said in zip(workers, found, heard, strict=True):
                if said is None:
                    continue
                if "progress" in said:
                    progress(*said["progress"])
                elif "steps" in said:
                    worker.left -= 1
                    steps.append([tuple(step) for step in said["steps"]])
                    progress(f"{self._plan.task.item}s", sum(map(len, found)), total)
                elif said.get(_ENDED) == 0 and not worker.left:
                    running -= 1
                else:  # whoever is left waits for it
                    worker.mourn(said)
                    return None
            if not any(heard):
                time.sleep(BREATH)
        return found


class _Worker:
    """One process, and a thread that listens to it."""

    def __init__(self, number: int, order: Order, unit: str, environment: dict[str, str]) -> None:
        self.number, self.left, self._unit = number, len(order.names), unit
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, with code of this module
            [sys.executable, "-c", CODE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None  # noqa: S101 - a pipe, as asked for
        self._said: queue.Queue[Any] = queue.Queue()
        self._lost = False
        try:
            self._process.stdin.write(pickle.dumps(order))
            self._process.stdin.flush()
        except OSError:
            log.debug("worker %d ended at once", number + 1)  # the listener says so
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - a pipe, as asked for
        try:
            for line in self._process.stdout:
                self._said.put(json.loads(line))
        except ValueError:  # killed in the middle of a line
            log.debug("worker %d: half a line", self.number + 1)
            self._process.kill()
        self._said.put({_ENDED: self._process.wait()})

    def next(self) -> list[Any] | None:
        """Return the steps of the next unit when it is done; None where the process has ended before."""
        if self._lost:
            return None
        said = self._said.get()
        if "steps" in said:
            self.left -= 1
            return [tuple(step) for step in said["steps"]]
        self.mourn(said)
        return None

    def heard(self) -> dict[str, Any] | None:
        """Return what the process said next; None where it has said nothing since."""
        try:
            said: dict[str, Any] = self._said.get_nowait()
        except queue.Empty:
            return None
        return said

    def mourn(self, said: dict[str, Any]) -> None:
        """Tell of a process that was lost, which said this last."""
        self._lost = True
        why = said.get("error") or f"exit code {said.get(_ENDED)}"
        left = counted(self.left, self._unit)
        log.warning("worker %d ended (%s); its %s are done in this process", self.number + 1, why, left)

    def end(self) -> None:
        """End the process, whatever it is doing."""
        self._process.terminate()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    log.debug("worker %d: its pipe was broken", self.number + 1)


# ------------------------------------------------------------ in the process of a worker


def work() -> None:
    """Do the units of an order that comes on standard input; say on standard output when each is done."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the run ends its workers
    saying = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no message
    order: Order = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the process that started this one
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def say(**content: Any) -> None:
        saying.write(f"{json.dumps(content)}\n")
        saying.flush()

    try:
        _do(order, say)
    except Exception as error:
        log.debug("worker", exc_info=error)
        say(error=f"{type(error).__name__}: {error}")
        sys.exit(1)
    if order.meeting is not None:  # to leave may take no end while CUDA graphs hold what was said to others
        saying.close()
        sys.stderr.flush()
        os._exit(0)


def _end_with_parent() -> None:
    while os.read(0, 1):  # nothing more comes, so it returns when the pipe is closed
        continue
    os._exit(1)


def _do(order: Order, say: Callable[..., None]) -> None:
    import torch

    from tesla_med.adapt import Run
    from tesla_med.plan import make_plan
    from tesla_med.reports.base import Reports, Step
    from tesla_med.tta._mechanics import ranks
    from tesla_med.types import CaseView

    class Steps(Reports):
        """Says the steps of every unit that is done, and draws nothing."""

        def steps(self, steps: Sequence[Step]) -> None:
            if order.rank == 0:  # of a pass over the site; one process tells of them, with its first unit
                for number, scalars in steps:
                    self.step(number, scalars)

        def unit(self, records: Sequence[Any], view: CaseView | None, steps: Sequence[Step] = ()) -> None:
            say(steps=[[number, dict(scalars)] for number, scalars in steps])

    def tell(stage: str, done: int, total: int) -> None:
        if order.meeting is not None and order.rank == 0 and stage == PASSES:
            say(progress=[stage, done, total])

    torch.set_num_threads(int(os.environ[THREADS_VARIABLE]))
    logging.getLogger("tesla_med").setLevel(logging.ERROR)  # the process of the run tells of the records
    plan = make_plan(order.request)
    by_name = {ref.name: ref for ref in plan.refs}
    if order.meeting is not None:
        ranks.join(order.rank, order.count, order.meeting, plan.device)
    run = Run(plan, RunFolder(order.out), tell, Steps())
    if order.meeting is not None:
        run.ledger.alone = False
        run.ledger.agreed = lambda used: not ranks.all_agree(not used) and order.rank == 0
    run.work([by_name[name] for name in order.names])
