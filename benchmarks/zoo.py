"""Adaptation over many source models: what it gains and costs from each, on each site.

Example::

    python benchmarks/zoo.py --device cuda --precision bfloat16 --out zoo --seeds 3
    python benchmarks/zoo.py --device cpu --quick --out zoo-quick
    python benchmarks/zoo.py --table --out zoo

Source models are trained (seeded) and adapted one after the other, N-O. What is finished is kept below
``--out``, one JSON file a model and seed, so that an interrupted run goes on where it was; ``--models``
takes some of them. Weights are kept too, unless ``--forget`` is given. ``--quick`` does the same with small
networks on generated scanners. Labels are read after the masks, and choose nothing.

Each volume is predicted by the source, the source under its own statistics (bn), the released recipe, the
default recipe, and the default recipe without the guard, all from the scaling that was chosen for the
volume. Dice is in percent at the model's grid with the pipeline's largest component; a loss is against the
source's mask as it is written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from reference import SHARED, WEIGHTS, Reader, at_model_mask, mean_dice

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.demo.recipes import RECIPES
from tesla_med.demo.volumes import make_site, preset
from tesla_med.engine.driver import Driver
from tesla_med.engine.guard import VERDICTS, candidate_of, judge, supports_of
from tesla_med.engine.memory import free_device_memory
from tesla_med.engine.predictor import Outcome, Predictor
from tesla_med.engine.prior import nearness, prior_of
from tesla_med.engine.quality import SUPPORT, predicted_dice
from tesla_med.models.base import default_device, device_name, norm_layers
from tesla_med.models.checkpoint import steadiness_of, versions
from tesla_med.models.loading import LoadedModel, load_model
from tesla_med.prepare.stream import ahead
from tesla_med.scoring import metrics
from tesla_med.training.train import WEIGHTS as SOURCE
from tesla_med.training.train import train_source
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Scaling

STEPS, QUICK_STEPS = 8000, 300
STEP_SECONDS, VOLUME_SECONDS = 0.04, 5.0
"""Of a training step and of a volume under all recipes, on one H200 in bfloat16."""
ARMS = ("source", "bn", "released", "unguarded", "default")
LOSSES = (1.0, 2.0, 5.0)
ALL_CANDIDATES = "guard.candidates=[source, own, half, part, mixed, adapted]"
PREDICTED = ("dice", "predicted_dice", "predicted_low", "predicted_high")
LOW, HIGH = 10.0, 50.0
"""Percent of Dice: a volume is lost if it ends below the first where a candidate was above the second."""


@dataclass(frozen=True)
class Model:
    """One source model.

    Attributes:
        task: pipeline.
        sites: trained on; none: the reference weights.
        judged: sites adapted to.
        changes: overrides of the training.
    """

    task: str
    sites: tuple[str, ...]
    judged: tuple[str, ...]
    changes: tuple[str, ...] = ()


PROSTATE = ("prostate", ("A",), ("D", "E"))
CORD = ("gm2018-UCL", "gm2018-CHUM", "gm2018-JUN")
DYNUNET = (
    "model.name=monai",
    "model.params={class_name: DynUNet, divisor: 16, arguments: {kernel_size: [3, 3, 3, 3, 3], "
    "strides: [1, 2, 2, 2, 2], upsample_kernel_size: [2, 2, 2, 2], filters: [32, 64, 128, 256, 320], "
    "norm_name: [INSTANCE, {affine: true}]}}",
)
MODELS = {
    "none": Model(*PROSTATE, ("train.augment=none",)),
    "mild": Model(*PROSTATE, ("train.augment=mild",)),
    "robust": Model(*PROSTATE),
    "robust, instance norm": Model(*PROSTATE, ("model.params.norm=instance",)),
    "robust, group norm": Model(*PROSTATE, ("model.params.norm=group",)),
    "robust, MONAI DynUNet": Model(*PROSTATE, DYNUNET),
    "robust, half width": Model(*PROSTATE, ("model.params.width=32",)),
    "robust, from UCL": Model("prostate", ("D",), ("A", "E")),
    "robust, cord": Model("spinal_cord", ("gm2018-NWU", "gm2018-CEI"), CORD),
    "reference": Model("prostate", (), ("D", "E")),
    "reference, cord": Model("spinal_cord", (), CORD),
}
QUICK = {
    "width": "model.params.width=8",
    "half": "model.params.width=4",
    "size": "preprocessing.size=[64,64]",
    "filters": ("filters: [32, 64, 128, 256, 320]", "filters: [8, 16, 16, 16, 16]"),
    "train": ("train.batch_size=8", "train.learning_rate=0.005", "train.validate_every=1000"),
}
QUICK_SITES = {"prostate": ("source", "easy", "hard"), "spinal_cord": ("source", "easy", "hard")}


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True)
class Place:
    """Where models are trained and judged.

    Attributes:
        sites: by task and id.
        volumes: folder that holds the images of a task.
        judged: ids by model.
        common: overrides of every pipeline.
    """

    sites: dict[tuple[str, str], SiteConfig]
    volumes: dict[str, Path]
    judged: dict[str, tuple[str, ...]]
    common: tuple[str, ...] = ()


def real(options: argparse.Namespace) -> Place:
    """Return the real sites."""
    names = {(model.task, site) for model in MODELS.values() for site in (*model.sites, *model.judged)}
    sites = {(task, site): load_site(f"{task}/{site}") for task, site in names}
    volumes = {task: options.data / task for task in ("prostate", "spinal_cord")}
    return Place(sites, volumes, {name: model.judged for name, model in MODELS.items()})


def generated(options: argparse.Namespace) -> Place:
    """Write generated sites below ``--out`` and return them."""
    sites, volumes = {}, {}
    for task, names in QUICK_SITES.items():
        folder = options.out / "generated" / task
        for index, name in enumerate(names):
            count = options.volumes if name != "source" else options.volumes + 3
            if not (folder / name).is_dir():
                make_site(folder / name, task, preset(task, name), count, index)
            about = {"pipeline": task, "institution": name, **RECIPES[task].describe(name)}
            path = folder / f"{name}.yaml"
            path.write_text(yaml.safe_dump(about), encoding="utf-8")
            sites[task, name] = load_site(str(path))
        volumes[task] = folder
    judged = dict.fromkeys(MODELS, ("easy", "hard"))
    return Place(sites, volumes, judged, (QUICK["size"],))


def pipeline_for(model: Model, options: argparse.Namespace, place: Place) -> PipelineConfig:
    """Return the pipeline that a model is trained with."""
    changes: list[str] = []
    for text in model.changes:
        quick = text.replace(*QUICK["filters"]) if options.quick else text
        changes.append(QUICK["half"] if options.quick and text.startswith("model.params.width") else quick)
    narrow = options.quick and not any(
        text.startswith(("model.name", "model.params.width")) for text in changes
    )
    return load_pipeline(
        model.task,
        (
            *place.common,
            *((QUICK["width"],) if narrow else ()),
            *(QUICK["train"] if options.quick else ()),
            f"train.steps={options.steps}",
            f"precision={options.precision}",
            *changes,
        ),
    )


def weights_of(name: str, seed: int, options: argparse.Namespace, place: Place) -> Path:
    """Return the weights of a model, trained if they are not there yet."""
    model = MODELS[name]
    if not model.sites:
        return Path(options.weights / WEIGHTS[model.task])
    out = options.out / "weights" / f"{slug(name)}-{seed}"
    sites = ("source",) if options.quick else model.sites
    trained = [place.sites[model.task, site] for site in sites]
    if not (out / "train.json").is_file():
        pipeline = pipeline_for(model, options, place)
        train_source(
            pipeline, trained, place.volumes[model.task], out, seed=seed, device=options.device, resume=True
        )
    return out / SOURCE


def slug(name: str) -> str:
    """Return a name as a file name."""
    return name.replace(", ", "-").replace(" ", "-")


class Watched(Predictor):
    """A predictor that keeps the masks the guard chose from, by candidate and view."""

    masks: dict[str, torch.Tensor]

    def watch(self) -> None:
        """Keep the masks that the guard looks at from now on."""
        self.masks = {}
        look = self.guard.look

        def keeping(*images: torch.Tensor) -> Any:
            signals, self.masks = look(*images)
            return signals, self.masks

        self.guard.look = keeping


def volumes_of(
    reader: Reader,
    pipeline: PipelineConfig,
    released: PipelineConfig,
    loaded: LoadedModel,
    options: argparse.Namespace,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of every volume of a site under every recipe."""
    device, steady = default_device(options.device), steadiness_of(loaded.card)

    def method(name: str, of: PipelineConfig) -> Any:
        params = of.method_params(name, "N-O") if name != "source" else {}
        told = device, seed, of.preprocessing.model_range, options.precision, of.predict_batch
        return make_method(name, loaded.model, params, MethodContext(*told))

    source, ours = method("source", pipeline), method(options.method or pipeline.method, pipeline)
    theirs = method("tesla", released)
    about = {"scaling": pipeline.scaling, "largest": pipeline.keep_largest, "steadiness": steady}
    about["prior"] = prior_of(loaded.card)
    driver = Driver(ours, "N-O", "case", largest=pipeline.keep_largest)
    predictor = Watched(source, ours, driver, pipeline.guard, **about)
    predictor.watch()
    other = Driver(theirs, "N-O", "case")
    for ref, read in zip(reader.refs, ahead(reader.refs, reader, 2), strict=True):
        start = time.perf_counter()
        unit = predictor.scaled(read)
        outcome = predictor(unit.images, unit.fill)
        probs = None if options.without_released else other.adapt_and_predict(unit.images)
        row = figures(reader.at_model[ref.name], outcome, predictor.masks, probs, pipeline, steady)
        chosen = unit.scaling or Scaling("", "", {})
        about = {"case": ref.name, "scaling": chosen.name, "scaling_signals": dict(chosen.signals)}
        yield about | row | {"seconds": time.perf_counter() - start}


