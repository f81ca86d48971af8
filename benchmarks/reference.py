"""Dice of source, bn and tesla on the development data with the reference weights.

Example::

    python benchmarks/reference.py --device cuda --seeds 5 --out reference.json

Prints the per-volume mean Dice at the model's 256x256 grid (references resized by nearest neighbour)
and on the native grid. Cord figures are the mean of white and grey matter, one volume a site; these are
the 2018 grey-matter challenge's scans, not the SCGM 2016 set. Nothing here is tuned on labels.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import LabelClass
from tesla_med.engine.driver import Driver
from tesla_med.engine.memory import free_device_memory
from tesla_med.engine.postprocess import keep_largest
from tesla_med.engine.predictor import Predictor
from tesla_med.engine.quality import with_estimates
from tesla_med.engine.recalibration import scale_temperature
from tesla_med.io.references import read_reference, read_region_mask
from tesla_med.models.base import default_device, device_name, predicted_class
from tesla_med.models.checkpoint import versions
from tesla_med.models.loading import load_model
from tesla_med.prepare.stream import SiteImages
from tesla_med.scoring import areas, calibration, metrics
from tesla_med.scoring import score as scoring
from tesla_med.tasks._made import Loaded
from tesla_med.tasks.volumes import Volumes
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Ref, Unit

SHARED = Path(__file__).resolve().parents[2] / "shared"
SITES = {
    "prostate": ("D", "E", "A"),
    "spinal_cord": ("gm2018-JUN", "gm2018-CHUM", "gm2018-UCL", "gm2018-NWU", "gm2018-CEI"),
}
WEIGHTS = {
    "prostate": "prostate_source_unet.safetensors",
    "spinal_cord": "spinal_source_unet.safetensors",
}
RECIPES = ("source", "bn", "released", "default")
CHANGED = {"unguarded": ("guard.enabled=false",)}
"""Recipes that are the default one with something switched."""


class Reader:
    """Prepare the cases of a site as runs do, and keep their references on both grids for scoring.

    Args:
        site: the site.
        pipeline: classes and preprocessing.
        volumes: the folder that holds the images.
        limit: the number of cases to take, from the first; None: all.

    Attributes:
        refs: the cases in order, unread.
        native: class indices (I, J, K) of each reference that was read, by case.
        at_model: class indices (N, H, W) of the same at the model's grid.
    """

    def __init__(self, site: Any, pipeline: Any, volumes: Path, limit: int | None) -> None:
        self.site, self.pipeline, self.task = site, pipeline, Volumes(site, pipeline)
        self.refs = list(self.task.refs(self.task.find(volumes, ()), seed=0, size=1))[:limit]
        self.native: dict[str, np.ndarray] = {}
        self.at_model: dict[str, np.ndarray] = {}
        self._units: dict[str, Unit] = {}

    def __call__(self, ref: Ref) -> Unit:
        """Read a case once, with its reference on the native and on the model's grid."""
        if ref.name not in self._units:
            unit = self.task.load(ref)
            loaded: Loaded = unit.content
            reference = read_reference(loaded.case, self.site.files, loaded.volume, self.pipeline.values)
            indices = scoring.class_indices(reference, self.pipeline)
            masked = self.site.region.kind == "mask"
            region = read_region_mask(loaded.case, loaded.volume) if masked else None
            self.native[ref.name] = indices
            self.at_model[ref.name] = self.task.preprocessor(loaded.volume, region, indices).labels.numpy()
            self._units[ref.name] = unit
        return self._units[ref.name]


def mean_dice(reference: np.ndarray, prediction: np.ndarray, classes: int) -> float | None:
    """Return the mean Dice in % over the foreground classes that have one."""
    values = [metrics.dice(reference == k, prediction == k) for k in range(1, classes)]
    known = [value for value in values if value is not None]
    return 100.0 * sum(known) / len(known) if known else None


def at_model_mask(probs: torch.Tensor, pipeline: Any) -> np.ndarray:
    """Return class indices (N, H, W) as the pipeline makes masks, on the model's grid."""
    mask: np.ndarray = predicted_class(probs).numpy().astype(np.uint8)
    return keep_largest(mask) if pipeline.keep_largest else mask


