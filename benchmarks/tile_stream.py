"""Tiles per second of whole runs against plain inference, and memory against the number of tiles.

Example::

    python benchmarks/tile_stream.py --device cpu --out stream.json
    python benchmarks/tile_stream.py --device cuda --tiles 10000 --size 224 --width 1 --out stream.json

Plain inference reads the same files ahead in the same way and runs the same network once over each tile; it
writes nothing. A run of ``source`` also writes its predictions and figures; one of ``tesla`` (N-O) adapts to
each batch before it predicts it, and predicts with the source model as well. Every measurement has a process
of its own. Memory is the highest resident size above that of the process before it begins; with ten times as
many tiles it should stay, but for paths and probabilities, some hundred bytes a tile.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MARK = "tile-stream-result: "
FOLDERS = ("TUM", "STR", "LYM", "NORM")
PLAIN = "plain"


def generate(folder: Path, count: int, size: int) -> None:
    """Write ``count`` tiles of noise of a colour a class, as site kather/kather19 expects them."""
    from PIL import Image

    generator = np.random.default_rng(0)
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    for number in range(count):
        place = number % len(FOLDERS)
        colour = np.array([150, 60 + 40 * place, 160])
        array = np.clip(colour + generator.normal(0, 25, (size, size, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(array).save(folder / FOLDERS[place] / f"{number:06d}.png")


def settings(options: argparse.Namespace) -> tuple[str, ...]:
    """Return what is set over pipeline kather."""
    return (
        f"preprocessing.size=[{options.size},{options.size}]",
        f"model.params.width={options.width}",
        "reports=[]",  # predictions.csv is always written
    )


def save_network(path: Path, options: argparse.Namespace) -> None:
    """Write a fresh network; what it answers does not matter here."""
    import torch

    from tesla_med.config.files import load_pipeline
    from tesla_med.models.base import build_model
    from tesla_med.models.checkpoint import make_card, save_checkpoint

    torch.manual_seed(0)
    pipeline = load_pipeline("kather", settings(options))
    save_checkpoint(path, build_model(pipeline), make_card(pipeline, ("kather19",), {}))


def plain_inference(folder: Path, weights: Path, options: argparse.Namespace) -> int:
    """Run the network once over every tile of a folder and return how many there were."""
    import torch

    from tesla_med.config.files import load_pipeline, load_site
    from tesla_med.io.tiles import find_tiles
    from tesla_med.models.base import default_device, to_model_range
    from tesla_med.models.loading import load_model
    from tesla_med.prepare.tiles import stream

    pipeline = load_pipeline("kather", settings(options))
    device = default_device(options.device)
    model = load_model(weights, pipeline).model.to(device).eval()
    tiles = find_tiles(folder, load_site("kather/kather19").tiles)
    size = (options.size, options.size)
    taken = []
    with torch.no_grad():
        for batch in stream(tiles, range(len(tiles.paths)), pipeline.predict_batch, size):
            inputs = to_model_range(batch.images.to(device), pipeline.preprocessing.model_range)
            taken.append(model(inputs).softmax(dim=1).cpu())
    return sum(len(part) for part in taken)


def one_run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure one way over one folder in this process."""
    import torch

    from tesla_med.adapt import adapt_site
    from tesla_med.models.base import default_device

    torch.set_num_threads(options.threads)
    device = default_device(options.device)
    folder, weights = options.work / f"tiles-{options.count}", options.work / "network.safetensors"
    before = memory_mib()
    start = time.perf_counter()
    if options.way == PLAIN:
        count = plain_inference(folder, weights, options)
    else:
        result = adapt_site(
            "kather19",
            folder,
            weights=weights,
            pipeline="kather",
            method=options.way,
            protocol="N-O",
            out=options.work / f"{options.way}-{options.count}",
            device=options.device,
            overrides=settings(options),
        )
        count = sum(item.status != "failed" for item in result.results)
    seconds = time.perf_counter() - start
    gpu = torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else None
    return {
        "way": options.way,
        "tiles": count,
        "seconds": seconds,
        "tiles_per_second": count / seconds,
        "memory_mib": memory_mib() - before,
        "gpu_memory_mib": gpu,
    }


def memory_mib() -> float:
    """Return the highest resident size of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def measured(way: str, count: int, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--way", way, "--count", str(count)]
    for name in ("device", "size", "width", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run([*command, "--work", str(work)], capture_output=True, text=True, check=False)  # noqa: S603 - own file
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{way}, {count} tiles: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return speed against plain inference on as many tiles, and memory."""
    plain = {row["tiles"]: row["tiles_per_second"] for row in rows if row["way"] == PLAIN}
    lines = [f"{'way':<8}{'tiles':>8}{'s':>8}{'tiles/s':>9}{'of plain':>10}{'MiB':>8}{'GPU MiB':>9}"]
    for row in rows:
        share = f"{100 * row['tiles_per_second'] / plain[row['tiles']]:.0f} %"
        gpu = "" if row["gpu_memory_mib"] is None else f"{row['gpu_memory_mib']:.0f}"
        lines.append(
            f"{row['way']:<8}{row['tiles']:>8}{row['seconds']:>8.1f}{row['tiles_per_second']:>9.1f}{share:>10}"
            f"{row['memory_mib']:>8.0f}{gpu:>9}"
        )
    for way in dict.fromkeys(row["way"] for row in rows):
        few, *_, many = sorted((row for row in rows if row["way"] == way), key=lambda row: row["tiles"])
        more, tiles = many["memory_mib"] - few["memory_mib"], many["tiles"] - few["tiles"]
        lines.append(f"{way}: {more:+.1f} MiB for {tiles} more tiles")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="auto, cpu or cuda")
    parser.add_argument("--tiles", type=int, default=100, help="and ten times as many")
    parser.add_argument("--size", type=int, default=64, help="pixels a side")
    parser.add_argument("--width", type=float, default=0.25, help="of MobileNetV2")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--ways", nargs="*", default=[PLAIN, "source", "tesla"], help="plain and methods")
    parser.add_argument("--quick", action="store_true", help="16 tiles")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    parser.add_argument("--way", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(MARK + json.dumps(one_run(options)))
        return
    tiles = 16 if options.quick else options.tiles
    ways = list(dict.fromkeys([PLAIN, *options.ways]))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        save_network(work / "network.safetensors", options)
        for count in (tiles, 10 * tiles):
            generate(work / f"tiles-{count}", count, options.size)
            rows += [measured(way, count, work, options) for way in ways]
    print(table(rows))
    if options.out:
        from tesla_med.models.base import default_device, device_name
        from tesla_med.models.checkpoint import versions

        content = {
            "command": " ".join(["python", "benchmarks/tile_stream.py", *sys.argv[1:]]),
            "device": device_name(default_device(options.device)),
            "versions": versions(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
