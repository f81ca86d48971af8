"""Carry out a study: resolve its cells, have those done that are missing, write the tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tesla_med.config.paths import user_path
from tesla_med.config.study import StudyConfig
from tesla_med.errors import OutputError
from tesla_med.io.inputs import Hashes
from tesla_med.io.locks import in_folder
from tesla_med.models.base import default_device
from tesla_med.records import WITHOUT_RESULT
from tesla_med.study.cells import CELLS_FOLDER, HASHES_FILE, Grid, StudyCell, grid_of
from tesla_med.study.page import STUDY_HTML, write_page
from tesla_med.study.schedulers import HERE, LOCAL, LOGS_FOLDER, check_scheduler, do_cells
from tesla_med.study.tables import (
    STUDY_CSV,
    STUDY_JSON,
    Line,
    read_cell,
    summarise,
    write_tables,
)
from tesla_med.study.work import remove_leftovers
from tesla_med.types import Progress

OWN = {CELLS_FOLDER, HASHES_FILE, STUDY_CSV, STUDY_JSON, STUDY_HTML, LOGS_FOLDER}
"""What lies in the folder of a study."""


@dataclass(frozen=True)
class StudyResult:
    """Outcome of a study.

    Attributes:
        out: its folder.
        cells: how many there are.
        done: cells that were done now.
        skipped: cells that were done before.
        failed: (cell or site, reason) of what could not be done.
        remarks: (cell, text) of what is wrong with cells that are done: cases that failed or are unscored,
            reports that could not be made, adaptation that diverged throughout.
        summary: a line per site, weights, method and protocol.
        files: what was written.
    """

    out: Path
    cells: int
    done: int
    skipped: int
    failed: tuple[tuple[str, str], ...]
    remarks: tuple[tuple[str, str], ...]
    summary: tuple[Line, ...]
    files: tuple[Path, ...]

    @property
    def complete(self) -> bool:
        """Whether every case of every cell is done."""
        return not self.failed and not self.remarks


def survey_study(
    study: StudyConfig,
    out: str | Path,
    *,
    device: str = "auto",
    trust_code: bool = False,
    progress: Progress | None = None,
) -> tuple[Grid, frozenset[str]]:
    """Return the cells of a study, and the names of those that are done; nothing is written.

    Arguments and errors as of :func:`run_study`.
    """
    out = _folder(out)
    grid, _ = _resolved(study, out, device, trust_code, progress or (lambda *_: None))
    return grid, frozenset(cell.name for cell in grid.cells if cell.done(out))


def run_study(
    study: StudyConfig,
    out: str | Path,
    *,
    scheduler: str = "local",
    jobs: int | None = None,
    device: str = "auto",
    trust_code: bool = False,
    progress: Progress | None = None,
    tell: Callable[[str], None] | None = None,
) -> StudyResult:
    """Do every cell of a study that is not done, and write its tables and its page.

    Args:
        study: what is to be done.
        out: folder; what is done there already stays, and is not done again. With workers on other machines,
            on storage that all see under this path.
        scheduler: ``local`` (processes on this machine), ``none`` (this process), the address of a Dask
            scheduler (``tcp://...``), or a YAML file of a SLURM cluster.
        jobs: workers, for ``local``; default: one per visible GPU, or one.
        device: auto, cpu or cuda, of every worker.
        trust_code: let MONAI run the code of bundles that need it.
        progress: called as the work goes on.
        tell: called with what a user should know meanwhile, in words.

    Raises:
        ConfigError: an unknown name, scheduler or device, a wrong override, or Dask is not installed.
        CheckpointError: a site without weights.
        DataError: no such common root of the images, or weights that cannot be read.
        OutputError: ``out`` holds something else, or cannot be written.
    """
    progress, out = progress or (lambda *_: None), _folder(out)
    check_scheduler(scheduler, jobs)
    if scheduler in (HERE, LOCAL):
        default_device(device)
    grid, hashes = _resolved(study, out, device, trust_code, progress)
    hashes.save()
    todo = [cell for cell in grid.cells if not cell.done(out)]
    failed: dict[str, str] = {}
    ended = before = len(grid.cells) - len(todo)
    started = time.perf_counter()
    unlike = {cell.name: cell for cell in todo}  # the same weights twice: one run is the result of both
    count = Counter(cell.name for cell in todo)

    def on_end(cell: StudyCell, reason: str | None) -> None:
        nonlocal ended
        ended += count[cell.name]
        if reason is not None:
            failed[cell.name] = reason
        progress("cells", ended, len(grid.cells))

    if todo:
        progress("cells", ended, len(grid.cells))
        do_cells(
            list(unlike.values()), out, scheduler, jobs, device, on_end, tell or (lambda _: None), progress
        )
    return _written(study, out, grid, todo, before, failed, time.perf_counter() - started)


def _written(
    study: StudyConfig,
    out: Path,
    grid: Grid,
    todo: Sequence[StudyCell],
    before: int,
    failed: dict[str, str],
    seconds: float,
) -> StudyResult:
    """Write the tables, and return what became of the study."""
    contents, unseen = _contents(grid.cells, out, failed)
    failed |= unseen
    for cell in grid.cells:
        if cell.name in contents:
            remove_leftovers(cell, out)
    names = dict.fromkeys(cell.name for cell in grid.cells)
    lost = (*grid.problems, *((name, failed[name]) for name in names if name in failed))
    summary = summarise(contents[cell.name] | cell.key for cell in grid.cells if cell.name in contents)
    files = write_tables(out, study, grid, contents, failed, summary, seconds)
    page = write_page(out, study, grid, contents, failed)
    done = sum(cell.name in contents for cell in todo)
    remarks = tuple(_remarks(contents))
    return StudyResult(out, len(grid.cells), done, before, lost, remarks, tuple(summary), (*files, page))


def _remarks(contents: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return what is wrong with cells that are done."""
    found = []
    for name, content in contents.items():
        wrong = [row for row in content["cases"] if row["status"] in WITHOUT_RESULT]
        found += [(name, f"{row['case']} {row['status']}: {row['reason']}".strip()) for row in wrong]
        found += [(name, f"report {key} not made: {why}") for key, why in content["reports_failed"].items()]
        if content["diverged"]:
            found.append((name, "adaptation diverged throughout: every result is the source model's"))
    return found


def _contents(
    cells: Sequence[StudyCell], out: Path, failed: dict[str, str]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return by name what the cells that are done say of themselves, and which this machine does not see."""
    contents: dict[str, dict[str, Any]] = {}
    unseen: dict[str, str] = {}
    for cell in cells:
        if cell.name in failed or cell.name in contents or cell.name in unseen:
            continue
        try:
            contents[cell.name] = read_cell(cell.folder(out), patient=not unseen)
        except OutputError as error:
            unseen[cell.name] = str(error)
    return contents, unseen


def _folder(out: str | Path) -> Path:
    """Return the absolute path of a folder that is empty, or that of a study.

    Raises:
        OutputError: it is something else.
    """
    path = user_path(out).absolute()
    if path.exists() and not path.is_dir():
        raise OutputError(f"{path}: is a file, not a folder; choose another --out")
    others = sorted(item.name for item in in_folder(path) if item.name not in OWN)
    if others:
        raise OutputError(
            f"{path}: holds files that are not of a study ({', '.join(others[:5])}); choose another --out"
        )
    return path


def _resolved(
    study: StudyConfig, out: Path, device: str, trust_code: bool, progress: Progress
) -> tuple[Grid, Hashes]:
    hashes = Hashes(out / HASHES_FILE)
    return grid_of(study, hashes, device, trust_code=trust_code, progress=progress), hashes