def run_site(
    reader: Reader, method: Any, source: Any, protocol: str, pipeline: Any
) -> Iterator[tuple[dict[str, Any], torch.Tensor, float]]:
    """Yield figures, the probabilities at the model's grid and the temperature for them, case by case."""
    driver = Driver(method, protocol, pipeline.reset_for(protocol))
    options = {"recalibrate": pipeline.recalibrate, "scaling": pipeline.scaling}
    options["largest"] = pipeline.keep_largest
    predictor = Predictor(source, method, driver, pipeline.guard, **options)
    if not driver.case_by_case:
        driver.adapt_to_site(SiteImages(reader.refs, reader, predictor.scaled))
    for ref in reader.refs:
        unit = predictor.scaled(reader(ref))
        outcome = predictor(unit.images, unit.fill)
        verdict, classes = outcome.verdict, outcome.probs.shape[1]
        probs = outcome.probs
        native = unit.content.prepared.restore(probs).argmax(0)
        mask = at_model_mask(probs, pipeline)
        truth, indices = reader.at_model[ref.name], pipeline_indices(classes)
        scores = metrics.score_case(mask, mask, truth, indices, (1.0, 1.0, 1.0), nominal=True)
        predicted = with_estimates(scores, verdict.signals, pipeline.quality)
        raw = outcome.source.argmax(1).numpy()
        yield (
            {
                "case": ref.name,
                "slices": unit.images.shape[0],
                "used": verdict.used,
                "share": verdict.share,
                "reason": verdict.reason,
                "scaling": unit.scaling.name if unit.scaling is not None else "",
                "signals": verdict.signals,
                "dice_256": mean_dice(truth, mask, classes),
                "dice_source_256": mean_dice(truth, raw, classes),
                "dice_source_as_written_256": mean_dice(
                    truth, at_model_mask(outcome.source, pipeline), classes
                ),
                "dice_native": mean_dice(
                    reader.native[ref.name],
                    keep_largest(native) if pipeline.keep_largest else native,
                    classes,
                ),
                "classes": [
                    {
                        name: getattr(item, name)
                        for name in ("label", "dice", "predicted_dice", "predicted_low", "predicted_high")
                    }
                    for item in predicted
                ],
            },
            probs,
            outcome.temperature,
        )


def pipeline_indices(classes: int) -> tuple[LabelClass, ...]:
    """Return classes whose values are their indices."""
    return tuple(LabelClass(value=index, name=str(index)) for index in range(classes))


def calibrate(
    reader: Reader, kept: dict[str, dict[str, torch.Tensor]], bins: int = 15
) -> dict[str, dict[str, float]]:
    """Return region ECE, Brier and NLL by recipe, over one region for all of them.

    Args:
        reader: knows the references at the model's grid.
        kept: recipe -> case -> probabilities (N, L, H, W) at the model's grid.
        bins: of the calibration error.
    """
    sums: dict[str, calibration.CalibrationCounts] = {}
    for case, reference in reader.at_model.items():
        present = {name: probs[case] for name, probs in kept.items() if case in probs}
        if not present:
            continue
        masks = [probs.argmax(1).numpy() for probs in present.values()]
        region = areas.calibration_region(reference, *masks, slice_axis=0)
        for name, probs in present.items():
            array = probs.float().permute(1, 0, 2, 3).numpy()
            item = areas.count_region(array, reference, region, bins)
            sums[name] = sums[name] + item if name in sums else item
    return {
        name: {
            "region_ece": item.ece or 0.0,
            "region_brier": item.brier / max(item.voxels, 1),
            "region_nll": item.nll / max(item.voxels, 1),
        }
        for name, item in sums.items()
    }


