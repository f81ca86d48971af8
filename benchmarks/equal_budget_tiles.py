"""All methods on real tissue tiles with one budget and one rule of choice, TeSLA included.

Example::

    python benchmarks/equal_budget_tiles.py --device cuda --jobs 8 --weights weights --out equal-tiles
    python benchmarks/equal_budget_tiles.py --table --out equal-tiles

Tiles, networks and shifts are those of ``histology.py``. Two blocks. ``batch``: every row predicts with the
normalisation statistics of the batch at hand; ``running``: with means over the batches so far, where ``bn``
is a method that learns nothing. Under O every method sees each tile once, in batches of 32 as they come, and
predicts a batch after it has learned from it; under M it passes over all tiles five times, in batches of 128,
before anything is predicted. Every tile is predicted once.

Every method has the grid of six settings of ``equal_budget.py``. Tiles are divided into two folds by their
place in the folder. A method is reported under a shift on one fold with the setting that has the fewest
errors under the *other* shifts on the *other* fold, first seed; so no label of a tile chooses anything that
is reported on it. Then three seeds, each with halves and networks of its own. Cells are kept in
``cells.jsonl`` below ``--out`` and are not run twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import histology
import numpy as np
from equal_budget import FIXED, append_line, default_rate, grid

from tesla_med.config.models import PipelineConfig, Protocol
from tesla_med.models.base import default_device, device_name
from tesla_med.models.checkpoint import versions
from tesla_med.tta.base import METHODS

STATISTICS = {"batch": "volume", "running": "running"}
"""Statistics of predictions by block, as the parameter ``predict_statistics`` calls them."""
ROWS = (
    *("source", "bn", "tent", "pl", "shot", "cotta", "adacontrast"),
    *("ttt_pp", "ttac", "tesla", "tesla_s"),
)
BUDGETS = {"O": {"batch_slices": 32, "epochs": 1}, "M": {"batch_slices": 128, "epochs": 5}}
IN_ORDER = {"draw": "ordered", "updates_per_case": None}
ALIKE = {"statistics_warm_up": False, "predict_views": 1}
"""What TeSLA's recipe for tiles has beyond the others, taken from it."""
STILL = 1e-12
"""A rate at which nothing is learned."""
SEEDS, FIRST = 3, 0
TARGETS = "targets.json"
"""What all cells of a folder share: the tiles, by seed, and the networks."""
FOLDS = 2


@dataclass(frozen=True)
class Cell:
    """One method with one setting under one shift.

    Attributes:
        block: ``batch`` or ``running``.
        row: method.
        protocol: of the run.
        setting: index in the grid of the method.
        shift: of the target tiles.
        seed: of the halves, the network and the method.
    """

    block: str
    row: str
    protocol: Protocol
    setting: int
    shift: str
    seed: int

    @property
    def key(self) -> str:
        """Name among the cells of a folder."""
        return "/".join(map(str, vars(self).values()))


Lines = Mapping[str, dict[str, Any]]


def protocols_of(row: str) -> tuple[Protocol, ...]:
    """Return the protocols of a row; the source predicts alike under all."""
    found = METHODS.get(row).protocols
    return found[:1] if row == "source" else found


def method_of(cell: Cell) -> tuple[str, dict[str, Any]]:
    """Return the method of a cell and what its budget and block make of its parameters."""
    budget = BUDGETS[cell.protocol[-1]]
    if cell.row == "source":
        return "source", {}
    if cell.row == "bn" and cell.block == "batch":
        return "bn", budget
    statistics = {"predict_statistics": STATISTICS[cell.block]}
    if cell.row == "bn":
        return "tent", {**budget, **IN_ORDER, **statistics, "learning_rate": STILL}
    alike = ALIKE if cell.row.startswith("tesla") else {}
    return cell.row, {**budget, **IN_ORDER, **statistics, **alike}


def params_of(cell: Cell, pipeline: PipelineConfig) -> dict[str, Any]:
    """Return what a cell changes in the parameters of the pipeline: the budget and the setting."""
    name, params = method_of(cell)
    if cell.row in FIXED:
        return params
    own = pipeline.method_params(name, cell.protocol)
    rate = own.get("learning_rate", default_rate(name))
    return {**params, **grid(cell.row, rate)[cell.setting]}


