"""Who hands out the cells of a study: Dask, on this machine, behind an address, or in jobs of SLURM.

``distributed`` and ``dask_jobqueue`` are imported here, when a study is carried out, and nowhere else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tesla_med import __version__
from tesla_med.actions.spread import visible_cards
from tesla_med.config.files import is_yaml, search_roots
from tesla_med.config.study import SlurmConfig, load_slurm
from tesla_med.errors import ConfigError
from tesla_med.scoring.text import counted
from tesla_med.study.cells import StudyCell
from tesla_med.study.work import run_cell, run_cell_of
from tesla_med.types import Progress

HERE, LOCAL, REMOTE = "none", "local", ("tcp://", "tls://")
LOGS_FOLDER = "logs"
SETTINGS = {
    "distributed.scheduler.worker-saturation": 1.0,  # a lost worker takes no waiting cell with it
    "distributed.scheduler.unknown-task-duration": "1h",  # so that jobs are asked for from the start
}
WAITING_SECONDS = 30
LOOK_EVERY_SECONDS, LOOKS_UNTIL_TOLD = 60.0, 5
"""How often it is asked whether there are workers, and how often there may be none."""
OnEnd = Callable[[StudyCell, str | None], None]
"""Called with a cell that has ended, and the reason where it could not be done."""


def check_scheduler(scheduler: str, jobs: int | None) -> SlurmConfig | None:
    """Check what was asked for before any file is read; return the cluster of SLURM, if it is one.

    Raises:
        ConfigError: no such scheduler, a wrong file, ``jobs`` with one whose workers are not started here,
            or Dask is not installed.
    """
    known = scheduler in (HERE, LOCAL) or scheduler.startswith(REMOTE)
    if not known and not is_yaml(scheduler):
        raise ConfigError(
            f"--scheduler {scheduler!r} is not known; expected local, none, tcp://HOST:PORT or a YAML file "
            "of a SLURM cluster"
        )
    if jobs is not None and scheduler != LOCAL:
        raise ConfigError(f"--jobs is for --scheduler local, not for {scheduler}; leave it out")
    if scheduler == HERE:
        return None
    needed = ("distributed",) if known else ("distributed", "dask_jobqueue")
    for name in needed:
        _imported(name)
    return None if known else load_slurm(scheduler)


def do_cells(
    cells: Sequence[StudyCell],
    out: Path,
    scheduler: str,
    jobs: int | None,
    device: str,
    on_end: OnEnd,
    tell: Callable[[str], None],
    progress: Progress,
) -> None:
    """Have cells done, in any order. A cell that fails is tried once more; the others go on.

    Args:
        cells: what is to be done.
        out: folder of the study.
        scheduler: none, local, an address or a YAML file.
        jobs: workers on this machine.
        device: auto, cpu or cuda.
        on_end: called for every cell.
        tell: called with what a user should know, in words.
        progress: called as the work on a single cell goes on, where it is done in this process.

    Raises:
        ConfigError: no scheduler answers.
    """
    slurm = check_scheduler(scheduler, jobs)
    if scheduler == HERE:
        for cell in cells:
            on_end(cell, _attempted(cell, out, progress))
        return
    distributed = _imported("distributed")
    import dask

    with dask.config.set(SETTINGS), ExitStack() as stack:
        logging.getLogger("distributed").setLevel(logging.ERROR)
        if slurm is not None:
            cluster: Any = stack.enter_context(slurm_cluster(slurm, out))
            cluster.adapt(minimum_jobs=0, maximum_jobs=slurm.jobs, target_duration="1s")
            tell(f"At most {counted(slurm.jobs, 'job')} of SLURM at a time; logs: {out / LOGS_FOLDER}")
        elif scheduler == LOCAL:
            cluster = stack.enter_context(_local_cluster(distributed, jobs, device, len(cells)))
        else:
            cluster = scheduler
        client = stack.enter_context(_client(distributed, cluster))
        tell(f"Dashboard: {client.dashboard_link}")
        if isinstance(cluster, str) and not client.scheduler_info()["workers"]:
            tell(f"No worker has joined yet; start some with: dask worker {scheduler} --nthreads 1")
        stack.enter_context(_watched(client, tell))
        _hand_out(distributed, client, cells, out, on_end)


@contextmanager
def _watched(client: Any, tell: Callable[[str], None]) -> Iterator[None]:
    """Say while the block runs, each time once, that there has been no worker for a while."""
    ended = threading.Event()

    def watch() -> None:
        missing = 0
        while not ended.wait(LOOK_EVERY_SECONDS):
            with suppress(Exception):  # the scheduler may be gone; the block says so
                missing = 0 if client.scheduler_info()["workers"] else missing + 1
                if missing == LOOKS_UNTIL_TOLD:
                    minutes = missing * LOOK_EVERY_SECONDS / 60
                    tell(
                        f"No worker for {minutes:.0f} min, nothing goes on: do jobs wait in the queue, or do "
                        "they end at once? Their logs say why; what is done stays done"
                    )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _attempted(cell: StudyCell, out: Path, progress: Progress) -> str | None:
    """Do a cell in this process, twice if need be; return the reason where it cannot be done."""
    reason = None
    for _ in range(2):
        try:
            run_cell(cell, out, progress)
        except Exception as error:
            reason = _reason(error)
        else:
            return None
    return reason


def _hand_out(distributed: Any, client: Any, cells: Sequence[StudyCell], out: Path, on_end: OnEnd) -> None:
    """Give every cell to the scheduler, and wait for each to end."""
    own = hashlib.sha256(str(out).encode("utf-8", errors="surrogateescape")).hexdigest()[:8]
    by_key = {f"{own}-{cell.name}": cell for cell in cells}
    roots = os.pathsep.join(map(str, search_roots()))
    futures = client.map(
        run_cell_of,
        cells,
        key=list(by_key),
        out=out,
        version=__version__,
        roots=roots,
        retries=1,
        pure=False,
    )
    waiting = distributed.as_completed(futures, loop=client.loop, raise_errors=False)
    del futures
    for future in waiting:
        if future.status == "finished":
            reason = None
        elif future.status == "error":
            reason = _reason(future.exception())
        else:
            reason = f"{future.status}: the scheduler no longer knows of it; the same command does it again"
        on_end(by_key[future.key], reason)
        future.release()


def _reason(error: BaseException | None) -> str:
    """Return why a cell failed, in words."""
    if type(error).__name__ == "KilledWorker":
        last = getattr(error, "last_worker", None)
        count = getattr(error, "allowed_failures", 0) + 1
        return (
            f"its worker was lost {count} times, the last at {getattr(last, 'address', last)}: killed for "
            "memory or by a time limit, or the process crashed; the logs of the workers say more"
        )
    return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------ clusters


@contextmanager
def _local_cluster(distributed: Any, jobs: int | None, device: str, cells: int) -> Iterator[Any]:
    """Start a scheduler that this machine alone can reach, and a process for each worker.

    A worker's memory is not watched: what a cell needs is not Dask's, and the system ends what is too large.
    """
    cards = visible_cards(device)
    count = min(jobs or max(1, len(cards)), max(1, cells))
    workers = {
        index: {
            "cls": distributed.Nanny,
            "options": {
                "host": "127.0.0.1",
                "nthreads": 1,
                "memory_limit": 0,
                "dashboard": False,
                "silence_logs": logging.ERROR,
                "env": {"CUDA_VISIBLE_DEVICES": cards[index % len(cards)]} if cards else {},
            },
        }
        for index in range(count)
    }
    options = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:8787"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Port 8787 is already in use")
        cluster = distributed.SpecCluster(
            workers=workers, scheduler={"cls": distributed.Scheduler, "options": options}, silence_logs=False
        )
    with cluster:
        yield cluster


def slurm_cluster(config: SlurmConfig, out: Path) -> Any:
    """Return a cluster of SLURM jobs, of which none is submitted yet; ``job_script()`` shows what one runs.

    Args:
        config: of the jobs.
        out: folder of the study; the logs of the jobs go into its folder ``logs``.
    """
    jobqueue = _imported("dask_jobqueue")
    gpus = (f"--gres=gpu:{config.gpus}",) if config.gpus else ()
    optional = {"python": config.python, "interface": config.interface, "local_directory": config.scratch}
    return jobqueue.SLURMCluster(
        cores=1,  # one cell at a time
        processes=1,
        job_cpu=config.cpus,
        memory=config.memory,
        walltime=config.walltime,
        queue=config.partition,
        account=config.account,
        job_name="tesla-med",
        job_extra_directives=[*gpus, *config.directives],
        job_script_prologue=list(config.prologue),
        log_directory=str(out / LOGS_FOLDER),
        worker_extra_args=["--memory-limit", "0"],  # SLURM watches the memory of the job
        **{key: value for key, value in optional.items() if value is not None},
    )


def _client(distributed: Any, cluster: Any) -> Any:
    """Return a client of a cluster or of the scheduler at an address.

    Raises:
        ConfigError: none answers there.
    """
    try:
        return distributed.Client(cluster, timeout=WAITING_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"no Dask scheduler answers at {cluster} ({error}); start one with 'dask scheduler', and give "
            "the address that it prints"
        ) from None


def _imported(name: str) -> Any:
    """Return a package of the extra.

    Raises:
        ConfigError: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"a study needs Dask, and {error.name or name} is not installed: pip install 'tesla-med[study]'; "
            "--scheduler none works without it"
        ) from None
