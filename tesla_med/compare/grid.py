"""Compare methods: a grid of rows x protocols x sites x seeds, each cell a run on volumes or on tiles.

A row is a method with overrides of its own, so that ablations and sensitivities are grids too. Cells are
kept in folders of their own and are not run twice. Scores come from the cells' own records, which are
written after their masks are final; calibration of volumes is counted here, over one region for all rows.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tesla_med.adapt import run_plan
from tesla_med.compare.calibration import count_calibration
from tesla_med.compare.cells import Cell, cells_of, scored_classes, site_names, task_of_table, with_rows
from tesla_med.compare.costs import Watch, costs_of, passes_of
from tesla_med.compare.figures import METRICS, Summary, summarise
from tesla_med.compare.inputs import inputs_of
from tesla_med.config.models import PipelineConfig, Reset, SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.config.resolve import other_sites, resolve
from tesla_med.config.tables import TableConfig
from tesla_med.errors import ConfigError, OutputError, TeslaMedError
from tesla_med.io.cases import check_there, find_cases
from tesla_med.io.files import sha256, write_json
from tesla_med.io.locks import in_folder, output_lock
from tesla_med.plan import Plan, RunRequest, make_plan
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring.calibration import joined_bins
from tesla_med.tasks.base import Task
from tesla_med.types import Carry, Progress

log = logging.getLogger(__name__)
NOT_SETTINGS = {"reports", "report", "title", "citation", "method", "protocol", "methods", "protocols"}
"""Fields of a pipeline that do not change a cell; of the methods' parameters its own are counted."""
CELLS_FILE, CELLS_FOLDER = "cells.json", "cells"


@dataclass(frozen=True)
class Comparison:
    """Outcome of a comparison.

    Attributes:
        out: the folder.
        summary: the table.
        files: what was written there.
        done: cells that were run.
        skipped: cells that were there already.
        problems: cells that could not be run, with the reason.
        remarks: what was noticed of single items, (name, text), each once.
    """

    out: Path
    summary: Summary
    files: tuple[Path, ...]
    done: int
    skipped: int
    problems: tuple[tuple[str, str], ...]
    remarks: tuple[tuple[str, str], ...] = ()


