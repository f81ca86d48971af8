"""Dice of source, bn and tesla on the development data with the reference weights.

Example::

    python benchmarks/reference.py --device cuda --seeds 5 --out reference.json

Prints the per-volume mean Dice at the model's 256x256 grid (references resized by nearest neighbour)
and on the native grid. Cord figures are the mean of white and grey matter, one volume a site; these are
the 2018 grey-matter challenge's scans, not the SCGM 2016 set. Nothing here is tuned on labels.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tesla_med import metrics, scoring
from tesla_med.cases import find_cases
from tesla_med.configfiles import load_pipeline, load_site
from tesla_med.datasets import CaseLoader, LoadedCase, SiteSlices
from tesla_med.driver import Driver
from tesla_med.io import read_reference
from tesla_med.models.base import default_device
from tesla_med.models.checkpoint import versions
from tesla_med.models.loading import load_model
from tesla_med.plan import device_name
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Case

SHARED = Path(__file__).resolve().parents[2] / "shared"
SITES = {
    "prostate": ("D", "E"),
    "spinal_cord": ("gm2018-JUN", "gm2018-CHUM", "gm2018-UCL", "gm2018-NWU", "gm2018-CEI"),
}
WEIGHTS = {
    "prostate": "prostate_source_unet.safetensors",
    "spinal_cord": "spinal_source_unet.safetensors",
}
RECIPES = ("source", "bn", "released", "default")


class Reader(CaseLoader):
    """Prepare cases as the runs do, and keep references on both grids for scoring."""

    def __init__(self, site: Any, pipeline: Any) -> None:
        super().__init__(site, pipeline)
        self.pipeline = pipeline
        self.cache: dict[str, LoadedCase] = {}
        self.native: dict[str, np.ndarray] = {}
        self.at_model: dict[str, np.ndarray] = {}

    def __call__(self, case: Case) -> LoadedCase:
        """Read a case once, with its reference on the native and on the model's grid."""
        if case.name not in self.cache:
            loaded = super().__call__(case)
            reference = read_reference(case, self.site.files, loaded.volume, self.pipeline.values)
            indices = scoring.class_indices(reference, self.pipeline)
            region = None
            if self.site.region.kind == "mask":
                from tesla_med.io import read_region_mask

                region = read_region_mask(case, loaded.volume)
            labels = self.preprocessor(loaded.volume, region, indices).labels
            self.native[case.name] = indices
            self.at_model[case.name] = labels.numpy()
            self.cache[case.name] = loaded
        return self.cache[case.name]


def mean_dice(reference: np.ndarray, prediction: np.ndarray, classes: int) -> float | None:
    """Return the mean Dice in % over the foreground classes that have one."""
    values = [metrics.dice(reference == k, prediction == k) for k in range(1, classes)]
    known = [value for value in values if value is not None]
    return 100.0 * sum(known) / len(known) if known else None


def run_site(
    reader: Reader, cases: tuple[Case, ...], method: Any, protocol: str, reset: str
) -> Iterator[dict[str, Any]]:
    """Yield Dice at the model's grid and on the native grid, case by case."""
    driver = Driver(method, protocol, reset)
    if not driver.case_by_case:
        driver.adapt_to_site(SiteSlices(cases, reader))
    for case in cases:
        loaded = reader(case)
        images = loaded.prepared.images
        if driver.case_by_case:
            driver.adapt_to_case(images)
        probs = method.predict(images)
        classes = probs.shape[1]
        yield {
            "case": case.name,
            "slices": images.shape[0],
            "dice_256": mean_dice(reader.at_model[case.name], probs.argmax(1).numpy(), classes),
            "dice_native": mean_dice(
                reader.native[case.name], loaded.prepared.restore(probs).argmax(0), classes
            ),
        }