def figures(
    truth: np.ndarray,
    outcome: Outcome,
    masks: dict[str, torch.Tensor],
    released: torch.Tensor | None,
    pipeline: PipelineConfig,
    steady: tuple[float, float],
) -> dict[str, Any]:
    """Return what is said of one volume, the Dice of every recipe and of every candidate included."""
    classes = outcome.probs.shape[1]

    def mask_of(probs: torch.Tensor) -> np.ndarray:
        return at_model_mask(probs.cpu(), pipeline)

    return {
        "signals": outcome.verdict.signals,
        "dice": {
            "source": mean_dice(truth, mask_of(outcome.source), classes),
            "released": None if released is None else mean_dice(truth, mask_of(released), classes),
        },
        "candidates": {
            name: candidate(truth, masks, name, classes, steady) for name in masks if "@" not in name
        },
    }


def candidate(
    truth: np.ndarray, masks: dict[str, torch.Tensor], name: str, classes: int, steady: tuple[float, float]
) -> dict[str, Any]:
    """Return the Dice of a candidate's mask and, by class, Dice and support."""
    mask, supports = masks[name].cpu().numpy(), supports_of(masks, name, classes, steady)
    return {
        "dice": mean_dice(truth, mask, classes),
        "classes": [
            {"dice": metrics.dice(truth == k, mask == k), "support": supports.get(SUPPORT.format(k))}
            for k in range(1, classes)
        ],
    }


