"""All methods with one budget and one rule of choice, TeSLA included.

Example::

    python benchmarks/equal_budget.py --task prostate --weights prostate_source_unet.safetensors --out equal
    python benchmarks/equal_budget.py --task prostate --table --out equal

Two blocks. ``restart``: every case starts from the source model, and every method that learns sees 24 batches
of 8 slices, drawn with replacement. ``stream``: state is carried on from case to case; one pass over the
slices of each in batches of 16 as it comes (O), or five passes over the site before anything is predicted
(M). In both, a prediction is normalised by the statistics of its case. Every row starts from the same
scaling of the intensities: that of the training (``trained``), or the one chosen for each case (``chosen``).
There is no guard.

Every method has a grid of six settings: six rates, or three rates and two class priors where it has a prior.
The setting with which a method is reported on a site is the one with the highest mean Dice on the *other*
sites of the task, seed 1; so no label of a site chooses anything that is reported there. Then three seeds.
Cells are kept in ``cells.jsonl`` below ``--out`` and are not run twice; ``--minutes`` stops after the cell in
which they are over, and ``--part 1/4`` takes every fourth cell, so that several processes share the work.
Dice is in percent on the model's grid, largest component kept where the pipeline keeps it.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference import SHARED, SITES, Reader, at_model_mask

from tesla_med.compare.figures import Cost, summarise
from tesla_med.compare.tables import sheets
from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import PipelineConfig, Protocol, Reset, SiteConfig
from tesla_med.engine.driver import Driver
from tesla_med.engine.memory import free_device_memory
from tesla_med.engine.scaling import Chooser
from tesla_med.models.base import default_device, device_name, norm_layers
from tesla_med.models.checkpoint import versions
from tesla_med.models.loading import LoadedModel, load_model
from tesla_med.models.statistics import SourceStatistics, load_statistics
from tesla_med.prepare.stream import SiteImages
from tesla_med.scoring import metrics
from tesla_med.tta.base import METHODS, MethodContext, make_method
from tesla_med.types import Unit

BLOCKS = ("restart", "stream")
SCALINGS = ("trained", "chosen")
SEEDS = 3
RATES, FEW_RATES = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0), (0.3, 1.0, 3.0)
"""Factors of a method's own rate; three where there are two priors, so that every grid has six settings."""
PRIORS: dict[str, tuple[dict[str, Any], ...]] = {
    "shot": ({"marginal_target": "uniform"}, {"marginal_target": "source"}),
    "tesla": ({"marginal_target": "uniform"}, {"marginal_target": "source", "marginal_weight": 3.0}),
    "tesla_s": ({"marginal_target": "uniform"}, {"marginal_target": "source", "marginal_weight": 3.0}),
    "vesta": ({"marginal_target": "uniform"}, {"marginal_target": "source", "marginal_weight": 3.0}),
}
ROWS = (
    *("source", "bn", "tent", "pl", "shot", "cotta", "adacontrast", "opttta"),
    *("ttt_pp", "ttac", "tesla", "tesla_s", "vesta"),
)
FIXED = ("source", "bn")
"""Rows that have no rate."""
RESTART = {"batch_slices": 8, "draw": "replacement", "updates_per_case": 24, "epochs": 1}
STREAM = {"batch_slices": 16, "draw": "ordered", "updates_per_case": None}
EPOCHS = {"O": 1, "M": 5}
RUNS = 3
"""Of ``vesta`` on a case under ``restart``."""
OPTTTA = {
    "restart": {"batch_slices": 9, "first_steps": 1, "later_steps": 1},  # 21 sub-policies: 189 slices a case
    "stream O": {"batch_slices": 2, "first_steps": 1, "later_steps": 5},  # 42, then 3 x 10 a case
    "stream M": {"batch_slices": 2, "first_steps": 1, "later_steps": 25},  # 42, then 3 x 50
}
"""What comes nearest to the slices that the others see; a search has no fewer steps than sub-policies."""
VIEWS = 8
CSV_COLUMNS = (
    "site",
    "case",
    "row",
    "method",
    "protocol",
    "seed",
    "label",
    "dice",
    "dice_source",
    "hd95_mm",
    "assd_mm",
    "status",
    "seconds",
    "slices",
)
CALL_SECONDS = {
    "source": 0.1,
    "bn": 0.2,
    "pl": 0.6,
    "shot": 1.2,
    "tent": 1.4,
    "adacontrast": 2.0,
    "opttta": 2.9,
    "tesla": 3.4,
    "tesla_s": 3.6,
    "vesta": 6.8,
    "cotta": 10.8,
}
"""Of a case of 30 slices under ``restart``, with three processes on one H200; the others: a second."""
Moments = SourceStatistics | None


