"""Compare methods: a grid of rows x protocols x sites x seeds, each cell a run on volumes or on tiles.

A row is a method with overrides of its own, so that ablations and sensitivities are grids too. Cells are
kept in folders of their own and are not run twice. Scores come from the cells' own records, which are
written after their masks are final; calibration of volumes is counted here, over one region for all rows.
"""

from __future__ import annotations

import csv
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tesla_med.adapt import Carry, guard_override, run_plan
from tesla_med.compare.figures import ACCURACY, DICE, Cost, Key, Summary, summarise
from tesla_med.compare.tiles import calibration_of, of_tiles, predictions
from tesla_med.config.models import PROTOCOLS, PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.config.tables import Row, TableConfig
from tesla_med.engine.memory import free_device_memory
from tesla_med.errors import ConfigError, OutputError, TeslaMedError
from tesla_med.io.cases import check_there, find_cases
from tesla_med.io.files import atomic_path, output_lock, sha256, write_json
from tesla_med.io.nifti import slice_axis
from tesla_med.io.references import read_reference
from tesla_med.io.volumes import read_map, read_mask, read_volume
from tesla_med.plan import Plan, make_plan, other_sites, resolve
from tesla_med.registry import unknown_name
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring import calibration
from tesla_med.scoring import score as scoring
from tesla_med.tta.base import METHODS
from tesla_med.types import Case, CaseResult, Progress

log = logging.getLogger(__name__)
Calibration = dict[tuple[str, str, str], dict[str, float | None]]
"""(row, protocol, site) -> ece, brier, nll."""
Bins = dict[Key, list[Mapping[str, Any]]]
"""(row, protocol) -> bins of each site."""
NOT_SETTINGS = {"reports", "report", "title", "citation", "method", "protocol", "methods", "protocols"}
"""Fields of a pipeline that do not change a cell; of the methods' parameters its own are counted."""
READERS = 16
"""Cases read at once while calibration is counted, at most."""
CELLS_FILE, CELLS_FOLDER = "cells.json", "cells"