def judged(row: dict[str, Any], pipeline: PipelineConfig) -> dict[str, Any]:
    """Return the row with the verdict of a pipeline's guard and its predicted Dice.

    Both follow from what is kept of the volume, so that thresholds can be changed without a new run.
    """
    verdict = judge(row["signals"], pipeline.guard)
    quality = pipeline.quality.model_copy(update={"source_dice": row["source_dice"]})
    taken, found = candidate_of(verdict), row["candidates"]
    dice = row["dice"] | {"default": found[taken]["dice"], "unguarded": found["adapted"]["dice"]}
    if "own" in found:
        dice["bn"] = found["own"]["dice"]
    near = nearness(row["signals"], taken, pipeline.guard.farthest)
    estimates = [
        (item["dice"], predicted_dice(near * item["support"], quality))
        for item in found[taken]["classes"]
        if item["dice"] is not None and item["support"] is not None
    ]
    classes = [
        {"dice": true, "predicted_dice": item.dice, "predicted_low": item.low, "predicted_high": item.high}
        for true, item in estimates
        if item is not None
    ]
    about = {"taken": taken, "trusted": verdict.trusted, "reason": verdict.reason}
    return row | about | {"dice": dice, "classes": classes}


def measure(name: str, seed: int, options: argparse.Namespace, place: Place) -> dict[str, Any]:
    """Return the figures of one model with one seed on all its sites."""
    model, start = MODELS[name], time.perf_counter()
    path = weights_of(name, seed, options, place)
    trained = time.perf_counter() - start
    quick = ("predict_batch=32", *place.common)
    base = load_pipeline(model.task, (*quick, *options.set, ALL_CANDIDATES))
    loaded = load_model(path, base)
    pipeline = loaded.pipeline
    released = load_pipeline(f"{model.task}_released", quick)
    usual = load_pipeline(model.task, options.set)
    rows = []
    for site in place.judged[name]:
        free_device_memory()
        reader = Reader(place.sites[model.task, site], pipeline, place.volumes[model.task], options.limit)
        for row in volumes_of(reader, pipeline, released, loaded, options, seed):
            about = {"model": name, "seed": seed, "site": site, "source_dice": pipeline.quality.source_dice}
            rows.append({**about, **row})
            print(f"{name} {seed} {site} {row['case']}: {shown(judged(rows[-1], usual))}", flush=True)
    if options.forget and model.sites:
        path.unlink()
    return {
        "command": " ".join(["python", "benchmarks/zoo.py", *sys.argv[1:]]),
        "device": device_name(default_device(options.device)),
        "versions": versions(),
        "trained_seconds": trained,
        "seconds": time.perf_counter() - start,
        "batch_norm": bool(norm_layers(loaded.model)),
        "volumes": rows,
    }


