"""Memory of a long run: what the process holds after 20 cases, after the last and after its reports.

Example::

    python benchmarks/memory.py --cases 1000 --out memory.json

Adapts a small network to generated volumes, every default report on, or to generated tiles. The volumes are
links to a few files, so that a thousand of them need no space. Resident memory is read from the system after
every case, garbage collected first.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tesla_med.actions.usage import resident
from tesla_med.models.checkpoint import versions
from tesla_med.types import Progress

ROOT = Path(__file__).resolve().parents[1]
DIFFERENT = 5
"""Volumes that the cases are links to."""


def held() -> float:
    """Return the MiB of memory that this process holds now, garbage collected first."""
    gc.collect()
    return resident() / 2**20


def links(source: Path, folder: Path, count: int) -> None:
    """Link volumes and references under ``count`` names."""
    folder.mkdir(parents=True)
    images = sorted(source.glob("Case*[0-9].nii.gz"))
    for number in range(count):
        image = images[number % len(images)]
        for suffix in ("", "_segmentation"):
            name = f"{image.name.removesuffix('.nii.gz')}{suffix}.nii.gz"
            (folder / f"Case{number:05}{suffix}.nii.gz").symlink_to(source / name)


class Watch:
    """Memory by the number of cases that are done."""

    def __init__(self) -> None:
        self.after: dict[int, float] = {}

    def progress(self) -> Progress:
        """Return a function that notes the memory after each case."""

        def note(stage: str, done: int, _: int) -> None:
            if stage == "cases" and done not in self.after:
                self.after[done] = held()

        return note


def volumes(root: Path, count: int) -> dict[str, Any]:
    """Adapt to ``count`` volumes."""
    import small_site

    weights = small_site.train_weights(root / "small")
    small_site.make_volumes(root / "different", DIFFERENT)
    links(root / "different", root / "volumes", count)
    watch = Watch()
    options = {"protocol": "N-O", "reset": "case", "progress": watch.progress()}
    begun = time.perf_counter()
    small_site.run(root / "volumes", weights, root / "out", reports=(), **options)
    return told(watch.after, count, time.perf_counter() - begun, root / "out")


def told(after: dict[int, float], count: int, seconds: float, out: Path) -> dict[str, Any]:
    """Return what a run held, in MiB."""
    end = held()
    first = min(20, count)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {
        "cases": count,
        "seconds": seconds,
        "after_first_mib": after[first],
        "first": first,
        "after_last_mib": after[count],
        "after_reports_mib": end,
        "highest_mib": max(after.values()),
        "growth_percent": 100 * (after[count] / after[first] - 1),
        "output_mib": size / 2**20,
    }


def main() -> None:
    """Parse the command line, run, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--limit", type=float, default=2.0, help="percent of growth that is accepted")
    parser.add_argument("--device", default="cpu", choices=("cpu",))
    parser.add_argument("--quick", action="store_true", help="25 cases")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        found = volumes(Path(name), 25 if options.quick else options.cases)
    print(
        f"after case {found['first']} {found['after_first_mib']:.0f} MiB, after case {found['cases']} "
        f"{found['after_last_mib']:.0f} MiB ({found['growth_percent']:+.1f} %), after the reports "
        f"{found['after_reports_mib']:.0f} MiB; {found['seconds']:.0f} s"
    )
    if options.out:
        command = " ".join(["python", "benchmarks/memory.py", *sys.argv[1:]])
        content = {"command": command, "versions": versions(), **found}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    raise SystemExit(0 if found["growth_percent"] <= options.limit or options.quick else 1)


if __name__ == "__main__":
    main()