@dataclass(frozen=True)
class Cell:
    """One method with one setting on one site.

    Attributes:
        block: ``restart`` or ``stream``.
        scaling: ``trained`` or ``chosen``.
        row: method.
        protocol: of the run.
        setting: index in the grid of the method.
        site: id.
        seed: of the method.
        cases: the first so many of the site; 0: all.
    """

    block: str
    scaling: str
    row: str
    protocol: Protocol
    setting: int
    site: str
    seed: int
    cases: int = 0

    @property
    def key(self) -> str:
        """Name among the cells of a folder."""
        about = self.block, self.scaling, self.row, self.protocol, self.setting, self.site, self.seed
        return "/".join(map(str, (*about, *((f"first {self.cases}",) if self.cases else ()))))


# ---------------------------------------------------------------- budget and grid


def grid(row: str, rate: float) -> list[dict[str, Any]]:
    """Return the settings of a method, over its own ones; a single empty one where it has no rate."""
    if row in FIXED:
        return [{}]
    priors = PRIORS.get(row, ({},))
    factors = RATES if len(priors) == 1 else FEW_RATES
    return [{"learning_rate": rate * factor, **prior} for prior, factor in itertools.product(priors, factors)]


def budget(row: str, block: str, protocol: Protocol) -> dict[str, Any]:
    """Return the parameters that give a method the budget of a block."""
    if row == "source":
        return {}
    end = protocol[-1]
    if row == "bn":
        return {"batch_slices": 16, "epochs": 1} if end == "M" else {}
    if row == "opttta":
        return {**OPTTTA["restart" if block == "restart" else f"stream {end}"], "views": VIEWS}
    shared = RESTART if block == "restart" else {**STREAM, "epochs": EPOCHS[end]}
    if row == "vesta":  # its runs share the updates of the others
        runs = RUNS if block == "restart" else 1
        shared = {**shared, "restarts": runs}
        if runs > 1:
            shared["updates_per_case"] = RESTART["updates_per_case"] // runs
    return {**shared, "predict_statistics": "volume"}


def params_of(cell: Cell, pipeline: PipelineConfig) -> dict[str, Any]:
    """Return the parameters of a cell: the pipeline's, the budget, the setting."""
    if cell.row == "source":
        return {}
    own = dict(pipeline.method_params(cell.row, cell.protocol))
    rate = own.get("learning_rate", default_rate(cell.row))
    return {**own, **budget(cell.row, cell.block, cell.protocol), **grid(cell.row, rate)[cell.setting]}


def default_rate(row: str) -> float:
    """Return the rate that a method has of itself."""
    field = METHODS.get(row).Params.model_fields.get("learning_rate")
    return 0.0 if field is None else float(field.default)


def protocols_of(row: str, block: str) -> tuple[Protocol, ...]:
    """Return the protocols of a method in a block."""
    ends = "O" if block == "restart" or row == "source" else "OM"
    return tuple(name for name in METHODS.get(row).protocols if name[-1] in ends)


def first_cells(options: argparse.Namespace, sites: Sequence[str]) -> list[Cell]:
    """Return the cells from which settings are chosen."""
    return [
        Cell(block, scaling, row, protocol, setting, site, 1, 0 if row in FIXED else options.choose_on)
        for block in options.blocks
        for scaling in options.scalings
        for row in options.rows
        for protocol in protocols_of(row, block)
        for setting in range(len(grid(row, 1.0)))
        for site in sites
    ]


def chosen(
    cells: Mapping[str, dict[str, Any]], sites: Sequence[str], cases: int = 0
) -> dict[tuple[str, ...], int]:
    """Return the setting by (block, scaling, row, protocol, site): the best on the other sites, seed 1.

    ``cases`` says how many of each site it is chosen on; 0: all. A method, block or site whose grid is not
    complete on all other sites has none.
    """
    found: dict[tuple[str, ...], int] = {}
    runs = {cell_of(item) for item in cells.values()}
    for about in dict.fromkeys((cell.block, cell.scaling, cell.row, cell.protocol) for cell in runs):
        count = len(grid(about[2], 1.0))
        for site in sites:
            others = [name for name in sites if name != site]
            means = []
            for setting in range(count):
                first = 0 if about[2] in FIXED else cases
                keys = [Cell(*about, setting, name, 1, first).key for name in others]
                if not keys or any(key not in cells for key in keys):
                    break
                means.append(float(np.mean([cells[key]["mean"] for key in keys])))
            if len(means) == count:
                found[(*about, site)] = int(np.argmax(means))
            elif count == 1:
                found[(*about, site)] = 0
    return found