def shown(row: dict[str, Any]) -> str:
    """Return the Dice of a volume by recipe, in one line."""
    parts = [f"{arm} {value:.1f}" for arm, value in row["dice"].items() if value is not None]
    return ", ".join(parts) + f" ({row['taken']}{'; ' + row['scaling'] if row['scaling'] else ''})"


# ---------------------------------------------------------------- tables


def known(rows: Sequence[dict[str, Any]], arm: str) -> list[float]:
    """Return the Dice of a recipe where it exists."""
    return [row["dice"][arm] for row in rows if row["dice"].get(arm) is not None]


def losses(rows: Sequence[dict[str, Any]], arm: str) -> list[float]:
    """Return by how much volumes end below their own source."""
    pairs = [(row["dice"]["source"], row["dice"].get(arm)) for row in rows]
    return [before - after for before, after in pairs if before is not None and after is not None]


def lost(rows: Sequence[dict[str, Any]]) -> int:
    """Return how many volumes the default recipe leaves without a mask where a candidate had one."""
    best = [max(item["dice"] or 0.0 for item in row["candidates"].values()) for row in rows]
    ends = [row["dice"]["default"] or 0.0 for row in rows]
    return sum(end < LOW and top > HIGH for end, top in zip(ends, best, strict=True))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return one line per model and site: means over volumes and seeds, losses and counts."""
    heads = ["model", "site", "seeds", *ARMS, "worst", *(f"> {x:g}" for x in LOSSES), "lost", "not trusted"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for model, site in dict.fromkeys((row["model"], row["site"]) for row in rows):
        group = [row for row in rows if (row["model"], row["site"]) == (model, site)]
        means = [f"{np.mean(values):.1f}" if (values := known(group, arm)) else "" for arm in ARMS]
        down = losses(group, "default")
        counts = [str(sum(value > limit for value in down)) for limit in LOSSES]
        untrusted = str(sum(not row["trusted"] for row in group))
        seeds = str(len({row["seed"] for row in group}))
        cells = [model, site, seeds, *means, f"{max(0.0, *down):.1f}", *counts, str(lost(group)), untrusted]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def audit(rows: Sequence[dict[str, Any]]) -> str:
    """Return how well the predicted Dice did, one line per model and site and one for all."""
    lines = ["| model | site | pairs | r | mean error | in the interval |", "|---|---|---|---|---|---|"]
    keys = [*dict.fromkeys((row["model"], row["site"]) for row in rows), ("all", "")]
    for model, site in keys:
        group = [row for row in rows if model == "all" or (row["model"], row["site"]) == (model, site)]
        pairs = np.array(
            [
                [item[key] for key in PREDICTED]
                for row in group
                for item in row["classes"]
                if item["dice"] is not None and item["predicted_dice"] is not None
            ]
        )
        if not len(pairs):
            continue
        true, predicted, low, high = pairs.T
        spread = len(pairs) > 2 and true.std() > 1e-9 and predicted.std() > 1e-9
        r = f"{np.corrcoef(true, predicted)[0, 1]:.2f}" if spread else ""
        error = f"{100 * np.abs(true - predicted).mean():.1f}"
        inside = f"{100 * ((true >= low) & (true <= high)).mean():.0f} %"
        lines.append(f"| {model} | {site} | {len(pairs)} | {r} | {error} | {inside} |")
    return "\n".join(lines)


def steadiest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of every volume of a model the seed whose adapted mask stays most when slices are zoomed.

    It is what restarts do, where the seeds are those of the adaptation alone.
    """
    best: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["model"], row["site"], row["case"]
        steady = row["signals"]["consistency_adapted"]
        if key not in best or steady > best[key]["signals"]["consistency_adapted"]:
            best[key] = row
    return list(best.values())


