"""Fit the predicted Dice on runs with references, and say how far it can be trusted.

Example::

    python benchmarks/quality.py --phantoms quality-runs --task prostate --out quality.json
    python benchmarks/quality.py --zoo zoo-quick --out quality.json
    python benchmarks/quality.py --runs runs/D/tesla-N-O runs/E/tesla-N-O --judge prostate

The first makes runs of generated sites between the source and the hard scanner, and fits ``quality`` of the
pipelines: intercept, slope, and the width of the 90 % interval. The second does the same with the models of
``zoo.py``. Groups (sites, or a model on a site) are left out in turn for the cross-validated figures. The
third judges runs with the coefficients that a pipeline has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.files import load_pipeline
from tesla_med.config.models import QualityConfig
from tesla_med.engine.quality import SUPPORT, feature, usual_dice
from tesla_med.models.checkpoint import versions

STRENGTHS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0)
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Pair:
    """One class of one case: the group left out together, its support, its Dice, and the network's own."""

    group: str
    case: str
    support: float
    dice: float
    source_dice: float | None = None


def read_runs(folders: Iterable[Path]) -> list[Pair]:
    """Return every class of every case that has both a support and a Dice; a site is a group."""
    pairs = []
    for folder in map(Path.absolute, folders):
        known = source_dice(folder)
        for path in sorted((folder / ".cases").rglob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            for index, score in enumerate(record["scores"], 1):
                support = record["signals"].get(SUPPORT.format(index))
                if support is not None and score["dice"] is not None:
                    group = f"{folder.parents[1].name}/{record['site']}"
                    pairs.append(Pair(group, record["case"], support, score["dice"], known))
    return pairs


def source_dice(folder: Path) -> float | None:
    """Return the Dice that the network of a run has on its training, as ``run.json`` has it, if it does."""
    path = folder / "run.json"
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    quality = content.get("settings", {}).get("pipeline", {}).get("quality", {})
    known: float | None = quality.get("source_dice")
    return known


def read_zoo(folder: Path, task: str = "prostate") -> list[Pair]:
    """Return every class of every candidate of ``benchmarks/zoo.py``; a model on a site is a group.

    Models of the cord have it in their name.
    """
    pairs = []
    for path in sorted((folder / "results").glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["volumes"]
        for row in [item for item in rows if item["model"].endswith("cord") == (task == "spinal_cord")]:
            for item in [part for found in row["candidates"].values() for part in found["classes"]]:
                if item["support"] is not None and item["dice"] is not None:
                    group = f"{row['model']}/{row['site']}"
                    pairs.append(Pair(group, row["case"], item["support"], item["dice"], row["source_dice"]))
    return pairs


def fit(pairs: Sequence[Pair]) -> tuple[float, float, float, float]:
    """Return intercept, slope, and half width and growth of the interval.

    Residuals are those of groups left out. In each third of the predictions the interval is to hold 90 % of
    them: half width and growth are the line through the three quantiles, against 1 less the prediction,
    raised until 90 % of all are held, with the finite-sample level of conformal prediction.
    """
    intercept, slope = _line(pairs)
    features, dice = _columns(pairs)
    groups = np.array([pair.group for pair in pairs])
    predicted = _clipped(intercept + slope * features)
    residuals = np.abs(dice - predicted)
    names = sorted(set(groups.tolist()))
    for name in names if len(names) > 2 else []:
        out = groups == name
        start, steep = _line([pair for pair, left in zip(pairs, out, strict=True) if not left])
        residuals[out] = np.abs(dice[out] - _clipped(start + steep * features[out]))
    level = min(1.0, 0.9 * (1 + 1 / max(len(pairs), 1)))
    half, growth = _widths(1.0 - predicted, residuals, level)
    raised = max(0.0, float(np.quantile(residuals - half - growth * (1.0 - predicted), level)))
    return intercept, slope, half + raised, growth


def _widths(distance: Doubles, residuals: Doubles, level: float) -> tuple[float, float]:
    """Return the line through the quantiles of residuals in the thirds of a distance, rising and positive."""
    thirds = [part for part in np.array_split(np.argsort(distance), 3) if len(part)]
    places = np.array([distance[part].mean() for part in thirds])
    quantiles = np.array([np.quantile(residuals[part], level) for part in thirds])
    if np.ptp(places) < 1e-9:
        return float(quantiles.max()), 0.0
    growth, half = (float(item) for item in np.polyfit(places, quantiles, 1))
    growth = max(growth, 0.0)
    return max(half if growth > 0 else float(quantiles.mean()), 0.0), growth


def _clipped(values: Doubles) -> Doubles:
    return np.clip(values, 0.0, 1.0)


def _line(pairs: Sequence[Pair]) -> tuple[float, float]:
    features, dice = _columns(pairs)
    design = np.column_stack([np.ones_like(features), features])
    (intercept, slope), *_ = np.linalg.lstsq(design, dice, rcond=None)
    return float(intercept), float(slope)


def judge(pairs: Sequence[Pair], predicted: Doubles, width: Doubles) -> dict[str, Any]:
    """Return correlation, mean error and coverage, over all pairs and by group."""
    _, dice = _columns(pairs)
    inside = np.abs(dice - predicted) <= width
    groups = np.array([pair.group for pair in pairs])
    result = _figures(dice, predicted, inside)
    result["groups"] = {
        name: _figures(dice[groups == name], predicted[groups == name], inside[groups == name])
        for name in dict.fromkeys(groups.tolist())
    }
    return result


def cross_validated(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the figures of predictions fitted on all other groups."""
    groups = np.array([pair.group for pair in pairs])
    predicted, width = np.zeros(len(pairs)), np.zeros(len(pairs))
    features, _ = _columns(pairs)
    for name in set(groups.tolist()):
        out = groups == name
        rest = [pair for pair, left in zip(pairs, out, strict=True) if not left]
        intercept, slope, half, growth = fit(rest)
        predicted[out] = _clipped(intercept + slope * features[out])
        width[out] = half + growth * (1.0 - predicted[out])
    return judge(pairs, predicted, width)


def with_coefficients(pairs: Sequence[Pair], config: QualityConfig) -> dict[str, Any]:
    """Return the figures of the coefficients that a pipeline has."""
    features, _ = _columns(pairs)
    if config.intercept is None:
        raise SystemExit("this pipeline has no coefficients: quality.intercept is empty")
    predicted = _clipped(config.intercept + config.slope * features)
    return judge(pairs, predicted, config.half_width + config.growth * (1.0 - predicted))


def _columns(pairs: Sequence[Pair]) -> tuple[Doubles, Doubles]:
    usual = [usual_dice(pair.source_dice) for pair in pairs]
    features = np.array(
        [dice * feature(pair.support) for dice, pair in zip(usual, pairs, strict=True)], dtype=np.float64
    )
    return features, np.array([pair.dice for pair in pairs], dtype=np.float64)


def _figures(dice: Doubles, predicted: Doubles, inside: npt.NDArray[np.bool_]) -> dict[str, Any]:
    spread = len(dice) > 2 and dice.std() > 1e-9 and predicted.std() > 1e-9
    return {
        "pairs": len(dice),
        "mean_dice_percent": 100 * float(dice.mean()),
        "correlation": float(np.corrcoef(dice, predicted)[0, 1]) if spread else None,
        "mean_error_points": 100 * float(np.abs(dice - predicted).mean()),
        "coverage_percent": 100 * float(inside.mean()),
    }


def phantom_runs(options: argparse.Namespace) -> list[Path]:
    """Train a small source model and adapt it to generated sites of rising shift; return the runs."""
    from tesla_med.adapt import adapt_site
    from tesla_med.config.models import SiteConfig
    from tesla_med.demo.recipes import RECIPES
    from tesla_med.demo.volumes import make_site, preset
    from tesla_med.training.train import train_source

    recipe, root = RECIPES[options.task], options.phantoms
    described = recipe.describe("source")
    extra = ("train.steps=40", "methods.tesla.weak_views=2") if options.quick else ()
    pipeline = load_pipeline(options.task, (*recipe.overrides, "reports=[table]", *extra))
    updates = f"protocols.N-O.tesla.updates_per_case={options.updates}"

    def site(name: str, shift: float, cases: int, seed: int) -> SiteConfig:
        folder = root / "volumes" / name
        if not folder.exists():
            make_site(folder, options.task, preset(options.task, "hard", shift=shift), cases, seed=seed)
        content = {"id": name, "pipeline": options.task, "institution": name}
        content |= {"files": described["files"], "region": described["region"]}
        return SiteConfig.model_validate(content)

    trained = root / "source" / "source.safetensors"
    if not trained.exists():
        source = site("source", 0.0, 6 if options.quick else 12, seed=0)
        trained = train_source(
            pipeline, [source], root / "volumes", root / "source", seed=0, device=options.device
        ).weights
    runs = []
    for number, shift in enumerate(options.strengths):
        place = site(f"shift-{shift:g}", shift, options.cases, seed=100 + number)
        for seed in range(options.seeds):
            out = root / "runs" / place.id / str(seed)
            result = adapt_site(
                place,
                root / "volumes",
                pipeline=pipeline,
                weights=trained,
                out=out,
                seed=seed,
                device=options.device,
                resume=(out / "run.json").exists(),
                overrides=(updates,),
            )
            print(f"{place.id} seed {seed}: source {result.mean_dice_source}, {result.mean_dice}", flush=True)
            runs.append(out)
    return runs


def show(title: str, figures: dict[str, Any]) -> None:
    """Print one table."""
    print(f"\n{title}\n{'group':<44}{'pairs':>6}{'Dice %':>8}{'r':>7}{'error':>7}{'covered %':>11}")
    for name, row in [("all", figures), *figures["groups"].items()]:
        r = "n/a" if row["correlation"] is None else f"{row['correlation']:.2f}"
        print(
            f"{name[-43:]:<44}{row['pairs']:>6}{row['mean_dice_percent']:>8.1f}{r:>7}"
            f"{row['mean_error_points']:>7.1f}{row['coverage_percent']:>11.0f}"
        )


def main() -> None:
    """Parse the command line, make or read runs, fit, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", nargs="*", type=Path, default=[], help="output folders of adapt")
    parser.add_argument("--zoo", nargs="*", type=Path, default=[], help="output folders of zoo.py")
    parser.add_argument("--phantoms", type=Path, default=None, help="make runs of generated sites here")
    parser.add_argument("--task", choices=("prostate", "spinal_cord"), default="prostate")
    parser.add_argument("--strengths", nargs="*", type=float, default=list(STRENGTHS))
    parser.add_argument("--cases", type=int, default=4, help="a generated site")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--updates", type=int, default=12, help="a case")
    parser.add_argument("--judge", default=None, help="pipeline whose coefficients to judge; default: fit")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help="two generated sites of two cases, few updates")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.quick:
        options.strengths, options.cases, options.updates = [0.0, 1.0], 2, 2
    runs = list(options.runs) + (phantom_runs(options) if options.phantoms else [])
    pairs = read_runs(runs) + [pair for folder in options.zoo for pair in read_zoo(folder, options.task)]
    if len(pairs) < 3:
        raise SystemExit(
            f"{len(pairs)} classes with a support and a Dice in {len(runs)} runs; at least 3 needed"
        )
    content: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/quality.py", *sys.argv[1:]]),
        "versions": versions(),
        "pairs": [vars(pair) for pair in pairs],
    }
    if options.judge:
        content["judged"] = with_coefficients(pairs, load_pipeline(options.judge).quality)
        show(f"coefficients of {options.judge}", content["judged"])
    else:
        names = ("intercept", "slope", "half_width", "growth")
        content["fit"] = dict(zip(names, fit(pairs), strict=True))
        content["cross_validated"] = cross_validated(pairs)
        show("each group predicted from the others", content["cross_validated"])
        print(f"\nquality: {{{', '.join(f'{name}: {value:.4f}' for name, value in content['fit'].items())}}}")
    if options.out:
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
