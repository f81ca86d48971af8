"""Error of every method on real tissue tiles under real and made shifts. Not the paper's experiment.

The paper trains on Kather-19 in colour and adapts to Kather-16 in colour. Here are 2,500 grey Kather-16
tiles (128x128) and a few colour ones, so the experiments are others:

- ``shifts``: the grey tiles are split in two halves by tile, stratified, anew for each seed. MobileNetV2
  learns on one half as it is, from nothing, and is adapted to the other under each shift of SHIFTS.
- ``kather19``: it learns on all grey tiles and is adapted to the 59 Kather-19 tiles made grey.
- ``colour``: it learns on the 59 Kather-19 tiles in colour and is adapted to the 30 Kather-16 ones. A
  smoke test: one standard error is 6 to 9 points.

A split by tile lets tiles of one patient fall into both halves, as the tiles say nothing of patients.
Tiles are resized to one size; a Kather-19 tile shows 112 micrometres, a Kather-16 tile 74, so scale shifts
too. Methods see images only, in an order drawn by the seed.

Example::

    python benchmarks/histology.py --device cuda --jobs 8 --weights weights --out shifts.json
    python benchmarks/histology.py --device cuda --protocols N-M --methods tesla tent shot --out more.json
    python benchmarks/histology.py --merge shifts.json more.json

A run can be cut into parts by --experiments, --shifts, --methods, --protocols, --seeds and --first-seed;
the JSON is written after every cell, and --seconds stops new ones. Trained networks are kept in --weights.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tesla_med.augment.training import turned
from tesla_med.compare.statistics import holm, mcnemar
from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import PROTOCOLS, PipelineConfig, SiteConfig
from tesla_med.engine.driver import Driver
from tesla_med.engine.memory import free_device_memory
from tesla_med.errors import TeslaMedError
from tesla_med.io.tiles import find_tiles
from tesla_med.models.base import Network, default_device, device_name, to_model_range
from tesla_med.models.checkpoint import make_card, save_checkpoint, versions
from tesla_med.models.loading import load_model
from tesla_med.prepare.tiles import stream
from tesla_med.tasks.labelled_tiles import LabelledTiles
from tesla_med.training.loop import TrainingRun
from tesla_med.tta.base import METHODS, MethodContext, TTAMethod, make_method

SHARED = Path(__file__).resolve().parents[2] / "shared"
CLASSES = 4
EXPERIMENTS = ("shifts", "kather19", "colour")
AGAINST = ("source", "bn", "tent", "shot")
SHIFTS = {
    "gamma": "x ** 2: darker, as from a thick section",
    "contrast": "half the contrast about the tile's mean",
    "blur": "Gaussian, sigma 1.5 px: out of focus",
    "noise": "Gaussian, standard deviation 0.08 of the range, one draw for all channels",
    "resolution": "sampled at half the resolution with anti-aliasing, and back",
}
DEVELOPMENT = {
    "gamma_up": "x ** 0.55: brighter",
    "contrast_up": "1.7 times the contrast about the tile's mean",
    "blur_mild": "Gaussian, sigma 1 px",
    "noise_mild": "Gaussian, standard deviation 0.05 of the range",
}
"""Other shifts, to choose recipes by; figures are those of SHIFTS."""
GAMMA = {"gamma": 2.0, "gamma_up": 0.55}
CONTRAST = {"contrast": 0.5, "contrast_up": 1.7}
BLUR = {"blur": (9, 1.5), "blur_mild": (7, 1.0)}  # pixels of the kernel, sigma
NOISE = {"noise": 0.08, "noise_mild": 0.05}
UNSHIFTED = "none"
NOTE = (
    "Not the paper's experiment: grey Kather-16 tiles split by tile (patients unknown), MobileNetV2 trained "
    "from nothing. Error in %, mean ± standard deviation over seeds."
)


def shifted(images: Tensor, name: str, seed: int) -> Tensor:
    """Return tiles (N, 3, H, W) in [0, 1] under a shift of SHIFTS at its fixed strength.

    Args:
        images: grey ones have three equal channels, and keep them equal.
        name: of the shift, of SHIFTS or DEVELOPMENT, or ``none``.
        seed: of the noise of SHIFTS; that of DEVELOPMENT is always the same.
    """
    from torchvision.transforms.v2 import functional

    height, width = images.shape[-2:]
    if name in GAMMA:
        images = functional.adjust_gamma(images, GAMMA[name])
    elif name in CONTRAST:
        images = functional.adjust_contrast(images, CONTRAST[name])
    elif name in BLUR:
        size, sigma = BLUR[name]
        images = functional.gaussian_blur(images, [size, size], [sigma, sigma])
    elif name in NOISE:
        generator = torch.Generator().manual_seed(seed if name in SHIFTS else 5)
        noise = torch.randn(len(images), 1, height, width, generator=generator)
        images = images + NOISE[name] * noise.to(images.device)
    elif name == "resolution":
        small = functional.resize(images, [height // 2, width // 2], antialias=True)
        images = functional.resize(small, [height, width], antialias=True)
    elif name != UNSHIFTED:
        raise ValueError(f"no shift {name!r}; known: {', '.join((*SHIFTS, *DEVELOPMENT))}")
    return images.clamp(0, 1)


# ------------------------------------------------------------ data


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Tiles in memory: images (N, 3, H, W) uint8, class indices (N,)."""

    images: Tensor
    labels: Tensor

    def __getitem__(self, places: Any) -> Tiles:
        index = torch.as_tensor(places)
        return Tiles(self.images[index.to(self.images.device)], self.labels[index])