def measure(cell: Cell, options: argparse.Namespace) -> dict[str, Any]:
    """Adapt, and return what is kept of it: which tiles are right, and the calibration of each fold."""
    name, _ = method_of(cell)
    about = {
        "experiment": "shifts",
        "shift": cell.shift,
        "method": name,
        "protocol": cell.protocol,
        "seed": cell.seed,
        "params": params_of(cell, histology.pipeline_of(options)),
    }
    found = histology.adapted_cell(about, options)
    folds = folds_of(histology.data_of("shifts", cell.seed, options)[2])
    probs, labels = found.probs.numpy(), found.labels.numpy()
    right = found.right.numpy()
    return {
        **vars(cell),
        "params": about["params"],
        "tiles": len(labels),
        "right": np.packbits(right).tobytes().hex(),
        "accuracy": [float(right[folds == fold].mean()) for fold in range(FOLDS)],
        "ece": [histology.ece(probs[folds == fold], labels[folds == fold]) for fold in range(FOLDS)],
        "finite": found.finite,
        "updates": found.updates,
        "seconds": found.seconds,
    }


def folds_of(places: Sequence[int]) -> np.ndarray:
    """Return the fold of each tile by its place in the folder, the same for all seeds."""
    return np.asarray(places) % FOLDS


# ---------------------------------------------------------------- choice


def first_cells(options: argparse.Namespace) -> list[Cell]:
    """Return the cells from which settings are chosen."""
    return [
        Cell(block, row, protocol, setting, shift, FIRST)
        for block in options.blocks
        for row in options.rows
        for protocol in protocols_of(row)
        for setting in range(len(grid(row, 1.0)))
        for shift in options.shifts
    ]


def chosen(
    lines: Lines, about: tuple[str, str, Protocol], shift: str, fold: int, shifts: Sequence[str]
) -> int | None:
    """Return the setting with the fewest errors on the other fold under the other shifts.

    None as long as the grid is not complete.
    """
    others, means = [name for name in shifts if name != shift], []
    for setting in range(len(grid(about[1], 1.0))):
        keys = [Cell(*about, setting, name, FIRST).key for name in others]
        if any(key not in lines for key in keys):
            return None
        means.append(float(np.mean([lines[key]["accuracy"][1 - fold] for key in keys])))
    return int(np.argmax(means))


def final_cells(lines: Lines, options: argparse.Namespace) -> list[Cell]:
    """Return the cells that are reported, with every seed; nothing of a row whose grid is not complete."""
    result = []
    for block in options.blocks:
        for row in options.rows:
            for protocol in protocols_of(row):
                for shift in options.shifts:
                    for fold in range(FOLDS):
                        setting = chosen(lines, (block, row, protocol), shift, fold, options.shifts)
                        if setting is not None:
                            result += [
                                Cell(block, row, protocol, setting, shift, seed)
                                for seed in range(FIRST, SEEDS)
                            ]
    return sorted(dict.fromkeys(result), key=lambda cell: cell.seed)


# ---------------------------------------------------------------- running


