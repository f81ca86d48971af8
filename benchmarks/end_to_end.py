"""Wall time from files to masks, report included, against the passes that the recipe cannot do without.

Example::

    python benchmarks/end_to_end.py --device cuda --precision bfloat16 --out end_to_end.json
    python benchmarks/end_to_end.py --device cpu --quick
    python benchmarks/end_to_end.py --device cuda --task tiles --cases 640 3200 6400

Whole runs on generated volumes (or tiles), of the source model, of the released recipe and of the default
one. Seconds are fitted as a + b x cases. The floor of a case is the number of its passes through networks,
those of prediction, guard and choice of the scaling included, times what a pass of each kind takes alone in
the same process, without CUDA graphs; reading, writing, scores and reports have no part in it. Plain
inference is a loop by hand: read, one prediction, write. The stages are those of one more run, in which the
device is waited for at both ends of each; what other threads do meanwhile stands beside them.

The network has seeded random weights and a head that is fitted to one volume by least squares, so that masks
are bodies and not noise; --weights takes a file in place of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tesla_med.adapt import adapt_site
from tesla_med.config.files import load_pipeline
from tesla_med.engine.stages import Watch
from tesla_med.io.volumes import read_volume, save_image
from tesla_med.models.base import Network, build_model, default_device, device_name, norm_layers
from tesla_med.models.checkpoint import make_card, save_checkpoint, versions
from tesla_med.models.loading import load_model
from tesla_med.models.normalisation import batch_statistics

DISTINCT = 8
"""Volumes that are generated; the others are copies under other names."""
SITES = {"volumes": "prostate/F", "tiles": "kather/kather19"}
PIPELINES = {
    "volumes": {"source": "prostate", "released": "prostate_released", "default": "prostate"},
    "tiles": {"source": "kather", "released": "kather_paper", "default": "kather"},
}
TILES = ("TUM", "STR", "LYM", "NORM")


# ---------------------------------------------------------------- data and network


def generate_volumes(folder: Path, cases: int, slices: int, size: int) -> None:
    """Write volumes with a bright body in noise, and its masks, as the site expects them."""
    axis = np.linspace(-1, 1, size)
    affine = np.diag([0.6, 0.6, 3.0, 1.0])
    for case in range(cases):
        image, mask = (folder / f"Case{case:03d}{end}.nii.gz" for end in ("", "_segmentation"))
        if case >= DISTINCT:
            for path in (image, mask):
                shutil.copyfile(
                    path.with_name(path.name.replace(f"{case:03d}", f"{case % DISTINCT:03d}")), path
                )
            continue
        generator = np.random.default_rng(case)
        place, radius = generator.uniform(-0.15, 0.15, 2), generator.uniform(0.25, 0.45)
        sides = radius * np.sqrt(np.clip(1 - np.linspace(-1.2, 1.2, slices) ** 2, 0, 1))
        distance = np.hypot(axis[:, None] - place[0], 1.2 * (axis[None, :] - place[1]))
        body = distance[:, :, None] < sides
        values = 300 * body + 60 * (distance[:, :, None] < 0.9) + 60 * generator.random((size, size, slices))
        save_image(image, values, affine, dtype=np.int16)
        save_image(mask, body, affine, dtype=np.uint8)


def generate_tiles(folder: Path, count: int, size: int) -> None:
    """Write tiles of noise of a colour a class, as the site expects them."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for number in range(count):
        path = folder / TILES[number % len(TILES)] / f"{number:06d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number >= 64:
            shutil.copyfile(path.with_name(f"{number % 64:06d}.png"), path)
            continue
        colour = np.array([150, 60 + 40 * (number % len(TILES)), 160])
        array = np.clip(colour + generator.normal(0, 25, (size, size, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(array).save(path)


def save_network(path: Path, sample: Path, options: argparse.Namespace) -> None:
    """Write a network with seeded random weights whose head is fitted to one volume by least squares."""
    torch.manual_seed(0)
    pipeline = load_pipeline(PIPELINES[options.task]["default"], settings(options, "default"))
    model = build_model(pipeline)
    if options.task == "volumes":
        fit_head(model, sample, options)
    save_checkpoint(path, model, make_card(pipeline))


@torch.no_grad()
def fit_head(model: Network, sample: Path, options: argparse.Namespace) -> None:
    """Set running statistics and head so that the body of one volume is found."""
    device = default_device(options.device)
    values, mask = (
        torch.from_numpy(read_volume(sample.with_name(name)).array[0]).permute(2, 0, 1)
        for name in (sample.name, sample.name.replace(".nii", "_segmentation.nii"))
    )
    model.to(device)
    images = scaled(values.to(device), options.size)
    seen: list[Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    with batch_statistics(model, momentum=1.0):
        model(images)
    handle.remove()
    features = seen[0].movedim(1, -1).flatten(0, -2).double()
    wanted = torch.nn.functional.interpolate(mask[:, None].float(), images.shape[-2:]).flatten().double()
    ones = torch.ones(len(features), 1, dtype=torch.double, device=device)
    features = torch.cat([features, ones], dim=1)
    small = 1e-3 * torch.eye(features.shape[1], dtype=torch.double, device=device)
    weight = torch.linalg.solve(features.T @ features + small, features.T @ (8 * wanted.to(device) - 4))
    head = next(layer for layer in model.head.modules() if isinstance(layer, nn.Conv2d))
    head.weight.zero_()
    head.bias.zero_()
    head.weight[1, :, 0, 0] = weight[:-1]
    head.bias[1] = weight[-1]
    model.cpu()


def scaled(values: Tensor, size: int) -> Tensor:
    """Return slices (N, I, J) as images (N, 1, size, size) in [-1, 1]."""
    low, high = values.min(), values.max()
    images = 2 * (values - low) / (high - low) - 1
    return torch.nn.functional.interpolate(images[:, None], (size, size), mode="bilinear")


def settings(options: argparse.Namespace, way: str) -> tuple[str, ...]:
    """Return what is set over the pipelines."""
    found = [
        f"model.params.width={options.width}",
        f"precision={options.precision}",
        *options.set,
        f"preprocessing.size=[{options.size},{options.size}]",
    ]
    if options.quick and way != "source":
        batch = "8" if options.task == "tiles" else "2"
        found += [f"protocols.N-O.tesla.batch_slices={batch}", f"protocols.N-M.tesla.batch_slices={batch}"]
        found += ["protocols.N-M.tesla.epochs=2"]
        if options.task == "volumes":
            found += ["protocols.N-O.tesla.updates_per_case=2"]
    return tuple(found)


# ---------------------------------------------------------------- passes


@dataclass(frozen=True)
class Kind:
    """What makes two passes through a network alike."""

    network: str
    shape: tuple[int, ...]
    batch_statistics: bool
    gradient: str
    learned: int
    precision: str


class Passes:
    """Counts the passes through networks inside the block by kind, and times each kind alone afterwards."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.count: Counter[Kind] = Counter()
        self._examples: dict[Kind, tuple[nn.Module, Tensor]] = {}

    def __enter__(self) -> Passes:
        self._handle = nn.modules.module.register_module_forward_pre_hook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _note(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not isinstance(module, Network):
            return
        images = inputs[0]
        learned = sum(item.requires_grad for item in module.parameters())
        wanted = torch.is_grad_enabled()
        gradient = (
            "images" if wanted and images.requires_grad else "weights" if wanted and learned else "none"
        )
        training = any(layer.training for layer in norm_layers(module))
        cast = (
            str(torch.get_autocast_dtype(self.device.type))
            if torch.is_autocast_enabled(self.device.type)
            else ""
        )
        about = type(module).__name__, tuple(images.shape), training
        kind = Kind(*about, gradient, learned if gradient == "weights" else 0, cast)
        self.count[kind] += 1
        if kind not in self._examples:
            self._examples[kind] = module, images.detach().clone()

    def floor(self, repeats: int) -> tuple[float, list[dict[str, Any]]]:
        """Return the seconds of all passes, by what each kind takes alone, and a row per kind."""
        rows = []
        for kind, count in self.count.items():
            seconds = timed(self._pass(kind), self.device, repeats)
            about = {**vars(kind), "shape": list(kind.shape)}
            rows.append({**about, "passes": count, "ms_per_pass": 1e3 * seconds, "seconds": count * seconds})
        return sum(row["seconds"] for row in rows), rows

    def _pass(self, kind: Kind) -> Callable[[], None]:
        module, images = self._examples[kind]
        dtype = getattr(torch, kind.precision.removeprefix("torch.")) if kind.precision else None

        def work() -> None:
            held = batch_statistics(module, momentum=None) if kind.batch_statistics else nullcontext()
            cast = nullcontext() if dtype is None else torch.autocast(self.device.type, dtype=dtype)
            inputs = images.requires_grad_(kind.gradient == "images")
            module.zero_grad(set_to_none=True)
            with torch.set_grad_enabled(kind.gradient != "none"), held:
                with cast:
                    output = module(inputs)
                if kind.gradient != "none":
                    output.float().mean().backward()
            inputs.grad = None

        return work


def timed(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Return the median seconds of some work, after two that warm up."""
    found = []
    for number in range(repeats + 2):
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        if number >= 2 or repeats == 1:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------- runs


class Bench:
    """Generated data, a network, and runs on them."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self.options, self.work = options, work
        self.device = default_device(options.device)
        self.weights = options.weights or work / "source.safetensors"
        most = max(*options.cases, options.staged)
        data = work / "data"
        if options.task == "tiles":
            generate_tiles(data, most, options.size)
        else:
            generate_volumes(data, most, options.slices, options.size)
        if options.weights is None:
            save_network(self.weights, data / "Case000.nii.gz", options)

    @contextmanager
    def cases(self, count: int) -> Iterator[Path]:
        """Give a folder of the first ``count`` cases or tiles."""
        folder = self.work / "part"
        suffix = "*.png" if self.options.task == "tiles" else "*.nii.gz"
        whole = self.work / "data"
        for path in sorted(whole.rglob(suffix)):
            number = path.name[:6] if self.options.task == "tiles" else path.name[4:7]
            if int(number) < count:
                target = folder / path.relative_to(whole)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def run(self, way: str, protocol: str, count: int, *extra: str) -> tuple[float, list[float]]:
        """Return the seconds of a run, and those after which each of its items was done."""
        gc.collect()
        stamps: list[float] = []
        items = "tiles" if self.options.task == "tiles" else "cases"
        out = self.work / "out"

        def progress(stage: str, done: int, total: int) -> None:
            if stage == items:
                stamps.extend([time.perf_counter() - start] * (done - len(stamps)))

        with self.cases(count) as folder:
            synchronise(self.device)
            start = time.perf_counter()
            result = adapt_site(
                SITES[self.options.task],
                folder,
                weights=self.weights,
                pipeline=PIPELINES[self.options.task][way],
                method="source" if way == "source" else "tesla",
                protocol=protocol,
                out=out,
                device=self.options.device,
                overwrite=True,
                overrides=(*settings(self.options, way), *extra),
                progress=progress,
            )
            seconds = time.perf_counter() - start
        if result.failed or result.reports_failed:
            raise SystemExit(f"{way} {protocol}: {result.failed[:3]} {result.reports_failed}")
        shutil.rmtree(out)
        return seconds, stamps

    def plain(self, count: int) -> float:
        """Return the seconds of a loop by hand over ``count`` cases or tiles: read, predict once, write."""
        return self._plain_tiles(count) if self.options.task == "tiles" else self._plain_volumes(count)

    def _plain_tiles(self, count: int) -> float:
        from tesla_med.config.files import load_site
        from tesla_med.io.tiles import find_tiles
        from tesla_med.models.base import to_model_range
        from tesla_med.prepare.tiles import stream

        pipeline = load_pipeline(PIPELINES["tiles"]["source"], settings(self.options, "source"))
        model = load_model(self.weights, pipeline).model.to(self.device).eval()
        size = (self.options.size, self.options.size)
        start = time.perf_counter()
        with self.cases(count) as folder, torch.no_grad():
            tiles = find_tiles(folder, load_site(SITES["tiles"]).tiles)
            for batch in stream(tiles, range(len(tiles.paths)), pipeline.predict_batch, size):
                inputs = to_model_range(batch.images.to(self.device), pipeline.preprocessing.model_range)
                model(inputs).softmax(dim=1).cpu()
        return time.perf_counter() - start

    def _plain_volumes(self, count: int) -> float:
        pipeline = load_pipeline(PIPELINES["volumes"]["source"], settings(self.options, "source"))
        model = load_model(self.weights, pipeline).model.to(self.device).eval()
        size = self.options.size
        dtype = torch.bfloat16 if self.options.precision == "bfloat16" else None
        start = time.perf_counter()
        for number in range(count):
            volume = read_volume(self.work / "data" / f"Case{number:03d}.nii.gz")
            values = torch.from_numpy(volume.array[0]).permute(2, 0, 1).to(self.device)
            images, parts = scaled(values, size), []
            with torch.no_grad():
                for batch in images.split(pipeline.predict_batch):
                    with torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None):
                        parts.append(model(batch).float())
                probs = torch.cat(parts).softmax(dim=1)
                probs = torch.nn.functional.interpolate(probs, values.shape[-2:], mode="bilinear")
            mask = probs.argmax(dim=1).permute(1, 2, 0).cpu().numpy()
            save_image(self.work / "plain" / f"{number}.nii.gz", mask, volume.affine, dtype=np.uint8)
        return time.perf_counter() - start

    def row(self, way: str, protocol: str) -> dict[str, Any]:
        """Measure one way under one protocol."""
        options, device = self.options, self.device
        with Passes(device) as passes:  # a run that warms up, too
            self.run(way, protocol, options.counted, "cuda_graphs=false")
        floor, kinds = passes.floor(options.repeats)
        floor /= options.counted
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, stamps = {}, []
        for count in [max(options.cases)] if options.once else sorted(options.cases):
            seconds[count], stamps = self.run(way, protocol, count)
            print(f"{way} {protocol}: {count} in {seconds[count]:.2f} s", flush=True)
        if options.once:
            seconds = {count: stamps[count - 1] for count in sorted(options.cases)}
        gpu = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
        with Watch(lambda: synchronise(device)) as watch:
            whole, _ = self.run(way, protocol, options.staged)
        stages = {name: 1e3 * value / options.staged for name, value in watch.seconds.items()}
        stages["other"] = 1e3 * whole / options.staged - sum(stages.values())
        start, each = fitted(seconds)
        return {
            "way": way,
            "protocol": protocol,
            "precision": options.precision,
            "seconds": seconds,
            "seconds_at_start": start,
            "seconds_per_case": each,
            "slopes_between_seconds_per_case": slopes(seconds),
            "slopes_within_the_last_run_seconds_per_case": slopes(
                {count: stamps[count - 1] for count in sorted(options.cases) if count <= len(stamps)}
            ),
            "floor_seconds_per_case": floor,
            "ratio_to_floor": each / floor,
            "passes": kinds,
            "stages_ms_per_case": stages,
            "beside_ms_per_case": {
                name: 1e3 * value / options.staged for name, value in watch.beside.items()
            },
            "peak_gpu_memory_mib": gpu,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def fitted(seconds: dict[int, float]) -> tuple[float, float]:
    """Return a and b of seconds = a + b x cases, by least squares; of one count b is the mean."""
    counts = list(seconds)
    if len(counts) == 1:
        return 0.0, seconds[counts[0]] / counts[0]
    slope, start = np.polyfit(counts, [seconds[count] for count in counts], 1)
    return float(start), float(slope)


def slopes(seconds: dict[int, float]) -> dict[str, float]:
    """Return the seconds per case between each two counts that follow each other."""
    counts = sorted(seconds)
    pairs = pairwise(counts)
    return {f"{one}-{two}": (seconds[two] - seconds[one]) / (two - one) for one, two in pairs}


# ---------------------------------------------------------------- table


def table(content: dict[str, Any]) -> str:
    """Return the rows as Markdown."""
    rows, item = content["results"], content["item"]
    lines = [
        f"| | s per {item} | floor | ratio | times plain inference | s at the start | MiB | MiB on the GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plain = content["plain_seconds_per_case"]
    for row in rows:
        gpu = "" if row["peak_gpu_memory_mib"] is None else f"{row['peak_gpu_memory_mib']:.0f}"
        lines.append(
            f"| {row['way']} {row['protocol']} | {row['seconds_per_case']:.3f} | "
            f"{row['floor_seconds_per_case']:.3f} | {row['ratio_to_floor']:.2f} | "
            f"{row['seconds_per_case'] / plain:.1f} | "
            f"{row['seconds_at_start']:.1f} | {row['peak_memory_mib']:.0f} | {gpu} |"
        )
    lines.append(f"| plain inference | {plain:.3f} | | | 1.0 | | | |")
    for key, title in (("stages_ms_per_case", "in the run"), ("beside_ms_per_case", "beside it")):
        names = list(dict.fromkeys(name for row in rows for name in row[key]))
        lines += [
            "",
            f"| ms per {item}, {title} | " + " | ".join(names) + " |",
            "|---" * (len(names) + 1) + "|",
        ]
        for row in rows:
            cells = [f"{row[key][name]:.1f}" if name in row[key] else "" for name in names]
            lines.append(f"| {row['way']} {row['protocol']} | " + " | ".join(cells) + " |")
    lines += [""]
    for row in rows:
        for key in ("slopes_between_seconds_per_case", "slopes_within_the_last_run_seconds_per_case"):
            text = ", ".join(f"{name}: {value:.3f}" for name, value in row[key].items())
            lines.append(
                f"{row['way']} {row['protocol']}, {key.split('_seconds')[0].replace('_', ' ')}: {text}"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, write the JSON; return what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--task", choices=("volumes", "tiles"), default="volumes")
    parser.add_argument("--ways", nargs="*", default=["source", "released", "default"])
    parser.add_argument("--protocols", nargs="*", default=["N-O", "N-M"])
    parser.add_argument("--cases", nargs="*", type=int, default=None, help="default 1 10 50 100; tiles: x 64")
    parser.add_argument(
        "--once", action="store_true", help="one run, of the most cases; the others are parts of it"
    )
    parser.add_argument("--slices", type=int, default=24)
    parser.add_argument("--size", type=int, default=None, help="pixels a side; default 256, tiles 224")
    parser.add_argument(
        "--width", type=float, default=None, help="default 64 on a GPU, 16 on the CPU, tiles 1"
    )
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--counted", type=int, default=None, help="cases of the run whose passes are counted")
    parser.add_argument("--staged", type=int, default=None, help="cases of the run whose stages are timed")
    parser.add_argument("--repeats", type=int, default=None, help="of each pass that is timed alone")
    parser.add_argument("--set", nargs="*", default=[], help="key=value over the pipelines")
    parser.add_argument(
        "--quick", action="store_true", help="32 pixels, width 4, 1, 2 and 3 cases of 4 slices"
    )
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    gpu, tiles = default_device(options.device).type == "cuda", options.task == "tiles"
    each = 64 if tiles else 1
    if options.quick:
        options.size, options.width, options.slices = 32, 0.25 if tiles else 4, 4
        options.cases = options.cases or ([8, 16] if tiles else [1, 2, 3])
        options.counted = options.staged = options.cases[-1]
        options.repeats = 1
    options.cases = options.cases or [each * count for count in (1, 10, 50, 100)]
    options.size = options.size or (224 if tiles else 256)
    options.width = options.width or (1 if tiles else 64 if gpu else 16)
    options.width = options.width if tiles else int(options.width)
    options.repeats = options.repeats or (20 if gpu else 3)
    options.counted = options.counted or 4 * each
    options.staged = options.staged or min(10 * each, max(options.cases))
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(options, Path(name))
        count = min(10 * each, max(options.cases))
        bench.plain(each)  # warms up
        plain = bench.plain(count) / count
        rows = [
            bench.row(way, protocol)
            for way in options.ways
            for protocol in (options.protocols if way != "source" else options.protocols[:1])
        ]
    content = {
        "command": " ".join(["python", "benchmarks/end_to_end.py", *(arguments or sys.argv[1:])]),
        "device": device_name(default_device(options.device)),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "item": "tile" if tiles else "case",
        "slices": None if tiles else options.slices,
        "size": options.size,
        "width": options.width,
        "plain_seconds_per_case": plain,
        "results": rows,
    }
    print(table(content))
    if options.out:
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


if __name__ == "__main__":
    main()