def candidates(rows: Sequence[dict[str, Any]]) -> str:
    """Return the mean Dice of every candidate by model and site, of the best of each volume, and of VeSTA's.

    ``chosen`` is the source under its own statistics or half way to them, whichever mask stays more when
    slices are zoomed; a candidate without Dice counts as 0. The last line is the mean over models and sites.
    """
    names = [*VERDICTS, "best", "chosen"]
    lines = ["| model | site | " + " | ".join(names) + " |", "|---|---|" + "---|" * len(names)]
    every: dict[str, list[float]] = {name: [] for name in names}
    for key in dict.fromkeys((row["model"], row["site"]) for row in rows):
        group = [row for row in rows if (row["model"], row["site"]) == key]
        cells = []
        for name in names:
            values = [value for row in group if (value := candidate_dice(row, name)) is not None]
            cells.append(f"{np.mean(values):.1f}" if values else "")
            if values and "own" in group[0]["candidates"]:
                every[name].append(float(np.mean(values)))
        lines.append("| " + " | ".join([*key, *cells]) + " |")
    means = [f"{np.mean(values):.1f}" if values else "" for values in every.values()]
    return "\n".join([*lines, "| with batch norm, mean | | " + " | ".join(means) + " |"])


def candidate_dice(row: dict[str, Any], name: str) -> float | None:
    """Return the Dice of a candidate of a volume, 0 where it has none; None without such a candidate."""
    found = row["candidates"]
    if name == "best":
        return max(item["dice"] or 0.0 for item in found.values())
    if name == "chosen":
        if "own" not in found:
            return None
        steady = [row["signals"][f"consistency_{item}"] for item in ("half", "own")]
        name = "half" if steady[0] >= steady[1] else "own"
    return (found[name]["dice"] or 0.0) if name in found else None


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return all tables, and what holds over all models and sites."""
    groups = [
        [row for row in rows if (row["model"], row["site"]) == key]
        for key in dict.fromkeys((row["model"], row["site"]) for row in rows)
    ]
    behind = []
    for group in groups:
        rivals = [float(np.mean(values)) for arm in ("source", "bn") if (values := known(group, arm))]
        gap = max(rivals) - 0.5 - float(np.mean(known(group, "default")))
        if gap > 0:
            behind.append(f"{group[0]['model']} on {group[0]['site']} by {gap:.1f}")
    down = losses(rows, "default")
    shares = [
        f"{100 * np.mean([value > limit for value in down]):.1f} % by more than {limit:g}" for limit in LOSSES
    ]
    return "\n".join(
        [
            table(rows),
            "",
            audit(rows),
            "",
            f"Of {len(down)} volumes below their own source: {', '.join(shares)}; "
            f"worst {max(0.0, *down):.1f}; lost: {lost(rows)}.",
            f"More than 0.5 below the better of source and bn: {'; '.join(behind) or 'none'}.",
        ]
    )


def finished(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the volumes of every model that is finished, in the order of the table."""
    order = {name: index for index, name in enumerate(MODELS)}
    contents = [
        json.loads(path.read_text(encoding="utf-8")) for path in (options.out / "results").glob("*.json")
    ]
    pipelines = {task: load_pipeline(task, options.set) for task in ("prostate", "spinal_cord")}
    rows = [
        judged(row, pipelines[MODELS[row["model"]].task])
        for content in contents
        for row in content["volumes"]
    ]
    return sorted(rows, key=lambda row: (order.get(row["model"], 99), row["seed"]))