@dataclass(frozen=True)
class Cell:
    """One run of the grid."""

    row: Row
    protocol: Protocol
    site: str
    seed: int

    @property
    def name(self) -> str:
        """Folder below ``cells/``."""
        return f"{self.site}/{_slug(self.row.label)}-{self.protocol}/seed-{self.seed}"

    @property
    def key(self) -> Key:
        """Row and protocol."""
        return self.row.label, self.protocol


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
    """

    out: Path
    summary: Summary
    files: tuple[Path, ...]
    done: int
    skipped: int
    problems: tuple[tuple[str, str], ...]


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
    grid = _Grid(
        table, Path(volumes), weights, statistics, Path(out), device, reset, guard, tuple(overrides), only
    )
    return grid.run(resume, progress or (lambda *_: None))


def cells_of(table: TableConfig) -> list[Cell]:
    """Return the cells of a table: each row under the protocols that its method has.

    A method without randomness runs under the first seed only, one that does not adapt under the first
    protocol only. The order of tiles is drawn by the seed, so there every method that adapts is random.

    Raises:
        ConfigError: an unknown method or pipeline, pipelines of several tasks, or nothing to run.
    """
    tiles = of_tiles(table)
    found = []
    for row in table.rows:
        method = METHODS.get(row.method)
        fixed = not method.adapts if tiles else method.deterministic
        seeds = range(table.first_seed, table.first_seed + (1 if fixed else table.seeds))
        has = [protocol for protocol in table.protocols if protocol in method.protocols]
        for protocol in has if method.adapts else has[:1]:
            found += [Cell(row, protocol, site, seed) for site in table.sites for seed in seeds]
    if not found:
        names = ", ".join(row.method for row in table.rows)
        raise ConfigError(f"none of the methods ({names}) has any of {', '.join(table.protocols)}")
    return found


def _with_rows(table: TableConfig, labels: Sequence[str]) -> TableConfig:
    """Return the table with the rows of these labels alone.

    Raises:
        ConfigError: no row of this label.
    """
    known = [row.label for row in table.rows]
    for label in labels:
        if label not in known:
            raise ConfigError(unknown_name("row of the table", label, known))
    return table.model_copy(update={"rows": tuple(row for row in table.rows if row.label in labels)})


def site_names(sites: Sequence[str]) -> dict[str, str]:
    """Return the name of each site, its id or the name of its file, and what was given for it.

    Raises:
        ConfigError: two sites of one name.
    """
    found: dict[str, str] = {}
    for given in sites:
        name = Path(given).stem if Path(given).suffix in (".yaml", ".yml") else given
        if name in found:
            raise ConfigError(f"sites: {found[name]} and {given} share the name {name!r}; rename a file")
        found[name] = given
    return found


class _Grid:
    """One comparison while it goes on."""

    def __init__(
        self,
        table: TableConfig,
        volumes: Path,
        weights: str | Path | None,
        statistics: str | Path | None,
        out: Path,
        device: str,
        reset: Reset | None,
        guard: bool,
        overrides: tuple[str, ...],
        only: Sequence[str] | None = None,
    ) -> None:
        self.places = site_names(table.sites)
        table = table.model_copy(update={"sites": tuple(self.places)})
        self.table, self.volumes, self.out, self.device, self.reset = table, volumes, out, device, reset
        self.weights, self.statistics = weights, statistics
        self.overrides = (*overrides, *guard_override(guard))
        self.wanted = cells_of(table if only is None else _with_rows(table, only))
        self.cells = self.wanted
        self.tiles = of_tiles(table)
        if self.tiles and guard:
            raise ConfigError("--guard judges volumes; leave it out for tiles")
        self.known: dict[str, dict[str, Any]] = {}
        self.problems: dict[str, str] = {}

    def run(self, resume: bool, progress: Progress) -> Comparison:
        """Run what is missing, then write everything."""
        check_there(self.volumes)
        self._open(resume)
        done = skipped = told = 0
        with output_lock(self.out):
            for chain in self._chains():
                if all(self._is_done(cell) for cell in chain):
                    skipped += len(chain)
                    told += len(chain)
                    continue
                carry = Carry() if len(chain) > 1 else None
                for cell in chain:
                    progress("cells", told, len(self.wanted))
                    done += self._attempt(cell, carry)
                    told += 1
            progress("cells", len(self.wanted), len(self.wanted))
            files, summary = self._write(progress)
        return Comparison(self.out, summary, tuple(files), done, skipped, tuple(self.problems.items()))

    def _chains(self) -> list[list[Cell]]:
        """Return the cells that must be run together: all sites of a row where state is never reset."""
        chains: dict[tuple[Any, ...], list[Cell]] = {}
        for cell in self.wanted:
            reset = self.reset or self._configs(cell)[1].reset_for(cell.protocol)
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

    def _open(self, resume: bool) -> None:
        """Read what is there and check that it was made with the same settings.

        Raises:
            OutputError: something else is there, or other settings.
        """
        path = self.out / CELLS_FILE
        content = list(self.out.iterdir()) if self.out.is_dir() else []
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
        order = {row.label: place for place, row in enumerate(self.table.rows)}
        return sorted(cells, key=lambda cell: order[cell.row.label])

    def _configs(self, cell: Cell) -> tuple[SiteConfig, PipelineConfig, tuple[str, ...]]:
        overrides = (*self.overrides, *cell.row.overrides)
        pipeline = cell.row.pipeline or self.table.pipeline
        site, config = resolve(self.places[cell.site], pipeline, overrides)
        return site, config, overrides

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
            "weights": None if self.weights is None else sha256(Path(self.weights)),
            "statistics": None if given is None else sha256(Path(given)),
            "configuration": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        }

    def _statistics_of(self, cell: Cell) -> str | Path | None:
        """Return the file of source statistics that was given, for cells that may know of it."""
        return self.statistics if cell.protocol.startswith("Y") else None

    def _is_done(self, cell: Cell) -> bool:
        entry = self.known.get(cell.name)
        return entry is not None and entry["complete"] and RunFolder(self._folder(cell)).complete()

    def _of_first_seed(self) -> list[Cell]:
        """Return the finished cells of the first seed, whose probabilities are kept."""
        return [cell for cell in self.cells if cell.seed == self.table.first_seed and self._is_done(cell)]

    def _folder(self, cell: Cell) -> Path:
        return self.out / CELLS_FOLDER / cell.name

    def _run(self, cell: Cell, carry: Carry | None) -> None:
        """Run a cell and note what it cost; in a chain it is run from its start."""
        entry: dict[str, Any] = {"settings": self._settings(cell), "complete": False}
        self._note(cell, entry)
        watch = _Watch(self.device)
        count = self._adapt_tiles(cell, carry) if self.tiles else self._adapt(cell, carry)
        self._note(cell, entry | {"complete": True, "slices": count} | watch.read())

    def _adapt_tiles(self, cell: Cell, carry: Carry | None) -> int:
        """Run a cell on tiles and return how many were classified."""
        from tesla_med.tasks.tile_runs import adapt_tiles

        folder = self._folder(cell)
        result = adapt_tiles(
            self.places[cell.site],
            self.volumes,
            weights=self.weights,
            statistics=self._statistics_of(cell),
            pipeline=cell.row.pipeline or self.table.pipeline,
            method=cell.row.method,
            protocol=cell.protocol,
            out=folder,
            seed=cell.seed,
            device=self.device,
            reset=self.reset,
            overwrite=folder.exists(),
            overrides=(*self._configs(cell)[2], "reports=[table]"),
            carry=carry,
        )
        return result.tiles

    def _adapt(self, cell: Cell, carry: Carry | None) -> int:
        """Run a cell on volumes and return how many slices they have."""
        folder = self._folder(cell)
        plan = make_plan(
            self.places[cell.site],
            self.volumes,
            weights=self.weights,
            statistics=self._statistics_of(cell),
            pipeline=cell.row.pipeline or self.table.pipeline,
            method=cell.row.method,
            protocol=cell.protocol,
            out=folder,
            seed=cell.seed,
            device=self.device,
            reset=self.reset,
            overrides=(*self._configs(cell)[2], "reports=[table]"),
            save_probs=cell.seed == self.table.first_seed,
        )
        there = folder.exists()
        result = run_plan(
            plan, resume=there and carry is None, overwrite=there and carry is not None, carry=carry
        )
        return sum(item.slices for item in result.results)

    def _note(self, cell: Cell, entry: Mapping[str, Any]) -> None:
        self.known[cell.name] = dict(entry)
        write_json(self.out / CELLS_FILE, self.known)

    # ------------------------------------------------------------ table

    def _write(self, progress: Progress) -> tuple[list[Path], Summary]:
        metric = ACCURACY if self.tiles else DICE
        rows_of = self._tile_rows if self.tiles else self._rows
        rows = [row for cell in self.cells for row in rows_of(cell)]
        progress("tables", 0, 1)
        measured, bins = self._tile_calibration() if self.tiles else self._calibration()
        summary = summarise(
            rows,
            sites=self.table.sites,
            order=list(dict.fromkeys(cell.key for cell in self.cells)),
            baseline=self.table.baseline,
            costs=self._costs(),
            calibration=measured,
            metric=metric,
            classes=self._classes(),
        )
        joined = {key: calibration.joined_bins(items) for key, items in bins.items()}
        summary = replace(summary, reliability=joined)
        path = self.out / "comparison.csv"
        with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, metric.columns)
            writer.writeheader()
            writer.writerows(
                {name: "" if row[name] is None else row[name] for name in metric.columns} for row in rows
            )
        from tesla_med.compare.report import write_report

        more = self._figures()
        files = [path, *write_report(self.out, self.table, summary, rows, self.problems, more)]
        progress("tables", 1, 1)
        return files, summary

    def _classes(self) -> list[str]:
        """Return the names of the classes that are scored."""
        classes = self._configs(self.cells[0])[1].classes
        return [item.name for item in classes if self.tiles or item.value != 0]

    def _figures(self) -> dict[str, bytes]:
        """Return the pictures beyond those of the table, by file name."""
        if not self.table.figures:
            return {}
        from tesla_med.compare import pictures as figures

        pictures: dict[str, bytes] = {}
        for name in self.table.sites:
            cells = [cell for cell in self._of_first_seed() if cell.site == name]
            cells = [cell for cell in cells if cell.protocol == cells[0].protocol]
            site = self._configs(cells[0])[0] if cells else None
            cases = [] if site is None else find_cases(self.volumes, site, other_sites(site)).cases
            cases = [case for case in cases if case.labelled]
            if not cases:
                continue
            folders = {cell.row.label: RunFolder(self._folder(cell)) for cell in cells}
            masked = {label: item for label, item in folders.items() if item.mask(cases[0].name).is_file()}
            if "qualitative" in self.table.figures and masked:
                plan = self._plan(cells[0])
                pictures[f"qualitative_{name}.png"] = figures.qualitative(cases[0], plan, masked)
            if "projection" in self.table.figures:
                plans = {
                    cell.row.label: self._plan(cell, figures.weights_of(folders[cell.row.label], cases[0]))
                    for cell in cells
                }
                found = {label: figures.features_of(cases[0], plan) for label, plan in plans.items()}
                pipeline = next(iter(plans.values())).pipeline
                pictures[f"projection_{name}.png"] = figures.projection(found, pipeline)
            learned = [cell for cell in cells if cell.row.method == "tesla"]
            if "sanity_check" in self.table.figures and learned:
                check = figures.sanity_check(self._plan(learned[0], method="tesla"), cases[:2])
                pictures[f"sanity_check_{name}.png"] = figures.sanity_png(check)
        return pictures

    def _plan(self, cell: Cell, weights: Path | None = None, method: str = "source") -> Plan:
        """Return the plan of a cell, or of prediction with its adapted weights."""
        return make_plan(
            self.places[cell.site],
            self.volumes,
            weights=weights or self.weights,
            pipeline=cell.row.pipeline or self.table.pipeline,
            method=method,
            protocol=cell.protocol if method != "source" else "N-O",
            seed=cell.seed,
            device=self.device,
            overrides=self._configs(cell)[2],
        )

    def _results(self, cell: Cell) -> list[CaseResult]:
        folder = RunFolder(self._folder(cell))
        if not self._is_done(cell):
            return []
        names = json.loads((folder.out / "run.json").read_text(encoding="utf-8"))["cases"]
        records = [folder.record(item["case"]) for item in names]
        return [record for record in records if record is not None]

    def _rows(self, cell: Cell) -> Iterator[dict[str, Any]]:
        for result in self._results(cell):
            common = {
                "site": cell.site,
                "case": result.case,
                "row": cell.row.label,
                "method": cell.row.method,
                "protocol": cell.protocol,
                "seed": cell.seed,
                "status": result.status,
                "used": result.used,
                "seconds": round(result.seconds, 3),
                "slices": result.slices,
            }
            blank = dict.fromkeys(("label", "class", "dice", "dice_source", "hd95_mm", "assd_mm"))
            if not result.scores:
                yield {**common, **blank}
            for score in result.scores:
                figures = {name: getattr(score, name) for name in list(blank)[2:]}
                yield {**common, "label": score.label, "class": score.name, **figures}

    def _tile_rows(self, cell: Cell) -> Iterator[dict[str, Any]]:
        if not self._is_done(cell):
            return
        common = {
            "site": cell.site,
            "row": cell.row.label,
            "method": cell.row.method,
            "protocol": cell.protocol,
            "seed": cell.seed,
        }
        for row in predictions(self._folder(cell) / "predictions.csv"):
            yield common | row

    def _tile_calibration(self) -> tuple[Calibration, Bins]:
        """Return the calibration of the first seed over all labelled tiles."""
        found: Calibration = {}
        bins: Bins = {}
        for cell in self._of_first_seed():
            figures = calibration_of(self._folder(cell) / "report" / "metrics.json")
            if figures is not None:
                bins.setdefault(cell.key, []).append(figures.pop("bins"))
                found[cell.row.label, str(cell.protocol), cell.site] = figures
        return found, bins

    def _costs(self) -> dict[Key, Cost]:
        found: dict[Key, Cost] = {}
        for key in dict.fromkeys(cell.key for cell in self.cells):
            mine = [self.known.get(cell.name, {}) for cell in self.cells if cell.key == key]
            ready = [entry for entry in mine if entry.get("complete") and entry.get("slices")]
            if ready:
                seconds = sum(entry["seconds"] for entry in ready) / sum(entry["slices"] for entry in ready)
                memory = [entry["peak_memory_mib"] for entry in ready if entry["peak_memory_mib"] is not None]
                found[key] = Cost(seconds, max(memory, default=None))
        return found

    def _calibration(self) -> tuple[Calibration, Bins]:
        """Count the region's calibration of the first seed, over one region for all rows of a case."""
        found: Calibration = {}
        bins: Bins = {}
        for name in self.table.sites:
            cells = [cell for cell in self._of_first_seed() if cell.site == name]
            if not cells:
                continue
            sums: dict[Key, calibration.CalibrationCounts] = {}
            for counted in self._counted(cells):
                for key, item in counted.items():
                    sums[key] = sums[key] + item if key in sums else item
            for key, item in sums.items():
                figures = {"ece": item.ece, "brier": item.brier / max(item.voxels, 1)}
                found[key[0], key[1], name] = {**figures, "nll": item.nll / max(item.voxels, 1)}
                bins.setdefault(key, []).append(item.summary()["bins"])
        return found, bins

    def _counted(self, cells: Sequence[Cell]) -> Iterator[dict[Key, calibration.CalibrationCounts]]:
        """Yield the counts of every labelled case by row; cases are read by a few threads."""
        site, pipeline, _ = self._configs(cells[0])

        def count(case: Case) -> dict[Key, calibration.CalibrationCounts]:
            folders = {cell.key: RunFolder(self._folder(cell)) for cell in cells}
            there = {key: folder for key, folder in folders.items() if folder.probs(case.name).is_file()}
            if not there or not case.labelled:
                return {}
            try:
                volume = read_volume(case.image, spacing=site.spacing, index=site.files.series_image)
                truth = read_reference(case, site.files, volume, pipeline.values)
                indices = scoring.class_indices(truth, pipeline)
            except TeslaMedError as error:
                log.info("%s: not among the calibration: %s", case.name, error)
                return {}
            masks = [read_mask(folder.mask(case.name))[0] for folder in there.values()]
            axis = slice_axis(volume.affine, pipeline.preprocessing.orientation)
            region = calibration.calibration_region(
                truth, *masks, dilation=pipeline.report.region_dilation, slice_axis=axis
            )
            found = {}
            for key, folder in there.items():
                probs = np.clip(read_map(folder.probs(case.name), len(pipeline.classes)), 0, 1)
                found[key] = calibration.count_region(probs, indices, region, pipeline.report.bins)
            return found

        cases = find_cases(self.volumes, site, other_sites(site)).cases
        with ThreadPoolExecutor(max_workers=min(READERS, os.cpu_count() or 1)) as pool:
            yield from pool.map(count, cases)


class _Watch:
    """Seconds and the device's highest memory from now on; on the CPU memory is not measured."""

    def __init__(self, device: str) -> None:
        import torch

        free_device_memory()
        self.start = time.perf_counter()
        self.cuda = device != "cpu" and torch.cuda.is_available()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def read(self) -> dict[str, float | None]:
        """Return ``seconds`` and ``peak_memory_mib``."""
        import torch

        memory = torch.cuda.max_memory_allocated() / 2**20 if self.cuda else None
        return {"seconds": time.perf_counter() - self.start, "peak_memory_mib": memory}


def _slug(text: str) -> str:
    """Return a label as a folder name; labels that would share one are told apart by a hash."""
    plain = "".join(letter if letter.isalnum() or letter in "+-._" else "_" for letter in text)
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def check_protocols(names: Sequence[str]) -> tuple[Protocol, ...]:
    """Return the names as protocols.

    Raises:
        ConfigError: an unknown one.
    """
    unknown = [name for name in names if name not in PROTOCOLS]
    if unknown:
        raise ConfigError(f"protocol {unknown[0]!r} is not known. Known: {', '.join(PROTOCOLS)}.")
    return tuple(name for name in PROTOCOLS if name in names)