def compare_methods(
    table: TableConfig,
    volumes: str | Path,
    *,
    weights: str | Path | None = None,
    statistics: str | Path | None = None,
    out: str | Path = "comparison",
    device: str = "auto",
    reset: Reset | None = None,
    guard: bool = False,
    overrides: Sequence[str] = (),
    only: Sequence[str] | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Run every cell of a table that is not there yet, and write the table.

    Args:
        table: rows, protocols, sites and seeds.
        volumes: folder of images, as for :func:`tesla_med.adapt_site`, or of tiles.
        weights: source weights; default: each site's.
        statistics: source feature statistics for the Y protocols; default: beside the weights.
        out: folder.
        device: auto, cpu or cuda.
        reset: as for :func:`tesla_med.adapt_site`; default: the pipeline's for the protocol.
        guard: judge every volume; off by default, so that methods are compared as they are; not for tiles.
        overrides: ``key=value`` texts over the pipelines of all rows.
        only: labels of the rows to run; default: all. The others are in what is written with what earlier
            calls left in ``out``, whatever their seeds.
        resume: add to what is in ``out``.
        progress: called as the work goes on.

    Raises:
        ConfigError: an unknown name, or no row that can do any of the protocols.
        DataError: no such ``volumes``.
        OutputError: ``out`` cannot be used, or holds cells made with other settings.
    """
    weights, statistics = (None if item is None else user_path(item) for item in (weights, statistics))
    volumes, out, texts = user_path(volumes), user_path(out), tuple(overrides)
    given = table, volumes, weights, statistics, out, device, reset, guard, texts
    return _Grid(*given, only).run(resume, progress or (lambda *_: None))


class _Grid:
    """One comparison while it goes on."""

    def __init__(
        self,
        table: TableConfig,
        volumes: Path,
        weights: Path | None,
        statistics: Path | None,
        out: Path,
        device: str,
        reset: Reset | None,
        guard: bool,
        overrides: tuple[str, ...],
        only: Sequence[str] | None = None,
    ) -> None:
        self.given_sites = site_names(table.sites)
        table = table.model_copy(update={"sites": tuple(self.given_sites)})
        self.table, self.volumes, self.out, self.device, self.reset = table, volumes, out, device, reset
        self.weights, self.statistics = weights, statistics
        self.overrides = (*overrides, f"guard.enabled={str(guard).lower()}")
        self.cells = self.wanted = cells_of(table if only is None else with_rows(table, only))
        self.task = task_of_table(table)
        self.task.refuse({"guard"} if guard else ())
        self.known: dict[str, dict[str, Any]] = {}
        self.problems: dict[str, str] = {}
        self.inputs: dict[str, str] = {}
        self.remarks: dict[tuple[str, str], None] = {}

    def run(self, resume: bool, progress: Progress) -> Comparison:
        """Run what is missing, then write everything."""
        check_there(self.volumes)
        self._check_weights()
        self._open(resume)
        chains = self._chains()
        done = skipped = told = 0
        with output_lock(self.out):
            for chain in chains:
                if all(self._is_done(cell) for cell in chain):
                    skipped += len(chain)
                    told += len(chain)
                    continue
                carry = Carry() if len(chain) > 1 else None
                for cell in chain:
                    progress("cells", told, len(self.wanted))
                    done += self._attempt(cell, carry)
                    told += 1
            progress("cells", told, told)
            files, summary = self._write(progress)
        told_of = tuple(self.problems.items()), tuple(self.remarks)
        return Comparison(self.out, summary, tuple(files), done, skipped, *told_of)

    def _chains(self) -> list[list[Cell]]:
        """Return the cells that must be run together: all sites of a row where state is never reset."""
        chains: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.wanted:
            reset = self.reset or self._task(cell).reset_for(cell.protocol)
            alone = () if reset == "never" else (cell.site,)
            chains.setdefault((*cell.key, cell.seed, *alone), []).append(cell)
        return list(chains.values())

    def _attempt(self, cell: Cell, carry: Carry | None) -> int:
        """Run a cell; return 1, or 0 where it cannot be run, which is noted."""
        try:
            self._run(cell, carry)
        except OutputError:
            raise
        except TeslaMedError as error:
            log.warning("%s: %s", cell.name, error)
            self.problems[cell.name] = str(error)
            return 0
        return 1

    # ------------------------------------------------------------ cells

    def _check_weights(self) -> None:
        """Raise ConfigError where no cell has a source model: none is given, and no site names its own."""
        if self.weights is None and all(self._configs(cell)[0].weights is None for cell in self.wanted):
            names = ", ".join(self.given_sites)
            raise ConfigError(f"no weights: give --weights, or 'weights' in the configuration of {names}")

    def _open(self, resume: bool) -> None:
        """Read what is there and check that it was made with the same settings.

        Raises:
            OutputError: something else is there, or other settings.
        """
        path = self.out / CELLS_FILE
        content = in_folder(self.out)
        if content and not path.is_file():
            raise OutputError(f"{self.out}: holds files that are not a comparison; choose another --out")
        if content and not resume:
            raise OutputError(
                f"{self.out}: holds an earlier comparison; --resume adds to it, or choose another"
            )
        if path.is_file():
            self.known = json.loads(path.read_text(encoding="utf-8"))
            self.cells = self._with_rows_there()
        running = {cell.name for cell in self.wanted}
        for cell in self.cells:
            before = self.known.get(cell.name)
            if before is None:
                continue
            now = self._settings(cell)
            shown = ("method", "weights")  # the call that ran it may have had other options
            keys = now if cell.name in running else shown
            changed = [key for key in keys if before["settings"].get(key) != now[key]]
            if (then := before.get("inputs")) and then != (self._inputs(cell) or then):
                changed.append(f"images or references of site {cell.site}")
            if changed:
                raise OutputError(
                    f"{self.out}: cell {cell.name} was made with other settings ({', '.join(changed)}); use "
                    "the same, or another --out"
                )

    def _with_rows_there(self) -> list[Cell]:
        """Return the cells that are to be run and, of the table's other rows, those that are done."""
        seeds = sorted({int(name.rpartition("-")[2]) for name in self.known})
        running = {cell.row.label for cell in self.wanted}
        others = [row for row in self.table.rows if row.label not in running]
        asked = [
            Cell(row, protocol, site, seed)
            for row in others
            for protocol in self.table.protocols
            for site in self.table.sites
            for seed in seeds
        ]
        cells = [*self.wanted, *(cell for cell in asked if self._is_done(cell))]
        order = {row.label: index for index, row in enumerate(self.table.rows)}
        return sorted(cells, key=lambda cell: order[cell.row.label])

    def _configs(self, cell: Cell) -> tuple[SiteConfig, PipelineConfig, tuple[str, ...]]:
        overrides = (*self.overrides, *cell.row.overrides)
        pipeline = cell.row.pipeline or self.table.pipeline
        return *resolve(self.given_sites[cell.site], pipeline, overrides), overrides

    def _settings(self, cell: Cell) -> dict[str, Any]:
        site, pipeline, _ = self._configs(cell)
        given = self._statistics_of(cell)
        content = {
            "site": site.model_dump(mode="json"),
            "pipeline": pipeline.model_dump(mode="json", exclude=NOT_SETTINGS),
            "parameters": pipeline.method_params(cell.row.method, cell.protocol),
        }
        return {
            "method": cell.row.method,
            "reset": self.reset,
            "weights": None if self.weights is None else sha256(self.weights),
            "statistics": None if given is None else sha256(given),
            "configuration": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        }

    def _inputs(self, cell: Cell) -> str:
        """Return a hash of all that the items of a cell's site are read from; "" where they are not found."""
        if cell.site not in self.inputs:
            self.inputs[cell.site] = inputs_of(self._task(cell), self.volumes)
        return self.inputs[cell.site]

    def _statistics_of(self, cell: Cell) -> Path | None:
        """Return the file of source statistics that was given, for cells that may know of it."""
        return self.statistics if cell.protocol.startswith("Y") else None

    def _is_done(self, cell: Cell) -> bool:
        entry = self.known.get(cell.name)
        return entry is not None and entry["complete"] and RunFolder(self._folder(cell)).complete()

    def _of_first_seed(self) -> dict[str, list[Cell]]:
        """Return the finished cells of the first seed, whose probabilities are kept, by site."""
        done = [cell for cell in self.cells if cell.seed == self.table.first_seed and self._is_done(cell)]
        by_site = {site: [cell for cell in done if cell.site == site] for site in self.table.sites}
        return {site: cells for site, cells in by_site.items() if cells}

    def _folder(self, cell: Cell) -> Path:
        return self.out / CELLS_FOLDER / cell.name

    def _run(self, cell: Cell, carry: Carry | None) -> None:
        """Run a cell and note what it cost; in a chain it is run from its start."""
        entry: dict[str, Any] = {"settings": self._settings(cell), "complete": False}
        entry["inputs"] = self._inputs(cell)
        watch = Watch(self.device)
        probs = cell.seed == self.table.first_seed and "probs" in self.task.honours
        plan = self._plan(cell, method=cell.row.method, out=self._folder(cell), reports=True, probs=probs)
        there, anew = plan.out.exists(), carry is not None
        before = self.known.get(cell.name, {}).get("seconds", 0.0) if there and not anew else 0.0
        self._note(cell, entry | {"seconds": before})
        try:
            result = run_plan(plan, resume=there and not anew, overwrite=there and anew, carry=carry)
            said = ((cell.name, text) for text in result.predicted.remarks)
            self.remarks |= dict.fromkeys([*result.remarks, *said])
            for name, reason in result.reports_failed.items():
                raise TeslaMedError(f"report {name}: not made: {reason}; --resume makes it again")
        except BaseException:  # what was spent counts when the cell is gone on with
            self._note(cell, entry | {"seconds": watch.read(before)["seconds"]})
            raise
        count = sum(getattr(item, "slices", 1) for item in result.results if item.status != "failed")
        taken = watch.read(before) | {"slices": count, "passes": passes_of(plan, result)}
        self._note(cell, entry | {"complete": True} | taken)

    def _note(self, cell: Cell, entry: Mapping[str, Any]) -> None:
        self.known[cell.name] = dict(entry)
        write_json(self.out / CELLS_FILE, self.known)

    # ------------------------------------------------------------ table

    def _write(self, progress: Progress) -> tuple[list[Path], Summary]:
        metric = METRICS[self.task.metric]
        rows = [row for cell in self.cells for row in self._rows(cell)]
        progress("tables", 0, 1)
        runs, tasks = {}, {}
        for site, cells in self._of_first_seed().items():
            tasks[site] = self._task(cells[0])
            runs[site] = {cell.key: RunFolder(self._folder(cell)) for cell in cells}
        measured, bins = count_calibration(tasks, runs, self.volumes)
        summary = summarise(
            rows,
            sites=self.table.sites,
            order=list(dict.fromkeys(cell.key for cell in self.cells)),
            baseline=self.table.baseline,
            costs=costs_of(self.cells, self.known),
            calibration=measured,
            metric=metric,
            classes=scored_classes(self._configs(self.cells[0])[1], self.task),
        )
        summary = replace(summary, reliability={key: joined_bins(items) for key, items in bins.items()})
        from tesla_med.compare.report import write_report, write_rows

        files = [write_rows(self.out / "comparison.csv", metric.columns, rows)]
        files += write_report(self.out, self.table, summary, rows, self.problems, self._figures())
        progress("tables", 1, 1)
        return files, summary

    def _figures(self) -> dict[str, bytes]:
        """Return the figures in addition to those of the table, by file name."""
        if not self.table.figures:
            return {}
        from tesla_med.compare.pictures import draw_site

        drawn: dict[str, bytes] = {}
        for name, every in self._of_first_seed().items():
            cells = [cell for cell in every if cell.protocol == every[0].protocol]
            configs = [self._configs(cell)[:2] for cell in cells[:1]]
            found = [find_cases(self.volumes, site, other_sites(site), of.channels) for site, of in configs]
            labelled = [case for item in found for case in item.cases if case.labelled]
            if labelled:
                folders = {cell: RunFolder(self._folder(cell)) for cell in cells}
                drawn |= draw_site(self.table.figures, name, folders, labelled, self._plan)
        return drawn

    def _plan(
        self,
        cell: Cell,
        weights: Path | None = None,
        method: str = "source",
        out: Path | None = None,
        *,
        reports: bool = False,
        probs: bool = False,
    ) -> Plan:
        """Return the plan of a cell, or of prediction with its adapted weights."""
        source = method == "source" and out is None
        texts = self._configs(cell)[2]
        return make_plan(
            RunRequest(
                self.given_sites[cell.site],
                self.volumes,
                weights=weights or self.weights,
                statistics=None if source else self._statistics_of(cell),
                pipeline=cell.row.pipeline or self.table.pipeline,
                method=method,
                protocol="N-O" if source else cell.protocol,
                out=out,
                seed=cell.seed,
                device=self.device,
                reset=self.reset if reports else None,
                overrides=(*texts, "reports=[table]") if reports else texts,
                save_probs=probs,
            )
        )

    def _rows(self, cell: Cell) -> Iterator[dict[str, Any]]:
        """Yield the tidy rows of a finished cell."""
        if not self._is_done(cell):
            return
        about: dict[str, Any] = {"site": cell.site, "row": cell.row.label, "method": cell.row.method}
        about |= {"protocol": cell.protocol, "seed": cell.seed}
        yield from (about | row for row in self._task(cell).rows(RunFolder(self._folder(cell))))

    def _task(self, cell: Cell) -> Task:
        site, pipeline, _ = self._configs(cell)
        return self.task(site, pipeline)
