"""Check that results are those of an earlier commit, bit for bit: masks, probabilities, weights, tables.

Example::

    python benchmarks/unchanged.py --before 866c00e --out unchanged.json

The earlier commit is checked out beside this one, generates sites of prostates and of tiles, and trains
weights on them. Then both commits, in the same environment and with the same number of threads, adapt these
weights to two sites of volumes (N-O, N-M and N-O with state that carries on) and one of tiles (N-O, N-M), and
train once more. Compared are

* masks, source masks, probabilities, uncertainty and predictions.csv: bytes;
* weights: bytes; cards: content;
* metrics.csv: the columns that existed, but for the words of ``reason``;
* calibration.json and metrics.json: figures to 1e-9, of what existed;
* run.json: what existed, but for times.

Every difference is listed; those of ``EXPECTED`` with the reason. Exit code 1 if there is any other.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMES = ("seconds", "written", "versions")
SAME_BYTES = (".nii.gz", ".safetensors", "predictions.csv", "labels.json")
TOLERANCE = 1e-9
EXPECTED: dict[str, str] = {
    "run.json: method.parameters": (
        "runs on tiles now state the parameters of the method, as runs on volumes do"
    ),
    "run.json: notes[1]: taken from the weights' card": (
        "the card of the earlier commit's weights does not know preprocessing.fill, which is off for them"
    ),
    "adapted.json: acquisition": (
        "cards of adapted classifiers repeat the source's acquisition, which tiles lack"
    ),
}
"""Differences by file and key, with their reason."""


def run(root: Path, *words: str, threads: int = 2) -> None:
    """Run one command line of tesla-med as it is at a checkout.

    Raises:
        SystemExit: it failed.
    """
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "tesla_med", *words]
    done = subprocess.run(  # noqa: S603 - own program
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} at {root}:\n{done.stderr}")


def check_out(commit: str, folder: Path) -> None:
    """Check a commit out into a folder, unless it is there."""
    if folder.is_dir():
        return
    command = ["git", "worktree", "add", "--force", "--detach", str(folder), commit]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)  # noqa: S603


def jobs(data: Path, out: Path, quick: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield a name and the words of every command that both commits run."""
    kept = ["--save-probs", "--save-uncertainty"]
    volumes, tiles = data / "prostate", data / "kather"
    few = ["--set", "protocols.N-M.tesla.epochs=1"]

    def adapt(task: Path, pipeline: str, site: str, name: str, *more: str) -> tuple[str, list[str]]:
        config = task / "site_configs" / pipeline / f"phantom-{site}.yaml"
        words = ["adapt", "--site", str(config), "--volumes", str(task / "volumes"), "--device", "cpu"]
        words += ["--weights", str(task / "source" / "source.safetensors"), "--out", str(out / name)]
        return name, [*words, "--quiet", *more]

    yield adapt(volumes, "prostate", "hard", "volumes-hard-N-O", *kept)
    yield adapt(volumes, "prostate", "easy", "volumes-easy-N-M", "--protocol", "N-M", *kept, *few)
    yield adapt(tiles, "kather", "hard", "tiles-N-O", "--set", "methods.tesla.weak_views=3")
    if not quick:
        yield adapt(
            volumes, "prostate", "easy", "volumes-easy-stream", "--reset", "site", "--no-guard", *kept
        )
        many = ("--set", "methods.tesla.weak_views=2", "--set", "protocols.N-M.tesla.epochs=2")
        yield adapt(tiles, "kather", "hard", "tiles-N-M", "--protocol", "N-M", *many)
        small = [
            "model.params.width=4",
            "preprocessing.size=[48,48]",
            "train.steps=20",
            "train.validate_every=10",
        ]
        words = ["train", "--pipeline", "prostate", "--sites", "phantom-source", "--device", "cpu", "--quiet"]
        words += ["--volumes", str(volumes / "volumes"), "--out", str(out / "trained")]
        yield "trained", [*words, *(part for text in small for part in ("--set", text))]


# ------------------------------------------------------------ comparing


def files_of(folder: Path) -> dict[str, Path]:
    """Return the result files of a run by relative path."""
    skipped = (".cases", ".state", "tensorboard")
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith("."))
    return {
        name: path
        for path in found
        if not (name := path.relative_to(folder).as_posix()).startswith(skipped)
        and path.suffix not in (".png", ".html", ".pt")
    }


