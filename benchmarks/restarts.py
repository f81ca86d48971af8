"""What several runs of a case are worth, by their number and length, and how one of them should be taken.

Example::

    python benchmarks/restarts.py --device cuda --precision bfloat16 --out runs --runs 6 --models reference
    python benchmarks/restarts.py --table --out runs

Every volume is adapted to ``--runs`` times by VeSTA, always from the source model with other draws. After
each of ``CHECKPOINTS`` updates the mask is kept, with whether it stays when slices are zoomed, and after the
last one the masks of all candidates of the guard. So that what a number of runs and updates would have given
can be put together from one recording. Source models are those of ``zoo.py``, trained where they are not
there yet. What is finished is kept below ``--out``, a file a volume. Labels are read after the masks, and
choose nothing.

Dice is in percent at the model's grid with the pipeline's largest component.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from reference import Reader, mean_dice
from torch import Tensor

from tesla_med.config.files import load_pipeline
from tesla_med.engine.guard import Guard
from tesla_med.engine.memory import free_device_memory, placed
from tesla_med.engine.postprocess import largest_of
from tesla_med.engine.prior import prior_of
from tesla_med.engine.scaling import Chooser
from tesla_med.engine.signals import stack
from tesla_med.engine.steadiness import choose_share, steadiness
from tesla_med.models.base import default_device, predicted_class
from tesla_med.models.checkpoint import steadiness_of
from tesla_med.models.loading import load_model
from tesla_med.prepare.fill import hidden, packed, unpacked
from tesla_med.prepare.stream import ahead
from tesla_med.tta.base import MethodContext, TTAMethod, make_method

CHECKPOINTS = (8, 16, 24)
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "short": {"updates_per_case": 8, "teacher_momentum": 0.91, "learning_rate": 0.0004},
}
"""Parameters of the method that are not the pipeline's."""
ADAPTED = ("part", "mixed", "adapted")
RUNS = 3
HARM = 2.0
"""Points of Dice below its source from which on a volume is harmed."""


