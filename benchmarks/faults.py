"""Kill runs at random moments and fill the disk, go on, and count how often nothing is lost or half-written.

Example::

    python benchmarks/faults.py --kills 50 --out faults.json

Each try: a run of generated prostates (state carries on, case by case or in passes) in a process of its
own is killed with SIGKILL after a random time, maybe more than once, then resumed. It survived if every
mask, checkpoint and figure is that of an undisturbed run, byte for byte, and no temporary file is left.
With a full disk (files limited to a random size) the run must end with a message, with no file under its
final name that is not whole, and then be resumed to the same end.
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
from pathlib import Path
from typing import Any

from tesla_med.models.checkpoint import versions

ROOT = Path(__file__).resolve().parents[1]
STREAMS: dict[str, dict[str, Any]] = {
    "N-O, carries on": {"protocol": "N-O", "reset": "site"},
    "N-O, each case afresh": {"protocol": "N-O", "reset": "case"},
    "N-M": {"protocol": "N-M", "reset": "site"},
}


def one_run(
    volumes: Path, weights: Path, out: Path, options: dict[str, Any], limit: int | None = None
) -> None:
    """Run or resume; with ``limit``, no file may grow beyond that many bytes."""
    import small_site

    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    small_site.run(volumes, weights, out, resume=(out / "run.json").exists(), **options)


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
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in left_out and ".cases" not in path.parts
    }


def killed(folder: Path, want: dict[str, bytes], seconds: float, rng: random.Random, *given: Any) -> bool:
    """Kill one to three times, resume, compare."""
    volumes, weights, options = given
    out = folder / "out"
    for _ in range(rng.randint(1, 3)):
        process = start(volumes, weights, out, options)
        process.join(rng.uniform(0, seconds))
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    process = start(volumes, weights, out, options)
    process.join()
    return process.exitcode == 0 and content(out) == want


def full_disk(folder: Path, want: dict[str, bytes], rng: random.Random, *given: Any) -> bool:
    """Run with a limit on the size of files, then without."""
    volumes, weights, options = given
    out = folder / "out"
    largest = max(len(data) for data in want.values())
    process = start(volumes, weights, out, options, rng.randint(200, largest - 1))
    process.join()
    whole = all(
        want.get(name, data) == data for name, data in content(out).items() if name.startswith("masks/")
    )
    left = [name for name in content(out) if "/.tmp-" in f"/{name}"]
    failed = process.exitcode != 0
    process = start(volumes, weights, out, options)
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
    parser.add_argument("--quick", action="store_true", help="three tries of each")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.quick:
        options.kills = options.full = 3
    sys.path.insert(0, str(ROOT / "tests"))
    import small_site
    import torch

    torch.set_num_threads(1)
    rng = random.Random(options.seed)  # noqa: S311 - moments, not secrets
    counts: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        weights = small_site.train_weights(root / "small")
        small_site.make_volumes(root / "nii", 4)
        undisturbed: dict[str, tuple[dict[str, bytes], float]] = {}
        for stream, choice in STREAMS.items():
            begun = time.perf_counter()
            process = start(root / "nii", weights, root / stream, choice)
            process.join()
            undisturbed[stream] = (content(root / stream), time.perf_counter() - begun)
        for number in range(options.kills + options.full):
            stream = list(STREAMS)[number % len(STREAMS)]
            want, seconds = undisturbed[stream]
            folder = root / f"try-{number}"
            given = (root / "nii", weights, STREAMS[stream])
            kind = "killed" if number < options.kills else "full disk"
            if kind == "killed":
                survived = killed(folder, want, seconds, rng, *given)
            else:
                survived = full_disk(folder, want, rng, *given)
            row = counts.setdefault(f"{kind}, {stream}", [0, 0])
            row[0] += survived
            row[1] += 1
    for title, (survived, tried) in counts.items():
        print(f"{title:<40} survived {survived} / tried {tried}")
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