def pipeline_of(task: str, recipe: str, overrides: tuple[str, ...]) -> Any:
    """Return the pipeline of a recipe: 'default' is the task's own."""
    suffix = f"_{recipe}" if recipe in ("released", "paper") else ""
    return load_pipeline(task + suffix, (*overrides, *CHANGED.get(recipe, ())))


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every task, site, recipe, protocol and seed that was asked for."""
    rows: list[dict[str, Any]] = []
    device = default_device(options.device)
    for task, sites in SITES.items():
        for site_id in [item for item in sites if not options.sites or item in options.sites]:
            site = load_site(f"{task}/{site_id}")
            loaded = load_model(options.weights / WEIGHTS[task], load_pipeline(task))
            model = loaded.model
            reader = Reader(site, loaded.pipeline, options.data / task, options.limit)
            kept: dict[str, dict[str, torch.Tensor]] = {}
            for recipe in options.recipes:
                for protocol in options.protocols:
                    cell = (task, site_id, recipe, protocol)
                    rows += measure_cell(*cell, model, reader, device, options, kept)
                    save(rows, options)
            if options.calibration:
                figures = calibrate(reader, kept)
                rows += [
                    {"task": task, "site": site_id, "recipe": name, **values}
                    for name, values in figures.items()
                ]
                for name, values in figures.items():
                    print(
                        f"{task:<12}{site_id:<13}{name:<15} region ECE {values['region_ece']:.4f}", flush=True
                    )
                save(rows, options)
    return rows


def measure_cell(
    task: str,
    site: str,
    recipe: str,
    protocol: str,
    model: Any,
    reader: Reader,
    device: torch.device,
    options: argparse.Namespace,
    kept: dict[str, dict[str, torch.Tensor]],
) -> list[dict[str, Any]]:
    """Run one recipe under one protocol on one site, over the seeds."""
    fixed = recipe in ("source", "bn")
    if recipe == "source" and protocol != "N-O":
        return []
    plain = ("guard.enabled=false", "keep_largest=false")
    # A temperature changes no mask: with --calibration both kinds of probabilities come of one run.
    scaled = (f"recalibrate={str(options.calibration and recipe == 'default').lower()}",)
    pipeline = pipeline_of(task, recipe, plain if fixed else (*scaled, *options.set))
    name = recipe if fixed else "tesla"
    rows = []
    first = options.first_seed
    for seed in range(first, first + (1 if fixed else options.seeds)):
        context = MethodContext(
            device, seed, pipeline.preprocessing.model_range, options.precision, pipeline.predict_batch
        )
        free_device_memory()  # the last method's networks and graphs
        method = make_method(name, model, pipeline.method_params(name, protocol), context)
        source = make_method("source", model, {}, context)
        start = time.perf_counter()
        scores = []
        for figures, probs, temperature in run_site(reader, method, source, protocol, pipeline):
            scores.append(figures)
            if options.calibration and seed == first:
                kept.setdefault(f"{recipe} {protocol}", {})[figures["case"]] = probs.half()
            if options.calibration and seed == first and recipe == "default":
                scaled = scale_temperature(probs, temperature) if temperature != 1.0 else probs
                kept.setdefault(f"recalibrated {protocol}", {})[figures["case"]] = scaled.half()
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
            "worst_harm_points": max(
                0.0, *(item["dice_source_as_written_256"] - item["dice_256"] for item in scores)
            ),
            "harmed": sum(item["dice_source_as_written_256"] - item["dice_256"] > 1 for item in scores),
            "volumes": scores,
        }
        rows.append(row)
        print(
            f"{task:<12}{site:<13}{recipe:<10}{protocol:<5}seed {seed}: Dice {row['dice_256']:6.2f} at 256, "
            f"{row['dice_native']:6.2f} native, worst harm {row['worst_harm_points']:5.2f}, "
            f"{row['seconds']:6.1f} s",
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
    audit = audited(rows)
    errors = calibration_table([row for row in rows if "region_ece" in row])
    rows = [row for row in rows if "dice_256" in row]
    lines = [
        f"{'site':<14}{'recipe':<10}{'protocol':<10}{'seeds':>5}{'Dice 256':>10}{'range':>16}"
        f"{'native':>9}{'worst harm':>12}"
    ]
    keys = list(dict.fromkeys((row["site"], row["recipe"], row["protocol"]) for row in rows))
    for key in keys:
        group = [row for row in rows if (row["site"], row["recipe"], row["protocol"]) == key]
        at_model = [row["dice_256"] for row in group]
        native = [row["dice_native"] for row in group]
        span = f"{min(at_model):.2f}-{max(at_model):.2f}"
        lines.append(
            f"{key[0]:<14}{key[1]:<10}{key[2]:<10}{len(group):>5}{np.mean(at_model):>10.2f}{span:>16}"
            f"{np.mean(native):>9.2f}{max(row['worst_harm_points'] for row in group):>12.2f}"
        )
    return "\n".join([*lines, *harmed(rows), *errors, *audit])


def harmed(rows: list[dict[str, Any]]) -> list[str]:
    """Return the volumes that lost more than half a point against the source model, worst first."""
    found = [
        (volume["dice_source_as_written_256"] - volume["dice_256"], row, volume)
        for row in rows
        if row["recipe"] not in ("source", "bn")
        for volume in row["volumes"]
    ]
    return [
        f"below its source: {row['site']} {volume['case']}, {row['recipe']} {row['protocol']} "
        f"seed {row['seed']}: {-loss:.2f} points ({volume['used']} {volume['share']})"
        for loss, row, volume in sorted(found, key=lambda item: -item[0])
        if loss > 0.5
    ]


def calibration_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return region ECE by site and recipe, and each recipe's mean against the release's."""
    sites = list(dict.fromkeys(row["site"] for row in rows))
    names = list(dict.fromkeys(row["recipe"] for row in rows))
    value = {(row["site"], row["recipe"]): row["region_ece"] for row in rows}
    lines = []
    for name in names:
        known = [value[site, name] for site in sites if (site, name) in value]
        cells = "".join(f" {site} {value[site, name]:.3f}" for site in sites if (site, name) in value)
        lines.append(f"region ECE, {name}:{cells}, mean {np.mean(known):.3f}")
    return lines


