"""Mutation score: how many small changes of the methods, losses, guard and calibration the tests notice.

Example::

    python benchmarks/mutants.py --sample 400 --jobs 2 --out mutants.jsonl
    python benchmarks/mutants.py --table --out mutants.jsonl

Draws mutants at random, from every file in proportion to how many it has, and runs each against the tests
of its module (``tests_of``): the first failure, or running out of time, kills it. Only a copy of the package
in a temporary folder is changed. Results are appended to ``--out``, one JSON line a mutant; those that are
there are not run again as long as their file is the same (remove the line of a survivor to try it against
new tests), and a larger sample holds the smaller ones. Tests that are slow, or need a GPU or development
data, are left out, and so are modules for CUDA alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _mutations import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
MODULES: tuple[str, ...] = ("tesla_med/tta", "tesla_med/losses.py", "tesla_med/scoring/calibration.py")
JUDGES = ("guard", "signals", "quality", "steadiness", "prior", "between")
MODULES += tuple(f"tesla_med/engine/{name}.py" for name in JUDGES)
LEFT_OUT = ("tesla_med/tta/_mechanics/graphs.py",)
COPIED = ("tesla_med", "tests", "docs", "pipelines", "site_configs", "benchmarks", "pyproject.toml")
MARKERS = "not slow and not gpu and not shared"
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"
LEAST_SECONDS = 60.0
QUICK = 6
"""Mutants of a quick run."""
CONTRACTS = ("tests/contracts/test_method_contract.py", "tests/engine/test_supervision.py")
"""Tests of every method, of which those run that bear its name."""
PARAMETERS = (
    "tests/tta/test_parameters.py",
    "tests/test_docs.py::test_defaults_that_are_numbers_or_switches_are_those_of_the_code",
)
"""Tests of the bounds and of the defaults of parameters, for modules with a class of them."""
METHODS = {
    "source": ("tests/tta/test_bn.py",),
    "tesla": ("tests/tta/test_refinement.py", "tests/tta/test_agreement.py"),
    "tesla_s": ("tests/tta/test_alignment.py",),
    "ttac": ("tests/tta/test_alignment.py",),
    "ttt_pp": ("tests/tta/test_alignment.py",),
}
"""Tests of methods in addition to those that bear their names."""
TESTS = {
    "losses.py": ("test_losses.py", "test_regions_as_classes.py"),
    "tta/base.py": (
        *("tta/test_learner.py", "tta/test_patches.py", "tta/test_tesla.py", "engine/test_supervision.py"),
        "contracts/test_method_contract.py",
    ),
    "tta/_shared/neighbours.py": ("tta/test_adacontrast.py", "tta/test_shot.py", "tta/test_refinement.py"),
    "tta/_shared/replay.py": ("tta/test_alignment.py",),
    "tta/_shared/opttta_views.py": ("tta/test_opttta.py",),
    "tta/_shared/teacher.py": ("tta/test_teacher.py", "tta/test_tesla.py", "tta/test_teaa.py"),
    "tta/_shared/passes.py": ("tta/test_passes.py", "tta/test_learner.py"),
    "tta/_shared/features.py": (
        "tta/test_features.py",
        "tta/test_alignment.py",
        "tta/test_refinement.py",
        "tta/test_shot.py",
    ),
    "tta/_shared/augmented.py": (
        *("tta/test_agreement.py", "tta/test_teacher.py", "tta/test_tesla.py", "tta/test_teaa.py"),
    ),
    "tta/_shared/alignment.py": ("tta/test_alignment.py",),
    "tta/_shared/gaussians.py": ("tta/test_alignment.py",),
    "tta/_shared/learner.py": ("tta/test_learner.py", "tta/test_tent.py", "tta/test_pl.py"),
    "tta/_mechanics/fastest.py": ("tta/test_fastest.py",),
    "tta/_mechanics/patches.py": ("tta/test_patches.py",),
    "tta/_mechanics/ranks.py": ("tta/test_ranks.py",),
    "tta/_mechanics/parameters.py": ("tta/test_learner.py", "tta/test_bn.py", "tta/test_tesla.py"),
    "tta/_mechanics/execution.py": (
        *(
            "tta/test_execution.py",
            "tta/test_patches.py",
            "tta/test_passes.py",
            "tta/test_learner.py",
            "engine/test_memory.py",
        ),
        "contracts/test_method_contract.py",
    ),
    "engine/guard.py": (
        *("engine/test_guard.py", "engine/test_prior.py", "engine/test_collapse.py", "engine/test_safety.py"),
    ),
    "engine/between.py": ("engine/test_guard.py",),
    "engine/signals.py": ("engine/test_guard.py", "engine/test_quality.py"),
    "engine/quality.py": ("engine/test_quality.py", "engine/test_guard.py"),
    "scoring/calibration.py": ("scoring/test_calibration.py",),
}
"""Tests of modules that no test file is named after, in the order in which they are run."""


def tests_of(root: Path, file: str) -> list[str]:
    """Return arguments of pytest that run the tests of a module, its own first.

    A method has the file that is named after it and its part of the contracts of methods; a module with
    parameters has the tests of their bounds and defaults.
    """
    inside = file.removeprefix("tesla_med/")
    stem, room = Path(file).stem, Path(inside).parts[0]
    named = TESTS.get(inside, (f"{room}/test_{stem}.py" if "/" in inside else f"test_{stem}.py",))
    files = [name for name in (f"tests/{part}" for part in named) if (root / name).is_file()]
    more = list(PARAMETERS) if room == "tta" and has_parameters(root / file) else []
    selected = []
    if room == "tta" and inside not in TESTS:
        more += METHODS.get(stem, ())
        wanted = (Path(name.split("::")[-1]).stem for name in more)
        selected = ["-k", " or ".join((stem, *wanted))]
        more += CONTRACTS
    files += [name for name in more if (root / name.split("::")[0]).is_file()]
    extra = sorted((root / "tests" / room).glob("test_mutants_*.py")) if "/" in inside else []
    files += [str(path.relative_to(root)) for path in extra]
    if not files:
        raise SystemExit(f"{file}: no tests; name them in TESTS")
    return [*files, *selected]


def has_parameters(path: Path) -> bool:
    """Return whether a module defines a class of parameters."""
    return re.search(r"^class \w+Params\(", path.read_text(encoding="utf-8"), re.MULTILINE) is not None


def every_mutant(root: Path, only: Sequence[str]) -> dict[str, list[Mutant]]:
    """Return the mutants of each file, in order."""
    paths = [root / name for name in MODULES]
    files = [path for top in paths for path in (sorted(top.rglob("*.py")) if top.is_dir() else [top])]
    names = [str(path.relative_to(root)) for path in files if path.is_file()]
    chosen = [name for name in names if name not in LEFT_OUT and (not only or name in only)]
    if not chosen:
        raise SystemExit(f"no such file; known: {', '.join(names)}")
    found = {name: mutants(name, (root / name).read_text(encoding="utf-8")) for name in chosen}
    return {name: items for name, items in found.items() if items}


def sample(found: dict[str, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Return ``count`` mutants drawn by file in proportion to its number, one at least while they last.

    Mutants are drawn without replacement; more of them with the same seed have the fewer at their start.
    """
    order = []
    for name, items in found.items():
        rng = random.Random(f"{seed}:{name}")  # noqa: S311 - a sample, not a secret
        shuffled = [item for item in rng.sample(items, len(items)) if not item.equivalent]
        order += [
            ((place + 0.5) / len(shuffled) if place else 0.0, name, item)
            for place, item in enumerate(shuffled)
        ]
    order.sort(key=lambda entry: entry[:2])
    return [item for *_, item in order[:count]]


