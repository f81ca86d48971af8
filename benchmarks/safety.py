"""Gain and harm of adaptation against how far the site is from the source, on generated phantoms.

Example::

    python benchmarks/safety.py --device cpu --task prostate --out safety.json --figure safety.png

A small U-Net is trained once a task on the source scanner. Sites are then generated on scanners at
strength 0 (the source's own) to 1 (the preset ``hard``) and beyond, by interpolation of the settings,
and adapted to by each arm with ``adapt_site``, N-O: bn, the released recipe, ours without and with
the guard. Gain is a volume's Dice after less before adaptation, harm the same where it is a loss,
before and after from the same run. All in points (percent of Dice).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tesla_med.adapt import adapt_site
from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.demo.recipes import RECIPES
from tesla_med.demo.volumes import TASKS, ScannerSettings, Task, make_site, preset
from tesla_med.errors import TeslaMedError
from tesla_med.models.base import default_device, device_name
from tesla_med.models.checkpoint import versions
from tesla_med.records import CaseResult
from tesla_med.training.train import train_source

HARMED_POINTS = 1.0
STRENGTHS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)


@dataclass(frozen=True)
class Arm:
    """One way to adapt: a pipeline of the task, a method, with or without the guard."""

    pipeline: str
    method: str
    guard: bool
    colour: str
    marker: str


# colours of Okabe and Ito, told apart by the colour-blind too
ARMS = {
    "source": Arm("{}", "source", False, "#7f7f7f", ""),
    "bn": Arm("{}", "bn", False, "#E69F00", "s"),
    "released": Arm("{}_released", "tesla", False, "#D55E00", "^"),
    "no-guard": Arm("{}", "tesla", False, "#56B4E9", "D"),
    "ours": Arm("{}", "tesla", True, "#0072B2", "o"),
}
TITLES = {
    "source": "source (no adaptation)",
    "bn": "bn",
    "released": "TeSLA, released recipe",
    "no-guard": "ours without the guard",
    "ours": "ours",
}


# ------------------------------------------------------------ sites


def settings_at(task: Task, strength: float) -> ScannerSettings:
    """Return the scanner at a strength: 0 the source's, 1 the preset ``hard``, above 1 beyond it.

    Beyond 1 the numbers go on along the same line and everything else stays as in ``hard``.

    Raises:
        ValueError: a negative strength, or one at which a setting leaves its range.
    """
    if strength < 0:
        raise ValueError(f"strength must be 0 or more, got {strength}")
    if strength <= 1:
        return preset(task, "hard", shift=strength)
    source, hard = preset(task).model_dump(), preset(task, "hard").model_dump()
    for name, value in hard.items():
        if isinstance(value, float):
            hard[name] = source[name] + strength * (value - source[name])
    return ScannerSettings.model_validate(hard)


def write_site(folder: Path, task: Task, name: str, strength: float, cases: int, seed: int) -> SiteConfig:
    """Generate ``folder/volumes/<name>`` and the site that describes it, and return that."""
    make_site(folder / "volumes" / name, task, settings_at(task, strength), cases, seed=seed)
    described = RECIPES[task].describe("source")
    content = {
        "institution": name,
        "description": f"generated images at strength {strength:g}",
        "files": described["files"],
        "region": described["region"],
    }
    path = folder / "site_configs" / task / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return load_site(str(path))


# ------------------------------------------------------------ runs


def pipeline_of(task: Task, arm: Arm, options: argparse.Namespace) -> PipelineConfig:
    """Return an arm's pipeline at the benchmark's size; ``--updates`` scales ours and the release alike."""
    overrides = [
        *RECIPES[task].overrides,
        f"model.params.width={options.width}",
        f"preprocessing.size=[{options.size},{options.size}]",
        f"train.steps={options.steps}",
        "reports=[table]",
    ]
    name = arm.pipeline.format(task)
    if options.updates is not None:
        own = updates_of(load_pipeline(name))
        scaled = max(1, round(own * options.updates / updates_of(load_pipeline(task))))
        overrides.append(f"protocols.N-O.tesla.updates_per_case={scaled}")
    return load_pipeline(name, overrides)


def updates_of(pipeline: PipelineConfig) -> int:
    """Return the updates a case of TeSLA under N-O."""
    return int(pipeline.method_params("tesla", "N-O")["updates_per_case"])


def train(task: Task, folder: Path, options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Train the source model of a task on the source scanner; return its weights and a record."""
    start = time.perf_counter()
    site = write_site(folder, task, "source", 0.0, options.source_cases, seed=0)
    pipeline = pipeline_of(task, ARMS["source"], options)
    result = train_source(
        pipeline, [site], folder / "volumes", folder / "source", seed=0, device=options.device
    )
    record = {
        "task": task,
        "validation_dice_percent": 100 * result.validation_dice,
        "seconds": time.perf_counter() - start,
    }
    return result.weights, record


