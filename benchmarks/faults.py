"""Kill runs at random moments and fill the disk, go on, and count how often nothing is lost or half-written.

Example::

    python benchmarks/faults.py --kills 50 --out faults.json

Each try: a run of generated prostates (state carries on, case by case or in passes) or of generated tiles
(state is saved after every batch, or only now and then) in a process of its own is killed with SIGKILL after
a random time, maybe more than once, then resumed. It survived if every mask, table, checkpoint and figure is
that of an undisturbed run, byte for byte, every record says the same but for its time, and no temporary file
is left. With a full disk (files limited to a random size) the run must end with a message, with no file under
its final name that is not whole, and then be resumed to the same end.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tesla_med.io.files import TEMPORARY
from tesla_med.models.checkpoint import versions
from tesla_med.runs.folder import DONE_FOLDER

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Stream:
    """One kind of run.

    Attributes:
        protocol: N-O or N-M.
        reset: site or case.
        keep_every: of a run on tiles: seconds between two savings of its state; None: a run on volumes.
    """

    protocol: str
    reset: str = "site"
    keep_every: float | None = None

    @property
    def data(self) -> str:
        """Name of the folder of its images, and of that of its weights."""
        return "volumes" if self.keep_every is None else "tiles"


STREAMS = {
    "N-O, carries on": Stream("N-O"),
    "N-O, each case afresh": Stream("N-O", reset="case"),
    "N-M": Stream("N-M"),
    "tiles, N-O": Stream("N-O", keep_every=0.0),
    "tiles, N-O, saved now and then": Stream("N-O", keep_every=0.5),
    "tiles, N-M": Stream("N-M", keep_every=0.0),
}


def one_run(stream: Stream, images: Path, weights: Path, out: Path, limit: int | None = None) -> None:
    """Run or resume; with ``limit``, no file may grow beyond that many bytes."""
    import small_site
    import tile_site

    from tesla_med.tasks.tiles import Tiles

    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    choice = {"protocol": stream.protocol, "reset": stream.reset, "resume": (out / "run.json").exists()}
    if stream.keep_every is None:
        small_site.run(images, weights, out, **choice)
        return
    Tiles.keep_every = stream.keep_every
    texts = (*tile_site.SMALL, "protocols.N-M.tesla.epochs=2", "reports=[calibration]")
    options = {"weights": weights, "out": out, "device": "cpu", "overrides": texts}
    tile_site.adapt_tiles(tile_site.site(), images, **options, **choice)


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
    """Return every file of a run that must repeat: dates and times do not."""
    left_out = ("run.json", ".tesla-med.lock")
    return {
        path.relative_to(out).as_posix(): timeless(path)
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in left_out
    }


def timeless(path: Path) -> bytes:
    """Return the content of a file; that of a record without the time that its case took."""
    data = path.read_bytes()
    if path.parent.name != DONE_FOLDER or path.suffix != ".json":
        return data
    return json.dumps(json.loads(data) | {"seconds": None}).encode()


def killed(folder: Path, want: dict[str, bytes], seconds: float, rng: random.Random, *given: Any) -> bool:
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
    return process.exitcode == 0 and content(out) == want


def full_disk(folder: Path, want: dict[str, bytes], rng: random.Random, *given: Any) -> bool:
    """Run with a limit on the size of files, then without."""
    out = folder / "out"
    largest = max(len(data) for data in want.values())
    process = start(*given, out, rng.randint(200, largest - 1))
    process.join()
    found = content(out)
    whole = all(want.get(name, data) == data for name, data in found.items())
    left = [name for name in found if f"/{TEMPORARY}" in f"/{name}"]
    failed = process.exitcode != 0
    process = start(*given, out)
    process.join()
    return whole and not left and failed and process.exitcode == 0 and content(out) == want


def main() -> None:
    """Parse the command line, try, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="tries that are killed")
    parser.add_argument("--full", type=int, default=12, help="tries with a full disk")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu",))
    parser.add_argument("--quick", action="store_true", help="one try of each kind of run and fault")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.quick:
        options.kills = options.full = len(STREAMS)
    sys.path.insert(0, str(ROOT / "tests"))
    import small_site
    import tile_site
    import torch

    torch.set_num_threads(1)
    rng = random.Random(options.seed)  # noqa: S311 - moments, not secrets
    counts: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        weights = {
            "volumes": small_site.train_weights(root / "small"),
            "tiles": tile_site.train_weights(root / "small-tiles"),
        }
        small_site.make_volumes(root / "volumes", 4)
        tile_site.make_tiles(root / "tiles", 20, seed=3, shift=0.6)
        runs = {
            title: (stream, root / stream.data, weights[stream.data]) for title, stream in STREAMS.items()
        }
        undisturbed: dict[str, tuple[dict[str, bytes], float]] = {}
        for title, given in runs.items():
            begun = time.perf_counter()
            process = start(*given, root / title)
            process.join()
            if process.exitcode:
                raise SystemExit(f"{title}: the undisturbed run failed")
            undisturbed[title] = (content(root / title), time.perf_counter() - begun)
        for number in range(options.kills + options.full):
            title = list(STREAMS)[number % len(STREAMS)]
            want, seconds = undisturbed[title]
            folder = root / f"try-{number}"
            kind = "killed" if number < options.kills else "full disk"
            if kind == "killed":
                survived = killed(folder, want, seconds, rng, *runs[title])
            else:
                survived = full_disk(folder, want, rng, *runs[title])
            row = counts.setdefault(f"{kind}, {title}", [0, 0])
            row[0] += survived
            row[1] += 1
    for title, (survived, tried) in counts.items():
        print(f"{title:<42} survived {survived} / tried {tried}")
    if options.out:
        result = {
            "command": " ".join(["python", "benchmarks/faults.py", *sys.argv[1:]]),
            "versions": versions(),
            "results": {title: {"survived": a, "tried": b} for title, (a, b) in counts.items()},
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(0 if all(a == b for a, b in counts.values()) else 1)


if __name__ == "__main__":
    main()