def audited(rows: list[dict[str, Any]]) -> list[str]:
    """Return correlation and coverage of the predicted Dice, over all sites and by site."""
    found: dict[str, list[dict[str, Any]]] = {"all sites": []}
    for row in rows:
        for volume in row.get("volumes", []):
            for item in volume["classes"]:
                if item["predicted_dice"] is not None and item["dice"] is not None:
                    found["all sites"].append(item)
                    found.setdefault(row["site"], []).append(item)
    lines = []
    for name, items in found.items():
        if len(items) < 3:
            continue
        true, predicted = (np.array([item[key] for item in items]) for key in ("dice", "predicted_dice"))
        inside = [item["predicted_low"] <= item["dice"] <= item["predicted_high"] for item in items]
        spread = true.std() > 1e-9 and predicted.std() > 1e-9
        r = f"{np.corrcoef(true, predicted)[0, 1]:.2f}" if spread else "n/a"
        error = 100 * float(np.abs(true - predicted).mean())
        lines.append(
            f"predicted Dice, {name}: r {r}, mean error {error:.1f} points, "
            f"{100 * float(np.mean(inside)):.0f} % of {len(items)} in their interval"
        )
    return lines


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
        "--recipes",
        nargs="*",
        default=list(RECIPES),
        help=f"source bn released default paper {' '.join(CHANGED)}",
    )
    parser.add_argument("--protocols", nargs="*", default=["N-O"], help="N-O N-M")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=int, default=None, help="first cases of a site only")
    parser.add_argument("--set", nargs="*", default=[], help="key=value over the tesla pipelines")
    parser.add_argument("--calibration", action="store_true", help="region ECE, one region for all recipes")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="table of earlier --out files")
    parser.add_argument("--quick", action="store_true", help="source only, two cases a site")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.quick:
        options.recipes, options.limit = ["source"], 2
    if options.merge:
        read = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        print(summary([row for content in read for row in content["rows"]]))
        return
    print(summary(measure(options)))


if __name__ == "__main__":
    main()
