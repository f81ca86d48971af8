"""Kill runs at random moments, fill the disk, remove images; count how often nothing is lost or half-written.

Example::

    python benchmarks/faults.py --kills 50 --out faults.json

Each try: a run of generated prostates (state carries on, case by case or in passes) or of generated tiles
(state is saved after every batch, or only now and then), a training or a comparison in a process of its own
is killed with SIGKILL after a random time, maybe more than once, then resumed. It survived if every mask,
table, checkpoint and figure is that of an undisturbed run, byte for byte, every record says the same but for
its time, and no temporary file is left. With a full disk (files limited to a random size) the run must end
with a message, with no file under its final name that is not whole, and then be resumed to the same end.
Where an image is removed at a random moment, it must be done before, named as failed, or never listed, and
all others must be what they are in an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tesla_med.io.files import TEMPORARY
from tesla_med.models.checkpoint import versions
from tesla_med.runs.folder import DONE_FOLDER

ROOT = Path(__file__).resolve().parents[1]


Job = Callable[[Path, Path, Path], Any]
"""What a process does, or goes on with: images, weights, output folder."""


@dataclass(frozen=True)
class Kind:
    """One kind of run.

    Attributes:
        command: what it counts for.
        data: name of the folder of its images, and of that of its weights.
        job: what is run.
    """

    command: str
    data: str
    job: Job


def volumes(protocol: str, reset: str = "site") -> Job:
    """Return an adaptation to volumes."""

    def job(images: Path, weights: Path, out: Path) -> None:
        import small_site

        resume = (out / "run.json").exists()
        small_site.run(images, weights, out, protocol=protocol, reset=reset, resume=resume)

    return job


def tiles(protocol: str, keep_every: float) -> Job:
    """Return an adaptation to tiles; ``keep_every``: seconds between two savings of its state."""

    def job(images: Path, weights: Path, out: Path) -> None:
        import tile_site

        from tesla_med.tasks.tiles import Tiles

        Tiles.keep_every = keep_every
        texts = (*tile_site.SMALL, "protocols.N-M.tesla.epochs=2", "reports=[calibration]")
        options = {"weights": weights, "out": out, "device": "cpu", "overrides": texts}
        choice = {"protocol": protocol, "reset": "site", "resume": (out / "run.json").exists()}
        tile_site.adapt_tiles(tile_site.site(), images, **options, **choice)

    return job


def train(images: Path, _: Path, out: Path) -> None:
    """Train on volumes."""
    import small_site

    from tesla_med.config.files import load_pipeline
    from tesla_med.training.train import train_source

    texts = ("train.steps=60", "train.validate_every=6", "train.batch_size=4")
    pipeline = load_pipeline("prostate", (*small_site.SMALL, *texts))
    train_source(pipeline, [small_site.site()], images, out, seed=1, device="cpu", resume=True)


def compare(images: Path, weights: Path, out: Path) -> None:
    """Compare two methods with two seeds."""
    import lines
    import small_site

    from tesla_med.compare.grid import compare_methods
    from tesla_med.config.tables import make_table

    site = images.parent / "site_configs" / "prostate" / "X.yaml"
    if not site.is_file():
        site.parent.mkdir(parents=True, exist_ok=True)
        site.write_text(lines.VOLUMES, encoding="utf-8")
    table = make_table("prostate", (str(site),), ("source", "tesla"), ("N-O",), 2)
    texts = (*small_site.SMALL, *small_site.FEW)
    compare_methods(table, images, weights=weights, out=out, device="cpu", overrides=texts, resume=True)


KINDS = {
    "adapt N-O, carries on": Kind("adapt N-O", "volumes", volumes("N-O")),
    "adapt N-O, each case afresh": Kind("adapt N-O", "volumes", volumes("N-O", "case")),
    "adapt N-M": Kind("adapt N-M", "volumes", volumes("N-M")),
    "tiles, N-O": Kind("adapt, tiles", "tiles", tiles("N-O", 0.0)),
    "tiles, N-O, saved now and then": Kind("adapt, tiles", "tiles", tiles("N-O", 0.5)),
    "tiles, N-M": Kind("adapt, tiles", "tiles", tiles("N-M", 0.0)),
    "train": Kind("train", "volumes", train),
    "compare": Kind("compare", "volumes", compare),
}
VANISHING = ("adapt N-O, each case afresh", "tiles, N-O")
"""Kinds from which an image is taken: the first names it as a failed case, the second as a failed tile."""


def one_run(kind: Kind, images: Path, weights: Path, out: Path, limit: int | None = None) -> None:
    """Run or resume; with ``limit``, no file may grow beyond that many bytes."""
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    import torch

    torch.set_num_threads(1)
    kind.job(images, weights, out)


def start(*arguments: Any) -> multiprocessing.process.BaseProcess:
    """Start :func:`one_run` in a forked process, silent."""

    def quiet(*given: Any) -> None:
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), 2)
        one_run(*given)

    process = multiprocessing.get_context("fork").Process(target=quiet, args=arguments)
    process.start()
    return process


def content(out: Path) -> dict[str, bytes]:
    """Return every file of a run that must repeat: dates, times and the state of a training do not.

    Of a comparison these are its cells; its tables have a column of seconds, and must be there.
    """
    left_out = ("run.json", "cells.json", "last.pt", ".tesla-med.lock")
    return {
        path.relative_to(out).as_posix(): timeless(path)
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in left_out and not path.name.startswith("events.out.tfevents")
    }


def timeless(path: Path) -> bytes:
    """Return the content of a file without the seconds that something took."""
    if path.stem in ("table", "comparison"):
        return b""
    data = path.read_bytes()
    if path.parent.name == DONE_FOLDER or path.name == "train.json":
        return json.dumps(json.loads(data) | {"seconds": None}).encode() if path.suffix == ".json" else data
    return data


def differences(process: Any, out: Path, want: dict[str, bytes]) -> str:
    """Return what a finished process left otherwise than wanted; empty if nothing."""
    found = content(out)
    other = sorted(name for name in found.keys() | want.keys() if found.get(name) != want.get(name))
    return f"exit code {process.exitcode}; {', '.join(other)}" if process.exitcode or other else ""


def killed(folder: Path, want: dict[str, bytes], seconds: float, rng: random.Random, *given: Any) -> str:
    """Kill one to three times, resume, compare."""
    out = folder / "out"
    for _ in range(rng.randint(1, 3)):
        process = start(*given, out)
        process.join(rng.uniform(0, seconds))
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    process = start(*given, out)
    process.join()
    return differences(process, out, want)


def full_disk(folder: Path, want: dict[str, bytes], rng: random.Random, *given: Any) -> str:
    """Run with a limit on the size of files, then without."""
    out = folder / "out"
    largest = max(len(data) for data in want.values())
    process = start(*given, out, rng.randint(200, largest - 1))
    process.join()
    found = content(out)
    half = [name for name, data in found.items() if want.get(name, data) != data]
    left = [name for name in found if f"/{TEMPORARY}" in f"/{name}"]
    if process.exitcode == 0 or half or left:
        return f"exit code {process.exitcode} with a full disk; half-written {half}, left {left}"
    process = start(*given, out)
    process.join()
    return differences(process, out, want)


def vanished(folder: Path, want: dict[str, bytes], seconds: float, rng: random.Random, *given: Any) -> str:
    """Remove an image at a random moment; the others must be done, and it be named if it was not read."""
    kind, images, weights = given
    copied = folder / "images"
    shutil.copytree(images, copied)
    suffix = "_segmentation.nii.gz"
    chosen = rng.choice([path for path in sorted(copied.rglob("*.*")) if not path.name.endswith(suffix)])
    out = folder / "out"
    process = start(kind, copied, weights, out)
    process.join(rng.uniform(0, seconds))
    chosen.unlink()
    process.join()
    if process.exitcode != 0:
        return f"exit code {process.exitcode} without {chosen.name}"
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    name = chosen.relative_to(copied).as_posix().removesuffix(".nii.gz").removesuffix(".png")
    listed = {item["case"]: item for item in record["cases"]} if kind.data == "volumes" else None
    if listed is None:
        table = (out / "predictions.csv").read_text(encoding="utf-8").splitlines()
        before = want["predictions.csv"].decode().splitlines()
        rows, rest = ([row for row in lines if f"{name}.png" not in row] for lines in (table, before))
        as_before = len(rows) == len(rest) and all("failed" not in row for row in rows)
        return "" if as_before else f"without {name}: {len(rows)} rows, not {len(rest)}"
    others = [item for item in listed.values() if not item["case"].endswith(Path(name).name)]
    failed = [item for item in listed.values() if item["status"] == "failed"]
    masks = {key: data for key, data in want.items() if "masks/" in key and Path(name).name not in key}
    found = content(out)
    missing = len(others) != len(sorted(images.glob(f"*{suffix}"))) - 1
    unnamed = [item["case"] for item in failed if Path(name).name not in item["case"] or not item["reason"]]
    other = [key for key, data in masks.items() if found.get(key) != data]
    told = f"without {name}: cases missing: {missing}, failed otherwise: {unnamed}, other masks: {other}"
    return told if missing or unnamed or other else ""


TRIES = {"killed": killed, "full disk": full_disk, "image removed": vanished}


def main() -> None:
    """Parse the command line, try, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="tries of each command that are killed")
    parser.add_argument("--full", type=int, default=20, help="tries with a full disk")
    parser.add_argument("--vanishing", type=int, default=20, help="tries in which an image is removed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu",))
    parser.add_argument("--quick", action="store_true", help="one try of each kind of run and fault")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "cases")]
    rng = random.Random(options.seed)  # noqa: S311 - moments, not secrets
    counts: dict[str, list[int]] = {}
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        forked = multiprocessing.get_context("fork").Process(target=prepare, args=(root,))
        forked.start()
        forked.join()
        weights = json.loads((root / "weights.json").read_text(encoding="utf-8"))
        runs = {title: (kind, root / kind.data, Path(weights[kind.data])) for title, kind in KINDS.items()}
        undisturbed = {title: undisturbed_run(title, root, given) for title, given in runs.items()}
        for number, (fault, title) in enumerate(plan(options)):
            want, seconds = undisturbed[title]
            given = (want, rng) if fault == "full disk" else (want, seconds, rng)
            problem = TRIES[fault](root / f"try-{number}", *given, *runs[title])
            shutil.rmtree(root / f"try-{number}", ignore_errors=True)
            row = counts.setdefault(f"{fault}, {KINDS[title].command}", [0, 0])
            row[0] += not problem
            row[1] += 1
            if problem:
                print(f"try {number}: {fault}, {title}: {problem}", flush=True)
    for title, (survived, tried) in counts.items():
        print(f"{title:<32} survived {survived} / tried {tried}")
    print(f"{time.perf_counter() - begun:.0f} s")
    if options.out:
        result = {
            "command": " ".join(["python", "benchmarks/faults.py", *sys.argv[1:]]),
            "versions": versions(),
            "results": {title: {"survived": a, "tried": b} for title, (a, b) in counts.items()},
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(0 if all(a == b for a, b in counts.values()) else 1)


def prepare(root: Path) -> None:
    """Write images and trained weights, in a process of its own: torch cannot be forked once it has run."""
    import small_site
    import tile_site
    import torch

    torch.set_num_threads(1)
    small_site.make_volumes(root / "volumes", 4)
    tile_site.make_tiles(root / "tiles", 20, seed=3, shift=0.6)
    weights = {
        "volumes": small_site.train_weights(root / "small"),
        "tiles": tile_site.train_weights(root / "small-tiles"),
    }
    text = json.dumps({name: str(path) for name, path in weights.items()})
    (root / "weights.json").write_text(text, encoding="utf-8")


def undisturbed_run(title: str, root: Path, given: Any) -> tuple[dict[str, bytes], float]:
    """Return the files of a run that nothing disturbs, and its seconds."""
    begun = time.perf_counter()
    process = start(*given, root / title)
    process.join()
    if process.exitcode:
        raise SystemExit(f"{title}: the undisturbed run failed")
    return content(root / title), time.perf_counter() - begun


def plan(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield fault and kind of run of every try."""
    commands: dict[str, list[str]] = {}
    for title, kind in KINDS.items():
        commands.setdefault(kind.command, []).append(title)
    for titles in commands.values():
        count = len(titles) if options.quick else options.kills
        yield from (("killed", titles[number % len(titles)]) for number in range(count))
    every = list(KINDS)
    for fault, titles, count in (
        ("full disk", every, options.full),
        ("image removed", list(VANISHING), options.vanishing),
    ):
        tries = len(titles) if options.quick else count
        yield from ((fault, titles[number % len(titles)]) for number in range(tries))


if __name__ == "__main__":
    main()