def pipeline_of(task: str, recipe: str, overrides: tuple[str, ...]) -> Any:
    """Return the pipeline of a recipe: 'default' is the task's own."""
    suffix = f"_{recipe}" if recipe in ("released", "paper") else ""
    return load_pipeline(task + suffix, overrides)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every task, site, recipe, protocol and seed that was asked for."""
    rows: list[dict[str, Any]] = []
    device = default_device(options.device)
    for task, sites in SITES.items():
        for site_id in [item for item in sites if not options.sites or item in options.sites]:
            site = load_site(f"{task}/{site_id}")
            base = load_pipeline(task)
            reader = Reader(site, base)
            found = find_cases(options.data / task, site)
            cases = found.cases[: options.limit]
            model = load_model(options.weights / WEIGHTS[task], base).model
            for recipe in options.recipes:
                for protocol in options.protocols:
                    cell = (task, site_id, recipe, protocol)
                    rows += measure_cell(*cell, model, reader, cases, device, options)
                    save(rows, options)
    return rows


def measure_cell(
    task: str,
    site: str,
    recipe: str,
    protocol: str,
    model: Any,
    reader: Reader,
    cases: tuple[Case, ...],
    device: torch.device,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Run one recipe under one protocol on one site, over the seeds."""
    fixed = recipe in ("source", "bn")
    if recipe == "source" and protocol != "N-O":
        return []
    pipeline = pipeline_of(task, recipe, () if fixed else tuple(options.set))
    name = recipe if fixed else "tesla"
    rows = []
    for seed in range(1, (1 if fixed else options.seeds) + 1):
        context = MethodContext(
            device, seed, pipeline.preprocessing.model_range, options.precision, pipeline.predict_batch
        )
        gc.collect()  # the last method's networks and graphs
        method = make_method(name, model, pipeline.method_params(name, protocol), context)
        start = time.perf_counter()
        scores = list(run_site(reader, cases, method, protocol, pipeline.reset_for(protocol)))
        row = {
            "task": task,
            "site": site,
            "recipe": recipe,
            "protocol": protocol,
            "seed": seed,
            "cases": len(scores),
            "slices": sum(item["slices"] for item in scores),
            "seconds": time.perf_counter() - start,
            "dice_256": float(np.mean([item["dice_256"] for item in scores])),
            "dice_native": float(np.mean([item["dice_native"] for item in scores])),
            "volumes": scores,
        }
        rows.append(row)
        print(
            f"{task:<12}{site:<13}{recipe:<10}{protocol:<5}seed {seed}: Dice {row['dice_256']:6.2f} at 256, "
            f"{row['dice_native']:6.2f} native, {row['seconds']:6.1f} s",
            flush=True,
        )
    return rows


def save(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Write what has been measured so far, so that a run cut short keeps it."""
    if options.out is None:
        return
    content = {
        "command": " ".join(["python", "benchmarks/reference.py", *sys.argv[1:]]),
        "device": device_name(default_device(options.device)),
        "precision": options.precision,
        "versions": versions(),
        "rows": rows,
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def summary(rows: list[dict[str, Any]]) -> str:
    """Return mean and range over seeds as a table."""
    lines = [
        f"{'site':<14}{'recipe':<10}{'protocol':<10}{'seeds':>5}{'Dice 256':>10}{'range':>16}{'native':>9}"
    ]
    keys = list(dict.fromkeys((row["site"], row["recipe"], row["protocol"]) for row in rows))
    for key in keys:
        group = [row for row in rows if (row["site"], row["recipe"], row["protocol"]) == key]
        at_model = [row["dice_256"] for row in group]
        native = [row["dice_native"] for row in group]
        span = f"{min(at_model):.2f}-{max(at_model):.2f}"
        lines.append(
            f"{key[0]:<14}{key[1]:<10}{key[2]:<10}{len(group):>5}{np.mean(at_model):>10.2f}{span:>16}"
            f"{np.mean(native):>9.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--data", type=Path, default=SHARED / "data", help="folder of prostate/, spinal_cord/"
    )
    parser.add_argument("--weights", type=Path, default=SHARED / "reference", help="folder of the weights")
    parser.add_argument("--sites", nargs="*", default=[], help="site ids; default all")
    parser.add_argument(
        "--recipes", nargs="*", default=list(RECIPES), help="source bn released default paper"
    )
    parser.add_argument("--protocols", nargs="*", default=["N-O"], help="N-O N-M")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 1 to this")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=int, default=None, help="first cases of a site only")
    parser.add_argument("--set", nargs="*", default=[], help="key=value over the tesla pipelines")
    parser.add_argument("--quick", action="store_true", help="source only, two cases a site")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.quick:
        options.recipes, options.limit = ["source"], 2
    print(summary(measure(options)))


if __name__ == "__main__":
    main()