@cache
def read_tiles(folder: Path, site_id: str, size: int, grey: bool, device: torch.device) -> Tiles:
    """Read every labelled tile of a folder once, in the order of names, onto the device.

    Args:
        folder: with a sub-folder a class.
        site_id: of ``site_configs/kather``, which knows the folders.
        size: they are resized to this, with anti-aliasing.
        grey: turn colour into luminance (ITU-R 601), repeated in three channels.
        device: for the images; labels stay on the CPU.
    """
    from torchvision.transforms.v2 import functional

    site: SiteConfig = load_site(f"kather/{site_id}")
    found = find_tiles(folder, site.tiles)
    kept = np.flatnonzero(found.labels >= 0).tolist()
    images, labels = [], []
    for batch in stream(found, kept, 64, (size, size)):
        for reason in batch.failed.values():
            raise SystemExit(reason)
        whole = functional.rgb_to_grayscale(batch.images, 3) if grey else batch.images
        images.append((255 * whole).round().to(torch.uint8))
        labels += [int(found.labels[place]) for place in batch.index]
    return Tiles(torch.cat(images).to(device), torch.tensor(labels))


def halves(labels: Tensor, seed: int) -> tuple[list[int], list[int]]:
    """Return the places of two halves, as many of each class in both."""
    from sklearn.model_selection import train_test_split

    first, second = train_test_split(
        np.arange(len(labels)), test_size=0.5, random_state=seed, stratify=labels.numpy()
    )
    return sorted(first.tolist()), sorted(second.tolist())