def final_cells(
    cells: Mapping[str, dict[str, Any]], sites: Sequence[str], seeds: int, cases: int = 0
) -> list[Cell]:
    """Return the cells that are reported: the chosen setting on each site, with every seed that matters."""
    result = []
    for (block, scaling, row, protocol, site), setting in chosen(cells, sites, cases).items():
        count = 1 if row in FIXED or (METHODS.get(row).deterministic and block != "restart") else seeds
        result += [Cell(block, scaling, row, protocol, setting, site, seed) for seed in range(1, count + 1)]
    return result


def cell_of(item: Mapping[str, Any]) -> Cell:
    """Return the cell that a line of the file is of."""
    return Cell(**{name: item[name] for name in Cell.__dataclass_fields__ if name in item})


# ---------------------------------------------------------------- running


@dataclass
class Lab:
    """What all cells share: the source model, the sites, what was read of them.

    Attributes:
        pipeline: of the task, as the weights say.
        loaded: the source model.
        moments: of the source's features; None: rows that need them are left out.
        sites: by id.
        volumes: the folder that holds the images.
        options: of the command line.
    """

    pipeline: PipelineConfig
    loaded: LoadedModel
    moments: Moments
    sites: Mapping[str, SiteConfig]
    volumes: Path
    options: argparse.Namespace

    def __post_init__(self) -> None:
        """Make the source method, and a reader of each site."""
        self.device = default_device(self.options.device)
        self.source = make_method("source", self.loaded.model, {}, self.context(0))
        self.readers = {
            name: Reader(site, self.pipeline, self.volumes, self.options.limit)
            for name, site in self.sites.items()
        }
        choice = self.pipeline.scaling
        self.choosers = {name: Chooser(choice, self.source) for name in self.sites}
        self.units: dict[tuple[str, str, str], Unit] = {}
        self.before: dict[tuple[str, str, str], list[float | None]] = {}

    def context(self, seed: int) -> MethodContext:
        """Return what a method is told."""
        told = self.device, seed, self.pipeline.preprocessing.model_range, self.options.precision
        return MethodContext(*told, self.pipeline.predict_batch, statistics=self.moments)

    def unit(self, site: str, scaling: str, ref: Any) -> Unit:
        """Return the images of a case in the scaling of a block."""
        key = site, scaling, ref.name
        if key not in self.units:
            read = self.readers[site](ref)
            self.units[key] = self.choosers[site](read) if scaling == "chosen" else read
        return self.units[key]

    def dice(self, site: str, case: str, probs: torch.Tensor) -> list[float | None]:
        """Return the Dice of every foreground class in [0, 1]."""
        truth, mask = self.readers[site].at_model[case], at_model_mask(probs.cpu(), self.pipeline)
        return [metrics.dice(truth == k, mask == k) for k in range(1, probs.shape[1])]

    def source_dice(self, cell: Cell, unit: Unit) -> list[float | None]:
        """Return the Dice of the unadapted model, in the scaling of the cell."""
        key = cell.site, cell.scaling, unit.ref.name
        if key not in self.before:
            self.before[key] = self.dice(cell.site, unit.ref.name, self.source.predict(unit.images))
        return self.before[key]

    def run(self, cell: Cell) -> dict[str, Any]:
        """Run a cell and return its line."""
        free_device_memory()
        reader, start = self.readers[cell.site], time.perf_counter()
        refs = reader.refs[: cell.cases or None]
        params = params_of(cell, self.pipeline)
        method = make_method(cell.row, self.loaded.model, params, self.context(cell.seed))
        reset: Reset = "case" if cell.block == "restart" else "site"
        driver = Driver(method, cell.protocol, reset)
        if not driver.case_by_case:
            driver.adapt_to_site(SiteImages(refs, lambda ref: self.unit(cell.site, cell.scaling, ref)))
        volumes, passed = [], time.perf_counter() - start
        for ref in refs:
            unit, begin = self.unit(cell.site, cell.scaling, ref), time.perf_counter()
            before = self.source_dice(cell, unit)
            probs = driver.adapt_and_predict(unit.images, unit.fill)
            failed = probs is None
            after = before if probs is None else self.dice(cell.site, ref.name, probs)
            volumes.append(
                {
                    "case": ref.name,
                    "slices": len(unit.images),
                    "dice": after,
                    "dice_source": before,
                    "diverged": failed,
                    "seconds": time.perf_counter() - begin + passed / len(refs),
                }
            )
        slices = [item["slices"] for item in volumes]
        known = [value for item in volumes for value in item["dice"] if value is not None]
        return {
            **{name: getattr(cell, name) for name in Cell.__dataclass_fields__},
            "params": {key: params[key] for key in params if key in self.shown},
            "mean": float(np.mean(known)),
            "passes_per_slice": sum(map(method.passes, slices)) / sum(slices),
            "seconds": time.perf_counter() - start,
            "volumes": volumes,
        }

    shown = (
        "learning_rate",
        "marginal_target",
        "marginal_weight",
        "batch_slices",
        "epochs",
        "updates_per_case",
    )