class Recorder:
    """Adapt to volumes again and again, and keep the masks.

    Args:
        loaded: the source model.
        options: of the command line.
    """

    def __init__(self, loaded: Any, options: argparse.Namespace) -> None:
        self.pipeline, self.runs = loaded.pipeline, options.runs
        device = default_device(options.device)
        told = device, options.seed, loaded.pipeline.preprocessing.model_range
        context = MethodContext(*told, options.precision, loaded.pipeline.predict_batch)
        self.prior = prior_of(loaded.card)
        self.steady, self.largest = steadiness_of(loaded.card), loaded.pipeline.keep_largest
        self.source = make_method("source", loaded.model, {}, context)
        self.methods: dict[str, TTAMethod] = {}
        for name in options.settings:
            params = loaded.pipeline.method_params("vesta", "N-O") | SETTINGS[name]
            self.methods[name] = make_method("vesta", loaded.model, params, context)
        scaling = loaded.pipeline.scaling
        self.scaled = Chooser(scaling, self.source) if scaling and scaling.candidates else lambda unit: unit

    def __call__(self, unit: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what is known of a volume without labels, and its masks by name."""
        unit = self.scaled(unit)
        classes = len(self.pipeline.classes)
        images = placed(unit.images, classes, self.source.context.device)
        before = self.source.predict(images)
        about: dict[str, Any] = {"scaling": unit.scaling.name if unit.scaling else "", "settings": {}}
        masks: dict[str, Tensor] = {}
        for name, method in self.methods.items():
            found = self._recorded(name, method, images, unit.fill, before, masks)
            about["settings"][name] = found
        return about, masks

    def _recorded(
        self,
        name: str,
        method: TTAMethod,
        images: Tensor,
        fill: Tensor | None,
        before: Tensor,
        masks: dict[str, Tensor],
    ) -> dict[str, Any]:
        method.reset()
        guard = Guard(
            self.pipeline.guard,
            self.source,
            method,
            largest=self.largest,
            steadiness=self.steady,
            prior=self.prior,
        )
        shares = choose_share(method, images, fill, largest=self.largest)
        start, whole = method.state_dict(), method.to_device(packed(images, fill))
        sums: dict[int, Tensor] = {}
        found: dict[str, Any] = {"shares": shares, "runs": []}
        begun = time.perf_counter()
        for run in range(1, self.runs + 1):
            if run > 1:
                method.load_state_dict(start)
                method.draw_anew(run)
            row: dict[str, Any] = {"steadiness": {}}
            for number, probs in self._learned(method, whole, images):
                key = f"{name}.{run}.{number}"
                masks[f"{key}.adapted"] = self._mask(probs, fill)
                row["steadiness"][number] = steadiness(method, images, fill, largest=self.largest)
                sums[number] = probs + sums.get(number, 0.0)
                if run > 1:
                    masks[f"{name}.mean{run}.{number}"] = self._mask(sums[number] / run, fill)
                last = number, probs
            guard.candidates = self._candidates(method, run)
            row["signals"], seen = guard.look(images, before, last[1], fill)
            for candidate in guard.candidates:
                target = f"{name}.{run}.{last[0]}.{candidate}" if candidate in ADAPTED else candidate
                masks.setdefault(target, seen[candidate])
            found["runs"].append(row)
        found["seconds"] = time.perf_counter() - begun
        return found

    def _learned(self, method: TTAMethod, whole: Tensor, images: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Learn from a volume; yield the number of updates and the probabilities at each checkpoint."""
        method.start_epoch(0, self._batches(method, whole, images.shape[1]))
        for number, batch in enumerate(self._batches(method, whole, images.shape[1]), 1):
            method.adapt(batch)
            if number in CHECKPOINTS:
                yield number, method.predict(images)
        method.pixel_weight = None

    @staticmethod
    def _batches(method: TTAMethod, whole: Tensor, channels: int) -> Iterator[Tensor]:
        for batch in method.batches(whole):
            images, method.pixel_weight = unpacked(batch, channels)
            yield images

    @staticmethod
    def _candidates(method: TTAMethod, run: int) -> tuple[str, ...]:
        """Return the candidates to look at; those that nothing was learned for in the first run alone."""
        all_of = ("source", "own", "half", *ADAPTED) if method.shares else ("source", "part", "adapted")
        return tuple(name for name in all_of if run == 1 or name in ("source", *ADAPTED))

    def _mask(self, probs: Tensor, fill: Tensor | None) -> Tensor:
        mask = hidden(stack(predicted_class(probs)), fill)
        return largest_of(mask) if self.largest else mask


def record(name: str, options: argparse.Namespace, place: zoo.Place) -> None:
    """Record every volume of a model that is not there yet."""
    model = zoo.MODELS[name]
    base = load_pipeline(model.task, ("predict_batch=32", *place.common, zoo.ALL_CANDIDATES))
    loaded = load_model(zoo.weights_of(name, options.seed, options, place), base)
    for site in options.sites or place.judged[name]:
        folder = options.out / "volumes" / f"{zoo.slug(name)}-{options.seed}" / site
        folder.mkdir(parents=True, exist_ok=True)
        free_device_memory()
        site_config, volumes = place.sites[model.task, site], place.volumes[model.task]
        reader = Reader(site_config, loaded.pipeline, volumes, options.limit)
        reader.refs = [ref for ref in reader.refs if not (folder / f"{ref.name}.json").is_file()]
        recorder = Recorder(loaded, options)
        for ref, unit in zip(reader.refs, ahead(reader.refs, reader, 2), strict=True):
            about, masks = recorder(unit)
            arrays = {key: mask.to(torch.uint8).cpu().numpy() for key, mask in masks.items()}
            truth, classes = reader.at_model[ref.name], len(loaded.pipeline.classes)
            dice = {key: mean_dice(truth, mask, classes) for key, mask in arrays.items()}
            about |= {"model": name, "seed": options.seed, "site": site, "case": ref.name, "dice": dice}
            if options.masks:
                np.savez_compressed(folder / f"{ref.name}.npz", truth=truth.astype(np.uint8), **arrays)
            zoo.keep(folder / f"{ref.name}.json", about)
            print(f"{name} {site} {ref.name}: {shown(about)}", flush=True)


def shown(row: dict[str, Any]) -> str:
    """Return the Dice of a volume before and after, in one line."""
    ends = [value for key, value in row["dice"].items() if key.endswith(f".{CHECKPOINTS[-1]}.adapted")]
    return f"source {row['dice']['source']:.1f}, runs " + " ".join(f"{value:.1f}" for value in ends)


# ---------------------------------------------------------------- tables


def steadiest_of(row: dict[str, Any], setting: str, runs: Sequence[int], updates: int) -> int:
    """Return which of some runs has the steadiest mask after so many updates; of equal ones the first."""
    found = row["settings"][setting]["runs"]
    return max(runs, key=lambda run: found[run - 1]["steadiness"][str(updates)])


def ends(row: dict[str, Any], setting: str, runs: int, updates: int) -> list[float]:
    """Return the Dice of the steadiest of ``runs`` runs, for every choice of these runs."""
    count = len(row["settings"][setting]["runs"])
    chosen = [
        steadiest_of(row, setting, some, updates)
        for some in itertools.combinations(range(1, count + 1), runs)
    ]
    return [row["dice"][f"{setting}.{run}.{updates}.adapted"] or 0.0 for run in chosen]


def worth(row: dict[str, Any], setting: str, runs: int, updates: int) -> float:
    """Return the mean over all choices of :func:`ends`."""
    return float(np.mean(ends(row, setting, runs, updates)))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the mean Dice by model and site of the steadiest of so many runs of so many updates."""
    done = {
        (name, int(updates))
        for row in rows
        for name, found in row["settings"].items()
        for updates in found["runs"][0]["steadiness"]
    }
    columns = [(name, runs, updates) for name, updates in sorted(done) for runs in (1, 2, 3)]
    names = [f"{runs} x {updates} ({name})" for name, runs, updates in columns]
    heads = ["model", "site", "volumes", "source", "own", *names, "best"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for key in dict.fromkeys((f"{row['model']} {row['seed']}", row["site"]) for row in rows):
        group = [row for row in rows if (f"{row['model']} {row['seed']}", row["site"]) == key]
        values = [[row["dice"].get(name) or 0.0 for row in group] for name in ("source", "own")]
        for name, runs, updates in columns:
            enough = all(len(row["settings"].get(name, {"runs": ()})["runs"]) >= runs for row in group)
            values.append([worth(row, name, runs, updates) for row in group] if enough else [])
        values.append([max(value or 0.0 for value in row["dice"].values()) for row in group])
        cells = [f"{np.mean(item):.1f}" if item else "" for item in values]
        lines.append("| " + " | ".join([*key, str(len(group)), *cells]) + " |")
    return "\n".join(lines)


def steadiest_number(row: dict[str, Any]) -> list[float]:
    """Return the Dice of every run after the number of updates at which its mask is the steadiest."""
    found = []
    for number, run in enumerate(row["settings"]["usual"]["runs"], 1):
        updates = max(CHECKPOINTS, key=lambda item: run["steadiness"][str(item)])
        found.append(row["dice"][f"usual.{number}.{updates}.adapted"] or 0.0)
    return found


def averaged(row: dict[str, Any]) -> list[float]:
    """Return the Dice of the mask that the mean of the probabilities of ``RUNS`` runs gives."""
    return [row["dice"][f"usual.mean{RUNS}.{CHECKPOINTS[-1]}"] or 0.0]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return what numbers of runs and updates give over all models and sites, and how often they harm."""
    rules: dict[str, Callable[[dict[str, Any]], list[float]]] = {
        f"{updates} updates, steadiest of {runs}": partial(ends, setting="usual", runs=runs, updates=updates)
        for updates, runs in itertools.product(CHECKPOINTS, range(1, RUNS + 1))
    }
    rules["number of updates by steadiness, 1 run"] = steadiest_number
    rules[f"{CHECKPOINTS[-1]} updates, mean of the probabilities of {RUNS}"] = averaged
    lines = ["| rule | mean Dice | > 2 points lost, % |", "|---|---|---|"]
    mine = [row for row in rows if len(row["settings"].get("usual", {"runs": ()})["runs"]) >= RUNS]
    for name, rule in rules.items():
        pairs: dict[tuple[str, int, str], list[float]] = {}
        harm = []
        for row in mine:
            values = rule(row)
            pairs.setdefault((row["model"], row["seed"], row["site"]), []).append(float(np.mean(values)))
            harm.append(np.mean([(row["dice"]["source"] or 0.0) - value > HARM for value in values]))
        mean = np.mean([np.mean(values) for values in pairs.values()]) if pairs else np.nan
        lines.append(f"| {name} | {mean:.1f} | {100 * np.mean(harm) if harm else np.nan:.1f} |")
    return "\n".join(lines)


def finished(out: Path) -> list[dict[str, Any]]:
    """Return the volumes that are finished."""
    paths = sorted((out / "volumes").glob("*/*/*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = zoo.parser_of(__doc__, ["reference"], volumes=2)
    parser.add_argument("--sites", nargs="+", default=[], help="of these only (default: all of the model)")
    parser.add_argument("--seed", type=int, default=1, help="of training and of the first run")
    parser.add_argument("--runs", type=int, default=3, help="of each volume")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--masks", action="store_true", help="keep the masks, too")
    return zoo.parsed(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, adapt, print the table."""
    options = parse(arguments)
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        place = zoo.generated(options) if options.quick else zoo.real(options)
        for name in options.models:
            record(name, options, place)
    rows = finished(options.out)
    print(table(rows) + "\n\n" + summary(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