def read(path: Path) -> list[dict[str, Any]]:
    """Return what was written so far; a line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


class Workplace:
    """A copy of the project in which one mutant at a time is tested."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        folder.mkdir(parents=True)
        for name in COPIED:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.is_file():
                shutil.copy(source, folder / name)

    def run(self, arguments: Sequence[str], limit: float) -> tuple[str, float]:
        """Run tests and return the outcome and its seconds."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", MARKERS]
        environment = os.environ | {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        start = time.perf_counter()
        try:
            done = subprocess.run(  # noqa: S603 - own tests
                [*command, *arguments],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return TIMEOUT, time.perf_counter() - start
        if done.returncode not in (0, 1, 2):  # 2: the module cannot even be imported
            raise SystemExit(
                f"pytest {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout[-2000:]}"
            )
        return SURVIVED if done.returncode == 0 else KILLED, time.perf_counter() - start

    def test(self, mutant: Mutant, limit: float) -> tuple[str, float]:
        """Return the outcome of a mutant and its seconds; the copy is as before afterwards."""
        path, source = self.folder / mutant.file, (self.root / mutant.file).read_text(encoding="utf-8")
        self._write(path, mutant.applied(source))
        try:
            return self.run(tests_of(self.folder, mutant.file), limit)
        finally:
            self._write(path, source)

    @staticmethod
    def _write(path: Path, text: str) -> None:
        """Write a module, and remove what was compiled of it: its size and time may be the same."""
        path.write_text(text, encoding="utf-8")
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


def fingerprint(root: Path) -> str:
    """Return a hash of the package and its tests."""
    paths = sorted(path for name in ("tesla_med", "tests") for path in (root / name).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def limit_of(place: Workplace, todo: Sequence[Mutant], known: list[dict[str, Any]], out: Path) -> float:
    """Return the seconds that the tests of a mutant may take: those of all tests together, unchanged.

    Raises:
        SystemExit: tests fail without any mutation.
    """
    state = fingerprint(place.root)
    files = dict.fromkeys(part for item in todo for part in tests_of(place.folder, item.file))
    names = sorted(name for name in files if name.startswith("tests/"))
    for item in known:
        if item.get("unchanged") == state and set(names) <= set(item["tests"]):
            return max(LEAST_SECONDS, float(item["seconds"]))
    outcome, seconds = place.run(names, 7200.0)
    if outcome != SURVIVED:
        raise SystemExit(f"pytest {' '.join(names)}: {outcome} without any mutation")
    append(out, {"unchanged": state, "tests": names, "seconds": round(seconds, 1)})
    return max(LEAST_SECONDS, seconds)


def append(path: Path, content: dict[str, Any]) -> None:
    """Add a line of JSON to a file."""
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(content) + "\n")


def run(root: Path, chosen: Sequence[Mutant], out: Path, jobs: int) -> None:
    """Test the mutants that ``out`` does not hold yet, and add them to it."""
    known = read(out)
    done = {(item["name"], item["sha"]) for item in known if "name" in item}
    todo = [item for item in chosen if (item.name, item.sha) not in done]
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(jobs) as pool:
        places: queue.Queue[Workplace] = queue.Queue()
        for number in range(min(jobs, len(todo))):
            places.put(Workplace(root, Path(work) / str(number)))
        if not todo:
            return
        first = places.get()
        limit = limit_of(first, todo, known, out)
        places.put(first)

        def one(mutant: Mutant) -> dict[str, Any]:
            place = places.get()
            try:
                outcome, taken = place.test(mutant, limit)
            finally:
                places.put(place)
            return {"name": mutant.name, **asdict(mutant), "outcome": outcome, "seconds": round(taken, 1)}

        for number, result in enumerate(pool.map(one, todo), 1):
            append(out, result)
            shown = f"{result['before']} -> {result['after']}"
            print(
                f"{number}/{len(todo)} {result['outcome']:8} {result['file']}:{result['line']} {shown}",
                flush=True,
            )


def table(results: Iterable[dict[str, Any]]) -> list[str]:
    """Return the score per file and in all as Markdown, and the survivors."""
    rows = list(results)
    lines = ["| file | mutants | killed | survived | score, % |", "|---|---|---|---|---|"]
    for name in [*sorted({row["file"] for row in rows}), "all"]:
        mine = [row for row in rows if name in (row["file"], "all")]
        left = sum(row["outcome"] == SURVIVED for row in mine)
        score = f"{100 * (len(mine) - left) / len(mine):.0f}" if mine else "n/a"
        lines.append(f"| {name} | {len(mine)} | {len(mine) - left} | {left} | {score} |")
    survivors = sorted(
        (row for row in rows if row["outcome"] == SURVIVED), key=lambda row: (row["file"], row["line"])
    )
    lines += [
        f"- {row['file']}:{row['line']}: {row['kind']}: `{row['before'][:90]}` -> `{row['after'][:90]}`"
        for row in survivors
    ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the sample, print the scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=400, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="mutate these files alone")
    parser.add_argument("--list", action="store_true", help="list the sample and run nothing")
    parser.add_argument("--table", action="store_true", help="print the scores of --out and run nothing")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} mutants")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="results, JSON lines")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    options = parser.parse_args(arguments)
    found = every_mutant(options.root, options.only)
    chosen = sample(found, QUICK if options.quick else options.sample, options.seed)
    if options.list:
        for item in chosen:
            print(f"{item.file}:{item.line}: {item.kind}: {item.before} -> {item.after}")
        print(f"{len(chosen)} of {sum(map(len, found.values()))} mutants in {len(found)} files")
        return 0
    if not options.table:
        run(options.root, chosen, options.out, options.jobs)
    shas = {item.name: item.sha for items in found.values() for item in items}
    wanted = shas if options.table else {item.name for item in chosen}
    current = [
        row for row in read(options.out) if shas.get(row.get("name", "")) == row.get("sha") is not None
    ]
    print("\n".join(table(row for row in current if row["name"] in wanted)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