def volume_row(result: CaseResult) -> dict[str, Any]:
    """Return what is kept of one volume; Dice is None where it has no score."""
    after, before = result.mean_dice, result.mean_dice_source
    return {
        "case": result.case,
        "status": result.status,
        "dice_percent": None if after is None else 100 * after,
        "dice_source_percent": None if before is None else 100 * before,
        "used": result.used,
        "share": result.share,
        "reason": result.reason,
        "signals": dict(result.signals),
    }


def run_cell(
    task: Task, strength: float, seed: int, weights: Path, folder: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Generate one site and run every arm on it; return a row a volume and arm."""
    name = f"s{strength:g}-{seed}".replace(".", "_")
    site = write_site(folder, task, name, strength, options.cases, seed=1000 + seed)
    rows = []
    for key in options.arms:
        arm = ARMS[key]
        result = adapt_site(
            site,
            folder / "volumes",
            weights=weights,
            pipeline=pipeline_of(task, arm, options),
            method=arm.method,
            protocol="N-O",
            out=folder / "runs" / f"{name}-{key}",
            seed=seed,
            device=options.device,
            guard=arm.guard,
        )
        place = {"task": task, "strength": strength, "arm": key, "seed": seed}
        rows += [place | volume_row(item) for item in result.results]
    return rows


# ------------------------------------------------------------ figures


def loss_points(volume: dict[str, Any]) -> float | None:
    """Return by how much a volume's Dice fell in points (negative where it rose); None without a score."""
    after, before = volume["dice_percent"], volume["dice_source_percent"]
    return None if after is None or before is None else float(before - after)


def summarise(volumes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean gain and the worst harm of some volumes, and what was used how often.

    Volumes without a score count as ``unscored`` and enter nothing else; with no scored one the
    figures are None.
    """
    scored = [item for item in volumes if loss_points(item) is not None]
    losses = [float(item["dice_source_percent"] - item["dice_percent"]) for item in scored]
    count = len(scored)
    return {
        "volumes": count,
        "unscored": len(volumes) - count,
        "dice_percent": sum(item["dice_percent"] for item in scored) / count if count else None,
        "gain_points": sum(-loss for loss in losses) / count if count else None,
        "worst_harm_points": max(0.0, *losses) if count else None,
        "volumes_losing_over_1_point": sum(loss > HARMED_POINTS for loss in losses),
        **{
            f"used_{name}": sum(item["used"] == name for item in scored)
            for name in ("source", "partial", "adapted")
        },
    }


def summaries(volumes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a summary for every task, strength and arm, in order of appearance."""
    keys = list(dict.fromkeys((item["task"], item["strength"], item["arm"]) for item in volumes))
    rows = []
    for task, strength, arm in keys:
        group = [
            item for item in volumes if (item["task"], item["strength"], item["arm"]) == (task, strength, arm)
        ]
        rows.append({"task": task, "strength": strength, "arm": arm} | summarise(group))
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the summaries as text; ``s/p/a`` counts volumes that took source, partial and adapted masks."""
    lines = [
        f"{'task':<12}{'strength':>9}  {'arm':<10}{'volumes':>8}{'Dice':>7}{'gain':>8}{'worst harm':>12}"
        f"{'lose > 1':>10}{'s/p/a':>11}"
    ]
    for row in rows:
        used = "/".join(str(row[f"used_{name}"]) for name in ("source", "partial", "adapted"))
        lines.append(
            f"{row['task']:<12}{row['strength']:>9.2f}  {row['arm']:<10}{row['volumes']:>8}"
            f"{number(row['dice_percent'], '.1f'):>7}{number(row['gain_points'], '+.2f'):>8}"
            f"{number(row['worst_harm_points'], '.2f'):>12}{row['volumes_losing_over_1_point']:>10}"
            f"{used if row['arm'] == 'ours' else '':>11}"
        )
    return "\n".join(lines)


def number(value: float | None, form: str) -> str:
    """Return a number as text, n/a for None."""
    return "n/a" if value is None else format(value, form)


def harmed(volumes: Sequence[dict[str, Any]], arm: str = "ours") -> str:
    """Return the volumes that lose more than a point under an arm, the worst first, and why."""
    found = [(loss_points(item), item) for item in volumes if item["arm"] == arm]
    worse = sorted(
        ((loss, item) for loss, item in found if loss is not None and loss > HARMED_POINTS),
        key=lambda pair: -pair[0],
    )
    lines = [f"{arm}: volumes that lose more than {HARMED_POINTS:g} point: {len(worse)}"]
    for loss, item in worse:
        lines.append(
            f"  {item['task']} strength {item['strength']:g} seed {item['seed']} {item['case']}: "
            f"{item['dice_source_percent']:.2f} to {item['dice_percent']:.2f} ({-loss:+.2f}), "
            f"{item['used']}: {item['reason'] or 'no rule objected'}"
        )
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a picture: mean gain and worst harm against strength, a line an arm, a row a task."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure = Figure(figsize=(10, 0.7 + 3.6 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tasks), 2, squeeze=False)
    what = (
        ("gain_points", "mean gain over source (points of Dice)", "higher is better"),
        ("worst_harm_points", "worst loss of a volume (points of Dice)", "lower is better"),
    )
    for task, pair in zip(tasks, panels, strict=True):
        for axes, (key, label, better) in zip(pair, what, strict=True):
            for name in [item for item in ARMS if any(row["arm"] == item for row in rows)]:
                line = [row for row in rows if row["task"] == task and row["arm"] == name]
                line = sorted((row for row in line if row[key] is not None), key=lambda row: row["strength"])
                axes.plot(
                    [row["strength"] for row in line],
                    [row[key] for row in line],
                    color=ARMS[name].colour,
                    marker=ARMS[name].marker,
                    linestyle="--" if name == "source" else "-",
                    linewidth=2.4 if name == "ours" else 1.4,
                    markersize=5,
                    label=TITLES[name],
                )
            axes.set_xlabel("shift strength (0: the source's scanner, 1: preset hard)")
            axes.set_ylabel(label)
            axes.set_title(f"{task.replace('_', ' ')}: {better}", fontsize=10)
            axes.grid(alpha=0.3)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


# ------------------------------------------------------------ the whole


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train and run everything that was asked for; return the content of the JSON."""
    device = default_device(options.device)
    content: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/safety.py", *sys.argv[1:]]),
        "device": device_name(device),
        "versions": versions(),
        "width": options.width,
        "size_pixels": options.size,
        "training_steps": options.steps,
        "source_cases": options.source_cases,
        "cases_per_site": options.cases,
        "seeds": options.seeds,
        "updates_per_case": {
            task: {
                name: updates_of(pipeline_of(task, ARMS[name], options))
                for name in options.arms
                if ARMS[name].method == "tesla"
            }
            for task in options.task
        },
        "source_models": [],
        "results": [],
        "volumes": [],
    }
    start = time.perf_counter()
    for task in options.task:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            weights, record = train(task, folder, options)
            content["source_models"].append(record)
            print(
                f"{task}: source model trained in {record['seconds']:.0f} s, "
                f"validation Dice {record['validation_dice_percent']:.1f}",
                flush=True,
            )
            for strength in options.strengths:
                for seed in range(1, options.seeds + 1):
                    content["volumes"] += run_cell(task, strength, seed, weights, folder, options)
                    content["seconds"] = time.perf_counter() - start
                    content["results"] = summaries(content["volumes"])
                    save(content, options.out)
                    print(
                        f"{task}: strength {strength:g}, seed {seed}, {content['seconds']:.0f} s", flush=True
                    )
    return content


def save(content: dict[str, Any], path: Path | None) -> None:
    """Write what has been measured so far, so that a run cut short keeps it."""
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options, checked; ``--quick`` decides over those it sets."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--strengths", nargs="+", type=float, default=list(STRENGTHS), help="0 or more")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", type=int, default=3, help="sites a strength: seeds 1 to this")
    parser.add_argument("--cases", type=int, default=4, help="volumes a site")
    parser.add_argument(
        "--updates", type=int, default=None, help="a case, ours; the release's in proportion; default: all"
    )
    parser.add_argument("--width", type=int, default=8, help="of the U-Net")
    parser.add_argument("--size", type=int, default=64, help="pixels a side")
    parser.add_argument("--steps", type=int, default=300, help="of source training")
    parser.add_argument("--source-cases", type=int, default=12, help="volumes to train on")
    parser.add_argument("--quick", action="store_true", help="strengths 0 and 1, one tiny volume each")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    parser.add_argument("--figure", type=Path, default=None, help="picture, PNG")
    options = parser.parse_args(words)
    if options.quick:
        options.strengths, options.seeds, options.cases, options.updates = [0.0, 1.0], 1, 1, 3
        options.width, options.size, options.steps, options.source_cases = 4, 32, 30, 4
    try:
        for task in options.task:
            for strength in options.strengths:
                settings_at(task, strength)
    except ValueError as error:
        parser.error(f"--strengths: {error}")
    if min(options.seeds, options.cases, 1 if options.updates is None else options.updates) < 1:
        parser.error("--seeds, --cases and --updates must be 1 or more")
    return options


def main() -> None:
    """Parse the command line, run, print the table, write the JSON and the picture."""
    options = parse()
    try:
        content = measure(options)
    except TeslaMedError as error:
        sys.exit(f"error: {error}")
    print(table(content["results"]))
    print(harmed(content["volumes"]))
    if options.figure is not None:
        draw(content["results"], options.figure)


if __name__ == "__main__":
    main()
