"""Do one cell of a study: in a folder of its own, which gets the cell's name when it is whole.

Nothing is locked, since the name of a cell says what is in it: where two workers do the same cell, the first
to finish gives it its name, and the other removes what it made, which is the same.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tesla_med import __version__
from tesla_med.adapt import run_plan
from tesla_med.config.files import SEARCH_PATH_VARIABLE
from tesla_med.errors import AdaptationError, ConfigError, DataError, OutputError
from tesla_med.io.files import TEMPORARY, write_json
from tesla_med.plan import Plan, RunRequest, make_plan
from tesla_med.records import SiteResult
from tesla_med.study.cells import CELL_FILE, StudyCell, names_digest
from tesla_med.types import Progress

ONE_AT_A_TIME = threading.Lock()
"""A worker may have several threads; a cell has the process to itself."""


def run_cell(cell: StudyCell, out: Path, progress: Progress | None = None) -> str:
    """Do a cell unless it is done, and return its name.

    Args:
        cell: what to do.
        out: folder of the study.
        progress: called as the work goes on.

    Raises:
        TeslaMedError: as :func:`tesla_med.adapt_site`, or every case failed. Nothing is left of the attempt.
    """
    with ONE_AT_A_TIME:
        if not cell.done(out):
            _do(cell, out, progress or (lambda *_: None))
    return cell.name


def run_cell_of(cell: StudyCell, out: Path, version: str, roots: str) -> str:
    """Do a cell in the process of a worker, where nobody reads what is said of single cases.

    Args:
        cell: what to do.
        out: folder of the study.
        version: of the package where the study was resolved.
        roots: where site files and pipelines were searched there, as in ``TESLA_MED_CONFIG_PATH``.

    Raises:
        ConfigError: the worker has another version.
        TeslaMedError: as :func:`run_cell`.
    """
    if version != __version__:
        raise ConfigError(
            f"the worker on {socket.gethostname()} has tesla-med {__version__}, the study was started with "
            f"{version}; install one version everywhere"
        )
    os.environ[SEARCH_PATH_VARIABLE] = roots
    logging.getLogger("tesla_med").setLevel(logging.ERROR)
    return run_cell(cell, out)


def _do(cell: StudyCell, out: Path, progress: Progress) -> None:
    import torch

    started = time.perf_counter()
    torch.set_num_threads(cell.threads)
    final = cell.folder(out)
    temporary = final.with_name(f"{TEMPORARY}{final.name}-{secrets.token_hex(6)}")
    request = RunRequest(
        cell.site,
        cell.volumes,
        weights=cell.weights,
        pipeline=cell.pipeline,
        method=cell.method,
        protocol=cell.protocol,
        out=temporary,
        seed=cell.seed,
        device=cell.device,
        overrides=cell.overrides,
        trust_code=cell.trust_code,
        lock=False,
    )
    try:
        plan = make_plan(request)
        if names_digest(plan.items) != cell.names:
            raise DataError(
                f"site {cell.site.id}: {socket.gethostname()} finds {len(plan.items.names)} "
                f"{plan.task.item}s in {plan.items.folder}, not the {cell.count} that the study started "
                "with; all machines must see the same files and site files"
            )
        result = run_plan(plan, progress=progress)
        _check(result)
        if not cell.keep_weights:
            shutil.rmtree(temporary / "checkpoints", ignore_errors=True)
        content = _content(cell, plan, result, time.perf_counter() - started)
        write_json(temporary / CELL_FILE, content)
        _give_name(temporary, final, cell, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check(result: SiteResult) -> None:
    """Refuse a cell without a single result, which may be the fault of the machine."""
    failed = [item for item in result.results if item.status == "failed"]
    if len(failed) == len(result.results):
        raise AdaptationError(f"all of {len(failed)} failed, the first: {failed[0].case}: {failed[0].reason}")


def _give_name(temporary: Path, final: Path, cell: StudyCell, out: Path) -> None:
    """Rename a whole folder, unless another worker was faster.

    Raises:
        OutputError: something else has the name, or it cannot be given.
    """
    try:
        temporary.rename(final)
    except OSError as error:
        if cell.done(out):
            return
        raise OutputError(
            f"{final}: cannot be put there: {error.strerror or error}; it is no finished cell, remove it"
        ) from error


def _content(cell: StudyCell, plan: Plan, result: SiteResult, seconds: float) -> dict[str, Any]:
    """Return what the table of the study says of a cell: one row per case, or one for all tiles of a site."""
    rows = [_row(item, result.metric) for item in result.results]
    if plan.task.item != plan.task.unit:
        failed = sum(item.status == "failed" for item in result.results)
        figures = {"source": result.mean_source, "adapted": result.mean}
        rows = [
            {
                **_row(None, result.metric),
                **figures,
                "status": "failed" if failed else "ok",
                "seconds": round(seconds, 3),
                "reason": f"{failed} of {len(result.results)} not read" if failed else "",
            }
        ]
    return {
        **cell.key,
        "version": __version__,
        "host": socket.gethostname(),
        "device": plan.device.type,
        "threads": cell.threads,
        "items": len(result.results),
        "seconds": round(seconds, 3),
        "notes": list(result.notes),
        "reports_failed": dict(result.reports_failed),
        "diverged": bool(result.units) and result.diverged == result.units,
        "cases": rows,
    }


def _row(item: Any, metric: str) -> dict[str, Any]:
    """Return the row of one item."""
    return {
        "case": getattr(item, "case", ""),
        "status": getattr(item, "status", ""),
        "used": getattr(item, "used", ""),
        "share": getattr(item, "share", None),
        "trusted": getattr(item, "trusted", None),
        "metric": metric,
        "source": getattr(item, "headline_source", None),
        "adapted": getattr(item, "headline", None),
        "predicted": getattr(item, "predicted_dice", None),
        "seconds": round(getattr(item, "seconds", 0.0), 3),
        "reason": getattr(item, "reason", ""),
    }


def remove_leftovers(cell: StudyCell, out: Path) -> None:
    """Remove what lost workers left of a cell that is done.

    A worker that was taken for lost and still works on it makes no harm: the name is given.
    """
    folder = cell.folder(out)
    for path in folder.parent.glob(f"{TEMPORARY}{folder.name}-*"):
        with suppress(OSError):
            shutil.rmtree(path)