def every_line(out: Path) -> dict[str, dict[str, Any]]:
    """Return what was written so far, by key."""
    path, found = out / "cells.jsonl", {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            item = json.loads(text)
        except json.JSONDecodeError:  # cut off
            continue
        found[Cell(*(item[name] for name in Cell.__dataclass_fields__)).key] = item
    return found


def work(options: argparse.Namespace) -> None:
    """Train what is missing, then run the grids, then the chosen settings with every seed."""
    options.out.mkdir(parents=True, exist_ok=True)
    options.until = time.perf_counter() + options.seconds
    seeds = range(FIRST, SEEDS)
    targets = {f"shifts {seed}": histology.data_of("shifts", seed, options)[2] for seed in seeds}
    about = {name: getattr(options, name) for name in ("size", "width", "steps", "set")}
    now = json.dumps(about | {"targets": targets}) + "\n"
    path = options.out / TARGETS
    if path.is_file() and path.read_text(encoding="utf-8") != now:
        raise SystemExit(f"{options.out}: holds cells of other tiles or networks; choose another --out")
    path.write_text(now, encoding="utf-8")
    jobs = [(histology.train, "shifts", seed, options) for seed in seeds]
    for row in histology.results(jobs, options):
        print(histology.line_of(row), flush=True)
    for stage in ("grid", "final"):
        lines = every_line(options.out)
        cells = first_cells(options) if stage == "grid" else final_cells(lines, options)
        todo = [cell for cell in cells if cell.key not in lines]
        print(f"{stage}: {len(todo)} of {len(cells)} cells to do", flush=True)
        for line in histology.results([(measure, cell, options) for cell in todo], options):
            append_line(options.out / "cells.jsonl", line)
            name = Cell(*(line[key] for key in Cell.__dataclass_fields__)).key
            wrong = 100 * (1 - float(np.mean(line["accuracy"])))
            print(f"{name}: error {wrong:.1f} %, {line['seconds']:.1f} s", flush=True)


# ---------------------------------------------------------------- tables


def reported(
    lines: Lines, targets: Mapping[str, list[int]], options: argparse.Namespace, block: str
) -> Iterator[dict[str, Any]]:
    """Yield a row, as of ``histology.py``, for each method, protocol, shift and seed that is complete.

    Each fold comes from the run with the setting that was chosen for it.
    """
    for row in options.rows:
        for protocol in protocols_of(row):
            for shift in options.shifts:
                about = block, row, protocol
                settings = [chosen(lines, about, shift, fold, options.shifts) for fold in range(FOLDS)]
                for seed in range(FIRST, SEEDS):
                    keys = [Cell(block, row, protocol, k or 0, shift, seed).key for k in settings]
                    if None in settings or any(key not in lines for key in keys):
                        continue
                    found = [lines[key] for key in keys]
                    folds = folds_of(targets[f"shifts {seed}"])
                    right = np.where(folds == 0, *(bits_of(line) for line in found))
                    yield {
                        "kind": "cell",
                        "experiment": "shifts",
                        "shift": shift,
                        "method": row,
                        "protocol": protocol,
                        "seed": seed,
                        "error_percent": 100 * (1 - float(right.mean())),
                        "ece": float(np.mean([line["ece"][fold] for fold, line in enumerate(found)])),
                        "seconds": float(np.mean([line["seconds"] for line in found])),
                        "right": "".join(map(str, right)),
                    }


def bits_of(line: Mapping[str, Any]) -> np.ndarray:
    """Return 1 for each tile that is right, 0 for the others."""
    packed = np.frombuffer(bytes.fromhex(line["right"]), np.uint8)
    return np.unpackbits(packed, count=line["tiles"])


def settings_table(lines: Lines, options: argparse.Namespace, block: str) -> Iterator[str]:
    """Yield the chosen settings as a table; where shifts or folds have several, all are named."""
    yield "| method | protocol | settings |"
    yield "|---|---|---|"
    for row in (name for name in options.rows if name not in FIXED):
        for protocol in protocols_of(row):
            pairs = [(shift, fold) for shift in options.shifts for fold in range(FOLDS)]
            found = [chosen(lines, (block, row, protocol), *pair, options.shifts) for pair in pairs]
            texts = [
                setting_text(lines[Cell(block, row, protocol, k, shift, FIRST).key]["params"])
                for k, (shift, _) in zip(found, pairs, strict=True)
                if k is not None
            ]
            if texts:
                yield f"| {row} | {protocol} | {'; '.join(sorted(set(texts)))} |"


def setting_text(params: Mapping[str, Any]) -> str:
    """Return rate and prior as text."""
    rate = f"{params['learning_rate']:.3g}"
    return f"{rate}, {params['marginal_target']}" if "marginal_target" in params else rate


def tables(options: argparse.Namespace) -> Iterator[str]:
    """Yield the tables of every block as Markdown."""
    lines = every_line(options.out)
    targets = json.loads((options.out / TARGETS).read_text(encoding="utf-8"))["targets"]
    for block in options.blocks:
        rows = list(reported(lines, targets, options, block))
        yield f"### Statistics: {block}\n"
        yield "\n".join([*histology.error_table(rows), ""])
        yield "\n".join(histology.paired_table(rows, targets))
        yield from settings_table(lines, options, block)
        yield ""


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = histology.parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the cells")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--blocks", nargs="+", choices=tuple(STATISTICS), default=list(STATISTICS))
    parser.add_argument(
        "--shifts", nargs="+", choices=tuple(histology.SHIFTS), default=list(histology.SHIFTS)
    )
    parser.add_argument("--table", action="store_true", help="print the tables of what is there, run nothing")
    parser.add_argument("--quick", action="store_true", help="tiny network and tiles, two shifts, three rows")
    options = parser.parse_args(words)
    if options.quick:
        options.size, options.width, options.steps, options.limit = 64, 0.25, 3, 24
        options.shifts, options.rows, options.blocks = (
            ["gamma", "noise"],
            ["source", "bn", "tent"],
            ["running"],
        )
    return options


def main(words: Sequence[str] | None = None) -> int:
    """Run cells, or print the tables of those that are there."""
    options = parse(words)
    if not options.table:
        about = {
            "device": device_name(default_device(options.device)),
            "versions": versions(),
            "command": [sys.argv[0], *sys.argv[1:]],
        }
        print(json.dumps(about), flush=True)
        work(options)
    print("\n".join(tables(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