def keep(path: Path, content: dict[str, Any], indent: int | None = None) -> None:
    """Write JSON so that the file is there whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
    part.replace(path)


def parser_of(description: str | None, models: Sequence[str], volumes: int) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs that adapt the source models.

    Args:
        description: of the program.
        models: names of the default.
        volumes: the default of generated ones.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of weights and results")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(models), metavar="NAME")
    parser.add_argument("--steps", type=int, help=f"of training (default {STEPS}; quick: {QUICK_STEPS})")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    parser.add_argument("--weights", type=Path, default=SHARED / "reference")
    parser.add_argument("--limit", type=int, help="volumes of each site")
    parser.add_argument("--volumes", type=int, default=volumes, help="of each generated site, with --quick")
    parser.add_argument("--quick", action="store_true", help="small networks on generated scanners")
    parser.add_argument("--table", action="store_true", help="only print what is finished")
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options with the steps of a training."""
    options = parser.parse_args(arguments)
    options.steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    return options


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = parser_of(__doc__, list(MODELS), volumes=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the default recipe")
    parser.add_argument("--method", help="that adapts (default: the pipeline's)")
    parser.add_argument("--without-released", action="store_true", help="leave the released recipe out")
    parser.add_argument("--forget", action="store_true", help="remove weights after use")
    parser.add_argument("--steadiest", action="store_true", help="of the seeds take the steadiest by volume")
    parser.add_argument("--candidates", action="store_true", help="print the Dice of the guard's candidates")
    options = parsed(parser, arguments)
    if options.quick:
        options.models = [
            name for name in options.models if MODELS[name].sites and name != "robust, from UCL"
        ]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, adapt, print the tables."""
    options = parse(arguments)
    results = options.out / "results"
    results.mkdir(parents=True, exist_ok=True)
    if not options.table:
        place = generated(options) if options.quick else real(options)
        seeds = range(options.first_seed, options.first_seed + options.seeds)
        jobs = [(name, seed) for name in options.models for seed in seeds]
        todo = [(name, seed) for name, seed in jobs if not (results / f"{slug(name)}-{seed}.json").is_file()]
        minutes = expected_minutes(todo, options, place)
        print(f"{len(todo)} of {len(jobs)} models to do, about {minutes:.0f} minutes on one H200", flush=True)
        for name, seed in todo:
            content = measure(name, seed, options, place)
            target = results / f"{slug(name)}-{seed}.json"
            keep(target, content, indent=1)
    rows = finished(options)
    if options.steadiest:
        rows = steadiest(rows)
    if rows:
        print(candidates(rows) if options.candidates else summary(rows))
    return 0


def expected_minutes(todo: Sequence[tuple[str, int]], options: argparse.Namespace, place: Place) -> float:
    """Return the minutes that models would take on one H200 in bfloat16."""
    seconds = 0.0
    for name, _ in todo:
        model = MODELS[name]
        if model.sites:
            seconds += options.steps * STEP_SECONDS
        for site in place.judged[name]:
            refs = Reader(
                place.sites[model.task, site],
                load_pipeline(model.task),
                place.volumes[model.task],
                options.limit,
            ).refs
            seconds += VOLUME_SECONDS * len(refs)
    return seconds / 60.0


if __name__ == "__main__":
    sys.exit(main())
