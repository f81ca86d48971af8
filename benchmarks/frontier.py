"""Dice and harm against the passes that they cost: own statistics, TENT, the released recipe, TeSLA, VeSTA.

Example::

    python benchmarks/frontier.py --device cuda --precision bfloat16 --out frontier --models reference
    python benchmarks/frontier.py --table --out frontier --picture frontier.png
    python benchmarks/frontier.py --device cpu --quick --out frontier-quick

Every case is adapted to by itself (N-O) with ever more updates of 8 slices. A pass is one forward pass of one
slice; a backward pass counts as two. Those of the choice of the scaling, of predictions and of the guard are
counted too. All rows start from the scaling that was chosen for the case. The released recipe, own statistics
and TENT have no guard; of the others both masks are scored, the adapted one and the one that the guard takes.
Source models are those of ``zoo.py``. What is finished is kept below ``--out``, one file per model and seed.
Labels are read after the masks, and choose nothing.

Dice is in percent at the model's grid with the pipeline's largest component; a volume is harmed if it ends
more than two points below its own source.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zoo
from reference import Reader, at_model_mask, mean_dice

from tesla_med.config.files import load_pipeline
from tesla_med.engine.driver import Driver
from tesla_med.engine.memory import free_device_memory
from tesla_med.engine.prior import prior_of
from tesla_med.engine.scaling import Chooser
from tesla_med.models.base import default_device, device_name
from tesla_med.models.checkpoint import steadiness_of, versions
from tesla_med.models.loading import load_model
from tesla_med.prepare.stream import ahead
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Unit

UPDATES = (1, 3, 6, 12, 24, 48)
HARM = 2.0
BUDGET = {"batch_slices": 8, "draw": "replacement", "epochs": 1}


@dataclass(frozen=True)
class Arm:
    """One curve.

    Attributes:
        method: its name.
        of: suffix of the pipeline that it is taken from.
        changes: of its parameters.
        guarded: whether the guard judges it.
        learns: whether it has updates at all.
    """

    method: str
    of: str = ""
    changes: tuple[tuple[str, Any], ...] = ()
    guarded: bool = False
    learns: bool = True


ARMS = {
    "bn": Arm("bn", learns=False),
    "tent": Arm("tent", changes=(("predict_statistics", "volume"),)),
    "released": Arm("tesla", of="_released"),
    "tesla": Arm("tesla", guarded=True),
    "vesta, one run": Arm("vesta", changes=(("restarts", 1),), guarded=True),
    "vesta": Arm("vesta", guarded=True),
}


def points(arm: Arm) -> tuple[int, ...]:
    """Return the numbers of updates of a curve."""
    return UPDATES if arm.learns else (0,)


def cases(
    name: str, site: str, options: argparse.Namespace, place: zoo.Place, path: Path
) -> Iterator[dict[str, Any]]:
    """Yield the figures of every volume of a site at every point of every curve."""
    task = zoo.MODELS[name].task
    common = ("predict_batch=32", *place.common)
    loaded = load_model(path, load_pipeline(task, common))
    pipeline, device = loaded.pipeline, default_device(options.device)
    reader = Reader(place.sites[task, site], pipeline, place.volumes[task], options.limit)
    told = device, options.seed, pipeline.preprocessing.model_range, options.precision, 32
    source = make_method("source", loaded.model, {}, MethodContext(*told))
    chooser = Chooser(pipeline.scaling, source) if pipeline.scaling else None
    read = zip(reader.refs, ahead(reader.refs, reader, 2), strict=True)
    units = [unit if chooser is None else chooser(unit) for _, unit in read]
    for label, arm in ARMS.items():
        given = load_pipeline(task + arm.of, common).method_params(arm.method, "N-O")
        for updates in points(arm):
            free_device_memory()  # of the point before, whose graphs hold gigabytes
            params = {**given, **(BUDGET | {"updates_per_case": updates} if arm.learns else {})}
            method = make_method(arm.method, loaded.model, params | dict(arm.changes), MethodContext(*told))
            driver = Driver(method, "N-O", "case", largest=pipeline.keep_largest)
            guard = pipeline.guard.model_copy(update={"enabled": arm.guarded})
            about = {"largest": pipeline.keep_largest, "steadiness": steadiness_of(loaded.card)}
            about["prior"] = prior_of(loaded.card)
            predictor = zoo.Watched(source, method, driver, guard, **about)
            if arm.guarded:
                predictor.watch()
            for unit in units:
                truth, slices = reader.at_model[unit.ref.name], unit.images.shape[0]
                choice = 0.0 if chooser is None else chooser.passes(slices)
                row = {"model": name, "seed": options.seed, "site": site, "case": unit.ref.name}
                row |= {"arm": label, "updates": updates}
                row["passes"] = (predictor.passes(slices) + choice) / slices
                row["passes"] += method.learning_passes(slices) / slices
                yield row | scored(truth, unit, predictor, pipeline)
            del method, driver, predictor


def scored(truth: np.ndarray, unit: Unit, predictor: zoo.Watched, pipeline: Any) -> dict[str, Any]:
    """Return the Dice of the source's mask, of the adapted one, and of the one that the guard takes."""
    outcome = predictor(unit.images, unit.fill)
    classes = outcome.probs.shape[1]
    taken = mean_dice(truth, at_model_mask(outcome.probs, pipeline), classes)
    adapted = taken
    if predictor.guard is not None and outcome.verdict.signals:
        adapted = mean_dice(truth, predictor.masks["adapted"].cpu().numpy(), classes)
    source = mean_dice(truth, at_model_mask(outcome.source, pipeline), classes)
    return {"source": source, "adapted": adapted, "guarded": taken}