def data_of(experiment: str, seed: int, options: argparse.Namespace) -> tuple[Tiles, Tiles, list[int]]:
    """Return source tiles, target tiles, and the place of each target tile in its folder."""
    device, size = default_device(options.device), options.size

    def folder(name: str, site: str, grey: bool) -> Tiles:
        return read_tiles(options.data / name, site, size, grey, device)

    if experiment == "colour":
        source, target = (
            folder("kather19_color", "kather19", False),
            folder("kather16_color", "kather16", False),
        )
    else:
        source = folder("kather16_gray", "kather16", True)
        if experiment == "shifts":
            first, second = halves(source.labels, seed)
            if options.limit:
                second = second[:: -(-len(second) // options.limit)]
            return source[first], source[second], second
        target = folder("kather19_color", "kather19", True)
    return source, target, list(range(len(target.labels)))


# ------------------------------------------------------------ source networks


def pipeline_of(options: argparse.Namespace, experiment: str = "shifts") -> PipelineConfig:
    """Return the recipe ``kather`` for tiles of this size, with what was asked for over it.

    The few colour tiles take a quarter of the training steps.
    """
    steps = max(1, options.steps // 4) if experiment == "colour" else options.steps
    texts = (
        f"preprocessing.size=[{options.size},{options.size}]",
        f"model.params.width={options.width}",
        f"train.steps={steps}",
        "train.batch_size=64",
        "train.learning_rate=0.003",
        f"train.validate_every={max(1, steps // 10)}",
    )
    return load_pipeline("kather", (*texts, *options.set))


def weights_path(experiment: str, seed: int, options: argparse.Namespace) -> Path:
    """Return where the source network of an experiment and seed is kept."""
    return Path(
        options.weights / f"{experiment}-{seed}-{options.size}-{options.width}-{options.steps}.safetensors"
    )


def fitted(
    pipeline: PipelineConfig, source: Tiles, device: torch.device, seed: int
) -> tuple[TrainingRun, int]:
    """Train the pipeline's network on tiles in memory; flips and quarter turns vary them.

    Returns:
        The training, its network as it was at the best validation, and the number of tiles learned from.
    """
    count, config = len(source.labels), pipeline.train
    names, labels = [str(place) for place in range(count)], source.labels.to(source.images.device)
    data = LabelledTiles(source.images, labels, names, ["tiles"] * count, change=turned)
    training, held = data.split(config.validation_fraction, torch.Generator().manual_seed(seed))
    best: dict[str, Tensor] = {}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        run = TrainingRun(pipeline, data, device, seed)
        while run.step < config.steps:
            run.advance(training)
            if run.step % config.validate_every == 0 or run.step == config.steps:
                accuracy = run.validate(held)
                if accuracy > run.best:
                    run.best, run.best_step = accuracy, run.step
                    best = copy.deepcopy(run.model.state_dict())
    run.model.load_state_dict(best)
    run.model.eval()
    return run, training.images


def train(experiment: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a source network, unless it is there, and return what became of it."""
    path = weights_path(experiment, seed, options)
    start = time.perf_counter()
    row: dict[str, Any] = {"kind": "training", "experiment": experiment, "seed": seed}
    if not path.is_file():
        pipeline, device = pipeline_of(options, experiment), default_device(options.device)
        source, _, _ = data_of(experiment, seed, options)
        precision = options.precision if device.type == "cuda" else "float32"
        run, tiles = fitted(pipeline.model_copy(update={"precision": precision}), source, device, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(path, run.model, make_card(pipeline, (experiment,), {"seed": seed}))
        row |= {"validation_accuracy": run.best, "best_step": run.best_step, "tiles": tiles}
    return row | {"seconds": time.perf_counter() - start}


# ------------------------------------------------------------ adapting


class Stack:
    """Target tiles in their order, in memory, as :class:`tesla_med.engine.driver.Driver` wants a site."""

    joined = True
    channels = None

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images,))

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield batches of ``size``."""
        yield from torch.split(self.images, size)


def adapted_probs(method: TTAMethod, source: TTAMethod, protocol: str, images: Tensor) -> tuple[Tensor, bool]:
    """Return probabilities (N, L), and whether adaptation was finite.

    From the first batch on which it is not, predictions are those of the source model.

    Args:
        method: adapts, batch by batch under O, over all tiles under M.
        source: predicts once adaptation has failed.
        protocol: N-O, N-M, Y-O or Y-M.
        images: (N, 3, H, W) in [0, 1], in the order in which they come.
    """
    driver = Driver(method, protocol, "site")  # type: ignore[arg-type]
    if not driver.case_by_case:
        driver.adapt_to_site(Stack(images))  # type: ignore[arg-type]
    parts, finite = [], driver.finite
    for batch in torch.split(images, method.params.batch_slices or method.context.predict_batch):
        probs = driver.adapt_and_predict(batch) if finite else None
        finite = finite and probs is not None
        parts.append(source.predict(batch) if probs is None else probs)
    return torch.cat(parts), finite


def serves_tiles(name: str, pipeline: PipelineConfig) -> bool:
    """Return whether a method takes a tile classifier."""
    from tesla_med.models.base import build_model

    small = build_model(pipeline, {**pipeline.model.params, "width": 0.25})
    try:
        make_method(name, small, {}, MethodContext(torch.device("cpu")))
    except TeslaMedError as error:
        return "for classification" not in str(error)
    return True


def statistics_for(model: Network, source: Tiles, pipeline: PipelineConfig) -> dict[str, Any]:
    """Return the context's source feature statistics for the methods of the Y protocols."""
    from tesla_med.models.moments import source_statistics

    if "statistics" not in {item.name for item in dataclasses.fields(MethodContext)}:
        raise SystemExit("the Y protocols need methods with source statistics; leave them out of --protocols")
    places = range(0, len(source.labels), 64)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for start in places:
            part = source.images[start : start + 64].float() / 255
            yield (
                to_model_range(part, pipeline.preprocessing.model_range),
                source.labels[start : start + 64],
            )

    return {"statistics": source_statistics(model, batches(), CLASSES)}


@dataclasses.dataclass(frozen=True)
class Adapted:
    """What a method gives on target tiles in the order of their folder: probabilities (N, L), labels (N,)."""

    probs: Tensor
    labels: Tensor
    finite: bool
    updates: int
    seconds: float

    @property
    def right(self) -> Tensor:
        """Whether each tile's class was found, (N,)."""
        return self.probs.argmax(dim=1) == self.labels


def adapted_cell(cell: Mapping[str, Any], options: argparse.Namespace) -> Adapted:
    """Adapt one method to one target; ``params`` of the cell are over those of the pipeline."""
    experiment, shift, name = cell["experiment"], cell["shift"], cell["method"]
    protocol, seed = cell["protocol"], cell["seed"]
    pipeline, device = pipeline_of(options), default_device(options.device)
    model = load_model(weights_path(experiment, seed, options), pipeline, tuple(options.set)).model.to(device)
    source_tiles, target, _ = data_of(experiment, seed, options)
    order = torch.randperm(len(target.labels), generator=torch.Generator().manual_seed(seed))
    images = shifted(target.images.float() / 255, shift, seed)[order.to(device)]
    more = statistics_for(model, source_tiles, pipeline) if protocol.startswith("Y") else {}
    context = MethodContext(
        device,
        seed,
        pipeline.preprocessing.model_range,
        options.precision if device.type == "cuda" else "float32",
        pipeline.predict_batch,
        pipeline.cuda_graphs,
        **more,
    )
    start = time.perf_counter()
    params = {**pipeline.method_params(name, protocol), **cell.get("params", {})}
    method = make_method(name, model, params, context)
    source = method if name == "source" else make_method("source", model, {}, context)
    probs, finite = adapted_probs(method, source, protocol, images)
    probs = probs.cpu()
    seconds = time.perf_counter() - start
    updates = method.steps
    del method, source
    free_device_memory()  # the other processes need the memory of its graphs
    return Adapted(probs[order.argsort()], target.labels, finite, updates, seconds)


def measure_cell(cell: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Adapt one method to one target and return its row."""
    found = adapted_cell(cell, options)
    right, labels = found.right, found.labels
    return {
        "kind": "cell",
        **cell,
        "tiles": len(labels),
        "error_percent": 100 * (1 - float(right.float().mean())),
        "accuracy_by_class": [float(right[labels == k].float().mean()) for k in range(CLASSES)],
        "ece": ece(found.probs.numpy(), labels.numpy()),
        "finite": found.finite,
        "updates": found.updates,
        "seconds": found.seconds,
        "right": "".join("1" if value else "0" for value in right.tolist()),
    }


def ece(probs: np.ndarray, labels: np.ndarray, bins: int = 15) -> float:
    """Return the calibration error of the predicted class over equal bins of confidence."""
    confidence, right = probs.max(axis=1), probs.argmax(axis=1) == labels
    places = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = [
        abs(confidence[places == k].mean() - right[places == k].mean()) * (places == k).mean()
        for k in range(bins)
        if (places == k).any()
    ]
    return float(sum(gaps))


# ------------------------------------------------------------ the run


def cells_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is to be measured, seed by seed; a method that does not adapt has one protocol."""
    cells = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for experiment in options.experiments:
            shifts = options.shifts if experiment == "shifts" else [UNSHIFTED]
            for protocol in options.protocols:
                for name in options.methods:
                    method = METHODS.get(name)
                    shown = method.protocols if method.adapts else method.protocols[:1]
                    places = [UNSHIFTED, *shifts] if name == "source" else shifts
                    if protocol in shown:
                        cells += [
                            {
                                "experiment": experiment,
                                "shift": shift,
                                "method": name,
                                "protocol": protocol,
                                "seed": seed,
                            }
                            for shift in dict.fromkeys(places)
                        ]
    return cells


def one_thread() -> None:
    """Leave the cores to the other processes."""
    torch.set_num_threads(1)


def results(jobs: Iterable[tuple[Any, ...]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the result of each (function, arguments...), in processes of their own where asked for.

    What fails is told on standard error and left out; after ``--seconds`` nothing new is begun.
    """
    listed = list(jobs)
    if options.jobs <= 1:
        for function, *arguments in listed:
            if time.perf_counter() < options.until:
                yield from told(lambda: function(*arguments), arguments)  # noqa: B023 - called at once
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, context, initializer=one_thread) as pool:
        coming: dict[Future[dict[str, Any]], Any] = {
            pool.submit(function, *arguments): arguments for function, *arguments in listed
        }
        for future in as_completed(coming):
            if time.perf_counter() >= options.until:
                for other in coming:
                    other.cancel()
            if not future.cancelled():
                yield from told(future.result, coming[future])


def told(work: Any, arguments: Any) -> Iterator[dict[str, Any]]:
    """Yield what ``work`` returns; a method that cannot do it is told of."""
    try:
        yield work()
    except (TeslaMedError, RuntimeError) as error:
        print(f"not measured: {arguments[0]}: {error}", file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train what is missing, measure every cell, write the JSON as it grows."""
    cells = cells_of(options)
    content: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/histology.py", *sys.argv[1:]]),
        "note": NOTE,
        "shifts": SHIFTS | DEVELOPMENT,
        "device": device_name(default_device(options.device)),
        "precision": options.precision,
        "versions": versions(),
        "targets": {},
        "rows": [],
    }
    options.until = time.perf_counter() + options.seconds
    pairs = dict.fromkeys((cell["experiment"], cell["seed"]) for cell in cells)
    for experiment, seed in pairs:
        content["targets"][f"{experiment} {seed}"] = data_of(experiment, seed, options)[2]
    for jobs in (
        [(train, experiment, seed, options) for experiment, seed in pairs],
        [(measure_cell, cell, options) for cell in cells],
    ):
        for row in results(jobs, options):
            content["rows"].append(row)
            print(line_of(row), flush=True)
            if options.out:
                options.out.write_text(json.dumps(content) + "\n", encoding="utf-8")
    return content


def line_of(row: Mapping[str, Any]) -> str:
    """Return a line for the terminal."""
    if row["kind"] == "training":
        accuracy = row.get("validation_accuracy")
        shown = "there already" if accuracy is None else f"{100 * accuracy:.1f} % of held-out tiles right"
        return f"trained {row['experiment']} seed {row['seed']}: {shown}, {row['seconds']:.0f} s"
    failed = "" if row["finite"] else ", not finite"
    return (
        f"{row['experiment']:<9}{row['shift']:<11}{row['method']:<17}{row['protocol']} seed {row['seed']}: "
        f"error {row['error_percent']:5.1f} %, {row['seconds']:5.1f} s{failed}"
    )


# ------------------------------------------------------------ tables


def merged(contents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several files as one; of a cell measured twice the last counts."""
    targets: dict[str, list[int]] = {}
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for content in contents:
        targets |= content["targets"]
        for row in content["rows"]:
            key = tuple(
                row.get(name) for name in ("kind", "experiment", "shift", "method", "protocol", "seed")
            )
            rows[key] = row
    return {"targets": targets, "rows": list(rows.values())}


def report(content: Mapping[str, Any]) -> str:
    """Return every table as Markdown."""
    cells = [row for row in content["rows"] if row["kind"] == "cell"]
    lines = [NOTE, ""]
    for experiment in [name for name in EXPERIMENTS if any(row["experiment"] == name for row in cells)]:
        mine = [row for row in cells if row["experiment"] == experiment]
        lines += [f"### {experiment}", "", *error_table(mine), ""]
        if experiment == "colour":
            lines += ["30 tiles: one standard error is 6 to 9 points, so this only shows that it runs.", ""]
        paired = paired_table(mine, content["targets"])
        if paired:
            lines += paired
    return "\n".join(lines).rstrip() + "\n"


def error_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return error by method, protocol and shift, and their mean over the shifts."""
    shifts = [
        name for name in (*SHIFTS, *DEVELOPMENT, UNSHIFTED) if any(row["shift"] == name for row in rows)
    ]
    made = [name for name in shifts if name != UNSHIFTED]
    columns = [*shifts, "mean of shifts"] if len(made) > 1 else shifts
    lines = [f"| method | protocol | {' | '.join(columns)} | ECE | s |", "|---" * (len(columns) + 4) + "|"]
    for protocol, name in sorted({(row["protocol"], row["method"]) for row in rows}, key=in_table):
        mine = [row for row in rows if (row["method"], row["protocol"]) == (name, protocol)]
        shown = [spread([row["error_percent"] for row in mine if row["shift"] == shift]) for shift in shifts]
        if len(made) > 1:
            shown.append(spread(means_of_seeds(mine, made)))
        shift_rows = [row for row in mine if row["shift"] in made] or mine
        error = np.mean([row["ece"] for row in shift_rows])
        took = [row["seconds"] for row in shift_rows if row["seconds"] is not None]  # null: elsewhere
        seconds = f"{np.mean(took):.1f}" if took else "n/a"
        lines.append(f"| {name} | {protocol} | {' | '.join(shown)} | {error:.3f} | {seconds} |")
    return lines


def in_table(key: tuple[str, str]) -> tuple[Any, ...]:
    """Return where a protocol and method come: protocols in order, the plainest method first, ours last."""
    protocol, name = key
    plain = AGAINST.index(name) if name in AGAINST else len(AGAINST)
    return PROTOCOLS.index(protocol), name.startswith("tesla"), plain, name  # type: ignore[arg-type]


def means_of_seeds(rows: list[dict[str, Any]], shifts: list[str]) -> list[float]:
    """Return the mean error over ``shifts`` of each seed that has all of them."""
    by_seed: dict[int, dict[str, float]] = {}
    for row in rows:
        by_seed.setdefault(row["seed"], {})[row["shift"]] = row["error_percent"]
    return [
        float(np.mean([found[name] for name in shifts]))
        for found in by_seed.values()
        if set(shifts) <= set(found)
    ]


def spread(values: list[float]) -> str:
    """Return mean and standard deviation, as in 12.3 ± 0.4."""
    if not values:
        return "n/a"
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


def outcomes(
    rows: list[dict[str, Any]], targets: Mapping[str, list[int]]
) -> dict[tuple[str, str, str, int], dict[int, float]]:
    """Return (method, protocol, shift, seed) -> place of a tile in its folder -> 1.0 where it is right."""
    return {
        (row["method"], row["protocol"], row["shift"], row["seed"]): dict(
            zip(
                targets[f"{row['experiment']} {row['seed']}"],
                (float(mark) for mark in row["right"]),
                strict=True,
            )
        )
        for row in rows
    }


def paired_table(
    rows: list[dict[str, Any]], targets: Mapping[str, list[int]], ours: str = "tesla"
) -> list[str]:
    """Return the change of the error of ``ours`` against others, paired by tile, by shift and over shifts.

    A tile is one unit whatever the number of seeds and shifts that it comes in: its mean difference over
    them. p is McNemar's exact test over tiles, Holm corrected over all entries of the table.
    """
    found = outcomes(rows, targets)
    shifts = [name for name in (*SHIFTS, *DEVELOPMENT) if any(row["shift"] == name for row in rows)] or [
        UNSHIFTED
    ]
    columns = [*shifts, "all"] if len(shifts) > 1 else shifts
    entries: dict[tuple[str, str], tuple[float, float | None]] = {}
    order = []
    for protocol in [name for name in PROTOCOLS if any(key[:2] == (ours, name) for key in found)]:
        for other in AGAINST:
            under = protocol if METHODS.get(other).adapts else "N-O"
            order.append((protocol, other))
            for column in columns:
                differences = tile_differences(
                    found, (ours, protocol), (other, under), shifts if column == "all" else [column]
                )
                if len(differences):
                    entries[f"{protocol} {other}", column] = (
                        0.0 - 100 * float(differences.mean()),
                        mcnemar(differences),
                    )
    if not entries:
        return []
    corrected = holm({key: p for key, (_, p) in entries.items()})
    lines = [
        f"Change of the error of {ours} in points, below 0 better; p of McNemar's exact test over tiles, "
        "Holm corrected.",
        "",
        f"| protocol | against | {' | '.join(columns)} |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for protocol, other in order:
        shown = []
        for column in columns:
            key = (f"{protocol} {other}", column)
            p = corrected.get(key)
            text = "" if p is None else (" (p < 0.001)" if p < 0.001 else f" (p {p:.3f})")
            shown.append(f"{entries[key][0]:+.1f}{text}" if key in entries else "n/a")
        if any(text != "n/a" for text in shown):
            lines.append(f"| {protocol} | {other} | {' | '.join(shown)} |")
    return [*lines, ""]


def tile_differences(
    found: Mapping[tuple[str, str, str, int], Mapping[int, float]],
    ours: tuple[str, str],
    theirs: tuple[str, str],
    shifts: list[str],
) -> np.ndarray:
    """Return for each tile the mean difference of being right over the seeds and shifts that both have."""
    tiles: dict[int, list[float]] = {}
    for (name, protocol, shift, seed), right in found.items():
        other = found.get((*theirs, shift, seed))
        if (name, protocol) != ours or shift not in shifts or other is None:
            continue
        for place, value in right.items():
            tiles.setdefault(place, []).append(value - other[place])
    return np.array([float(np.mean(values)) for values in tiles.values()])


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all programs on these tiles."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument(
        "--data", type=Path, default=SHARED / "data" / "histology", help="folder of the tiles"
    )
    parser.add_argument("--weights", type=Path, default=Path("histology-weights"), help="folder of networks")
    parser.add_argument("--size", type=int, default=128, help="pixels a side")
    parser.add_argument("--width", type=float, default=1.0, help="of MobileNetV2")
    parser.add_argument("--steps", type=int, default=2500, help="of training")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16", help="on CUDA")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing new after these")
    parser.add_argument("--limit", type=int, default=None, help="target tiles of 'shifts', at most")
    parser.add_argument("--set", nargs="*", default=[], help="key=value over pipeline kather")
    return parser


def main() -> None:
    """Parse the command line, run, print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--experiments", nargs="*", default=list(EXPERIMENTS), choices=EXPERIMENTS)
    parser.add_argument(
        "--shifts", nargs="*", default=list(SHIFTS), choices=(*SHIFTS, *DEVELOPMENT, UNSHIFTED)
    )
    parser.add_argument("--methods", nargs="*", default=[], help="default: all that serve tiles")
    parser.add_argument("--protocols", nargs="*", default=["N-O"], choices=PROTOCOLS)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="tables of earlier --out files")
    parser.add_argument(
        "--quick", action="store_true", help="tiny network and tiles, three methods, one seed"
    )
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.merge:
        read = [json.loads(path.read_text(encoding="utf-8")) for path in options.merge]
        print(report(merged(read)))
        return
    if options.quick:
        options.size, options.width, options.steps, options.seeds, options.limit = 64, 0.25, 3, 1, 24
        options.shifts, options.methods = ["gamma", "noise"], options.methods or ["source", "bn", "tesla"]
        options.set = ["methods.tesla.weak_views=2", "protocols={}", *options.set]
    if not options.methods:
        pipeline = pipeline_of(options)
        options.methods = [name for name in METHODS.names() if serves_tiles(name, pipeline)]
    print(report(measure(options)))


if __name__ == "__main__":
    main()