def compare(before: Path, after: Path) -> list[str]:
    """Return every difference of two runs, one line each."""
    ours, theirs = files_of(after), files_of(before)
    lines = [f"{name}: missing" for name in theirs if name not in ours]
    for name in theirs.keys() & ours.keys():
        first, second = theirs[name], ours[name]
        if name.endswith(SAME_BYTES):
            if first.read_bytes() != second.read_bytes():
                lines.append(f"{name}: other bytes")
        elif name.endswith("metrics.csv"):
            lines += [f"{name}: {text}" for text in compare_tables(first, second)]
        elif name.endswith(".json"):
            contents = (json.loads(path.read_text(encoding="utf-8")) for path in (first, second))
            base = Path(name).name if "checkpoints" not in name else "adapted.json"
            lines += [f"{base}: {text}" for text in compare_values(*contents)]
    return sorted(set(lines))


def compare_tables(before: Path, after: Path) -> Iterator[str]:
    """Yield what differs in the columns that existed, but for the words of ``reason``."""
    tables = []
    for path in (before, after):
        with path.open(newline="", encoding="utf-8") as stream:
            tables.append(list(csv.DictReader(stream)))
    if len(tables[0]) != len(tables[1]):
        yield f"{len(tables[0])} rows before, {len(tables[1])} now"
        return
    for number, (old, new) in enumerate(zip(*tables, strict=True), 2):
        for column in (key for key in old if key != "reason"):
            if column not in new or old[column] != new[column]:
                yield f"line {number}, {column}: {old[column]!r} before, {new.get(column)!r} now"


def compare_values(before: Any, after: Any, where: str = "") -> Iterator[str]:
    """Yield what differs of all that existed: numbers beyond 1e-9, other values at all."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            place = f"{where}.{key}".strip(".")
            if key in TIMES or key in ("reason", "definitions"):
                continue
            if key not in after:
                yield f"{place}: missing"
            else:
                yield from compare_values(before[key], after[key], place)
        for key in after.keys() - before.keys():
            if where in ("method", "") and key == "parameters":
                yield f"{where}.{key}".strip(".")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, pair in enumerate(zip(before, after, strict=True)):
            yield from compare_values(*pair, f"{where}[{index}]")
    elif isinstance(before, float) and isinstance(after, int | float):
        if not math.isclose(before, after, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{where}: {before} before, {after} now"
    elif before != after:
        yield f"{where}: {str(before)[:80]} before, {str(after)[:80]} now"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="866c00e", help="the earlier commit")
    parser.add_argument(
        "--work", type=Path, default=Path("unchanged"), help="folder for checkout, data and runs"
    )
    parser.add_argument(
        "--device", choices=["cpu"], default="cpu", help="results repeat bit for bit there only"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="three runs instead of six")
    parser.add_argument("--out", type=Path, default=Path("unchanged.json"))
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    earlier = work / f"checkout-{options.before}"
    check_out(options.before, earlier)
    for task in ("prostate", "kather"):
        if not (work / "data" / task / "demo.json").is_file():
            words = ("demo", "--task", task, "--out", str(work / "data" / task), "--device", "cpu", "--quiet")
            run(earlier, *words, threads=options.threads)
    found: dict[str, list[str]] = {}
    for side, root in (("before", earlier), ("now", ROOT)):
        if side == "now" and (work / side).is_dir():
            shutil.rmtree(work / side)
        for name, words in jobs(work / "data", work / side, options.quick):
            if not (work / side / name).is_dir():
                run(
                    root if name != "trained" else _with_sites(root, work / "data"),
                    *words,
                    threads=options.threads,
                )
    for name, _ in jobs(work / "data", work / "now", options.quick):
        found[name] = compare(work / "before" / name, work / "now" / name)
    unexpected = 0
    for name, lines in found.items():
        print(f"{name}: {'the same' if not lines else ''}")
        for line in lines:
            reason = next((text for key, text in EXPECTED.items() if line.startswith(key)), None)
            unexpected += reason is None
            print(f"  {line}" + (f" ({reason})" if reason else ""))
    print(f"{unexpected} differences that were not expected")
    record = {"before": options.before, "command": " ".join(sys.argv), "differences": found}
    options.out.write_text(json.dumps(record | {"unexpected": unexpected}, indent=2) + "\n", encoding="utf-8")
    return 1 if unexpected else 0


def _with_sites(root: Path, data: Path) -> Path:
    """Let the configuration of the generated sites be found by id, and return ``root``."""
    os.environ["TESLA_MED_CONFIG_PATH"] = str(data / "prostate")
    return root


if __name__ == "__main__":
    sys.exit(main())