def measure(name: str, options: argparse.Namespace, place: zoo.Place) -> dict[str, Any]:
    """Return the figures of one model on all its sites."""
    path, rows = zoo.weights_of(name, options.seed, options, place), []
    for site in options.sites or place.judged[name]:
        free_device_memory()
        for row in cases(name, site, options, place, path):
            rows.append(row)
            if options.verbose:
                print(json.dumps(row), flush=True)
        print(f"{name} {options.seed} {site}: done", flush=True)
    return {
        "command": " ".join(["python", "benchmarks/frontier.py", *sys.argv[1:]]),
        "device": device_name(default_device(options.device)),
        "versions": versions(),
        "rows": rows,
    }


# ---------------------------------------------------------------- table and picture


def curves(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return every point of every curve: means over volumes, then over models and sites."""
    found = []
    for label, arm in ARMS.items():
        for updates in points(arm):
            mine = [row for row in rows if (row["arm"], row["updates"]) == (label, updates)]
            if not mine:
                continue
            groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
            for row in mine:
                groups.setdefault((row["model"], row["site"]), []).append(row)
            point: dict[str, Any] = {"arm": label, "updates": updates, "volumes": len(mine)}
            point["passes"] = float(np.mean([row["passes"] for row in mine]))
            for key in ("adapted", "guarded"):
                means = [np.mean([row[key] or 0.0 for row in group]) for group in groups.values()]
                point[key] = float(np.mean(means))
                down = [(row["source"] or 0.0) - (row[key] or 0.0) > HARM for row in mine]
                point[f"harm_{key}"] = 100.0 * float(np.mean(down))
            found.append(point)
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the points as Markdown."""
    heads = ("method", "updates", "passes", "Dice", "harmed, %", "Dice, guarded", "harmed, guarded, %")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for point in found:
        guarded = ARMS[point["arm"]].guarded
        cells = [point["arm"], str(point["updates"]), f"{point['passes']:.0f}"]
        cells += [f"{point['adapted']:.1f}", f"{point['harm_adapted']:.1f}"]
        cells += [f"{point['guarded']:.1f}", f"{point['harm_guarded']:.1f}"] if guarded else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw Dice and harm against passes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, (label, arm) in enumerate(ARMS.items()):
        mine = [point for point in found if point["arm"] == label]
        key = "guarded" if arm.guarded else "adapted"
        style = {"color": f"C{number}", "marker": "o", "label": label + (", guarded" if arm.guarded else "")}
        passes = [point["passes"] for point in mine]
        left.plot(passes, [point[key] for point in mine], **style)
        right.plot(passes, [point[f"harm_{key}"] for point in mine], **style)
    for axes, title in ((left, "mean Dice, %"), (right, f"volumes > {HARM:g} points below source, %")):
        axes.set(xscale="log", xlabel="forward passes per slice", title=title)
        axes.grid(alpha=0.3)
    left.legend(fontsize="small")
    figure.savefig(path, dpi=150)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = zoo.parser_of(__doc__, ["reference"], volumes=2)
    parser.add_argument("--sites", nargs="+", default=[], help="of these only (default: all of the model)")
    parser.add_argument("--seed", type=int, default=1, help="of training and adaptation")
    parser.add_argument("--picture", type=Path, help="draw the curves, too")
    parser.add_argument("--verbose", action="store_true", help="print every volume")
    return zoo.parsed(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Adapt, print the table, draw."""
    options = parse(arguments)
    results = options.out / "results"
    results.mkdir(parents=True, exist_ok=True)
    if not options.table:
        place = zoo.generated(options) if options.quick else zoo.real(options)
        for name in options.models:
            sites = "-".join(("", *options.sites))
            target = results / f"{zoo.slug(name)}-{options.seed}{sites}.json"
            if not target.is_file():
                zoo.keep(target, measure(name, options, place))
    files = sorted(results.glob("*.json"))
    found = curves([row for path in files for row in json.loads(path.read_text(encoding="utf-8"))["rows"]])
    print(table(found))
    if options.picture:
        draw(found, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