def every_line(out: Path) -> dict[str, dict[str, Any]]:
    """Return what was written so far by all processes, by key."""
    found = {}
    for path in sorted(out.glob("cells*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                item = json.loads(line)
            except json.JSONDecodeError:  # cut off
                continue
            found[cell_of(item).key] = item
    return found


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a file of JSON lines, whose last one may have been cut off."""
    with path.open("ab+") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            stream.write(b"" if stream.read() == b"\n" else b"\n")
        stream.write(f"{json.dumps(line)}\n".encode())


def work(lab: Lab, options: argparse.Namespace, sites: Sequence[str]) -> None:
    """Run what is missing: the grids, then the chosen settings with every seed."""
    number, parts = (int(item) for item in options.part.split("/"))
    path = options.out / f"cells-{number}-of-{parts}.jsonl"
    end = time.monotonic() + 60 * options.minutes
    for stage in options.stages:
        every = (
            first_cells(options, sites)
            if stage == "grid"
            else final_cells(every_line(options.out), sites, SEEDS, options.choose_on)
        )
        every = sorted(
            (cell for cell in every if cell.row in options.rows),
            key=lambda cell: (cell.seed, -CALL_SECONDS.get(cell.row, 1.0)),
        )  # so that parts are as long, and what is cut off are the last seeds
        mine = [cell for index, cell in enumerate(every) if index % parts == number - 1]
        done = every_line(options.out)
        todo = [cell for cell in mine if cell.key not in done and usable(lab, cell)]
        print(f"{stage}: {len(todo)} cells, about {minutes_of(lab, todo):.0f} minutes", flush=True)
        for cell in todo:
            if time.monotonic() > end:
                print("the time is up; call again to go on", flush=True)
                return
            line = lab.run(cell)
            append_line(path, line)
            print(f"{cell.key}: Dice {100 * line['mean']:.1f}, {line['seconds']:.0f} s", flush=True)


def usable(lab: Lab, cell: Cell) -> bool:
    """Whether there is what a row needs: source statistics under Y, batch norm for bn."""
    return (cell.protocol.startswith("N") or lab.moments is not None) and (
        cell.row != "bn" or bool(norm_layers(lab.loaded.model))
    )


def minutes_of(lab: Lab, cells: Sequence[Cell]) -> float:
    """Return about how long cells take on an H200."""
    seconds = sum(
        CALL_SECONDS.get(cell.row, 1.0)
        * len(lab.readers[cell.site].refs[: cell.cases or None])
        * (2 if cell.protocol[-1] == "M" else 1)
        for cell in cells
    )
    return seconds / 60


# ---------------------------------------------------------------- tables


def tidy(cells: Mapping[str, dict[str, Any]], final: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a comparison, one per case and class."""
    for cell in final:
        for item in cells[cell.key]["volumes"]:
            for label, (dice, before) in enumerate(zip(item["dice"], item["dice_source"], strict=True), 1):
                yield {
                    "site": cell.site,
                    "case": item["case"],
                    "row": cell.row,
                    "method": cell.row,
                    "protocol": cell.protocol,
                    "seed": cell.seed,
                    "label": label,
                    "dice": dice,
                    "dice_source": before,
                    "hd95_mm": None,
                    "assd_mm": None,
                    "status": "diverged" if item["diverged"] else "ok",
                    "seconds": item["seconds"],
                    "slices": item["slices"],
                }


def tables(
    cells: Mapping[str, dict[str, Any]],
    sites: Sequence[str],
    out: Path,
    cases: int = 0,
    shown: Sequence[str] = ROWS,
) -> Iterator[str]:
    """Yield the tables of every block and scaling as Markdown; where all rows are shown, write them, too."""
    every = [
        cell for cell in final_cells(cells, sites, SEEDS, cases) if cell.key in cells and cell.row in shown
    ]
    every.sort(key=lambda cell: (ROWS.index(cell.row), cell.protocol, sites.index(cell.site), cell.seed))
    for block, scaling in dict.fromkeys((cell.block, cell.scaling) for cell in every):
        final = [cell for cell in every if (cell.block, cell.scaling) == (block, scaling)]
        rows = list(tidy(cells, final))
        if set(shown) == set(ROWS):
            with (out / f"{block}-{scaling}.csv").open("w", encoding="utf-8", newline="") as stream:
                writer = csv.DictWriter(stream, CSV_COLUMNS, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
        order = list(dict.fromkeys((cell.row, cell.protocol) for cell in final))
        costs = {}
        for key in order:
            mine = [cells[cell.key] for cell in final if (cell.row, cell.protocol) == key]
            spent = sum(item["seconds"] for line in mine for item in line["volumes"])
            slices = sum(item["slices"] for line in mine for item in line["volumes"])
            costs[key] = Cost(
                spent / slices, float(np.mean([line["passes_per_slice"] for line in mine])), None
            )
        seen = list(dict.fromkeys(cell.site for cell in final))
        yield f"### {block}, {scaling} scaling\n"
        for sheet in sheets(summarise(rows, sites=seen, order=order, baseline="source", costs=costs)):
            yield "| " + " | ".join(sheet.header) + " |"
            yield "|" + "---|" * len(sheet.header)
            yield from ("| " + " | ".join(line) + " |" for line in sheet.body)
            yield ""
        yield "Settings, by site on which they are reported:\n"
        yield from settings(cells, final)
        yield ""


def settings(cells: Mapping[str, dict[str, Any]], final: Sequence[Cell]) -> Iterator[str]:
    """Yield the chosen settings as a table."""
    sites = list(dict.fromkeys(cell.site for cell in final))
    yield "| row | protocol | " + " | ".join(sites) + " |"
    yield "|---|---|" + "---|" * len(sites)
    for row, protocol in dict.fromkeys((cell.row, cell.protocol) for cell in final if cell.row not in FIXED):
        texts = []
        for site in sites:
            mine = [cell for cell in final if (cell.row, cell.protocol, cell.site) == (row, protocol, site)]
            texts.append(setting_text(cells[mine[0].key]["params"]) if mine else "")
        yield f"| {row} | {protocol} | " + " | ".join(texts) + " |"


def setting_text(params: Mapping[str, Any]) -> str:
    """Return rate and prior as text."""
    rate = f"{params['learning_rate']:.3g}"
    return f"{rate}, {params['marginal_target']}" if "marginal_target" in params else rate


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, the sites among them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--task", default="prostate", choices=tuple(SITES))
    parser.add_argument("--sites", nargs="+", default=None, help="ids; default: all but those trained on")
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="folder with one folder a task")
    parser.add_argument("--weights", type=Path, default=None, help="of the source model")
    parser.add_argument("--statistics", type=Path, default=None, help="of its features, for the rows under Y")
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--scalings", nargs="+", choices=SCALINGS, default=list(SCALINGS))
    parser.add_argument("--stages", nargs="+", choices=("grid", "final"), default=["grid", "final"])
    parser.add_argument("--part", default="1/1", help="this share of the cells: 2/4 is the second of four")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no cell after so many")
    parser.add_argument("--limit", type=int, default=None, help="cases a site")
    parser.add_argument("--choose-on", type=int, default=0, help="so many cases a site in the grid; 0: all")
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE over the pipeline")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--table", action="store_true", help="print the tables of what is there, run nothing")
    options = parser.parse_args(words)
    in_training = ("A", "gm2018-NWU", "gm2018-CEI")
    options.sites = options.sites or [name for name in SITES[options.task] if name not in in_training]
    if options.weights is None and not options.table:
        parser.error("--weights is needed to run cells")
    return options


def make_lab(options: argparse.Namespace, sites: Sequence[str]) -> Lab:
    """Return the source model and the sites."""
    loaded = load_model(options.weights, load_pipeline(options.task, tuple(options.set)))
    moments = None if options.statistics is None else load_statistics(options.statistics)[0]
    known = {
        name: load_site(name if name.endswith((".yaml", ".yml")) else f"{options.task}/{name}")
        for name in sites
    }
    return Lab(loaded.pipeline, loaded, moments, known, options.data / options.task, options)


def main(words: Sequence[str] | None = None) -> int:
    """Run cells, or print the tables of those that are there."""
    options = parse(words)
    sites = options.sites
    if options.table:
        found = tables(every_line(options.out), sites, options.out, options.choose_on, options.rows)
        print("\n".join(found))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    lab = make_lab(options, sites)
    about = {
        "device": device_name(lab.device),
        "versions": versions(),
        "command": [sys.argv[0], *sys.argv[1:]],
    }
    print(json.dumps(about), flush=True)
    work(lab, options, sites)
    return 0


if __name__ == "__main__":
    sys.exit(main())
