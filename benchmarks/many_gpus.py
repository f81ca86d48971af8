"""Seconds of one run on one card and on several cards of a machine: N-O per case, N-M per pass over the site.

Example::

    python benchmarks/many_gpus.py --device cuda --jobs 1 2 --precision bfloat16 --out many_gpus.json
    python benchmarks/many_gpus.py --device cuda --jobs 1 2 --precision bfloat16 --protocol N-M --cases 24
    python benchmarks/many_gpus.py --device cpu --quick

The rate is that of the steady state: from the time at which the first few cases (N-M: the first pass) are
done to that of the last, so that starting processes has no part in it. N-O: reports are included, and masks
of all runs are compared; on cards of one kind they are the same but for the rounding of atomic sums. N-M:
processes make the passes together, each from its share of every batch, and draw otherwise than one process
does, so masks differ as between two seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from end_to_end import PIPELINES, SITES, generate_volumes, save_network, settings

from tesla_med.actions.spread import spread, visible_cards
from tesla_med.adapt import run_plan
from tesla_med.io.volumes import read_mask
from tesla_med.models.base import default_device, device_name
from tesla_med.models.checkpoint import versions
from tesla_med.plan import RunRequest, make_plan
from tesla_med.types import PASSES


def one_run(options: argparse.Namespace, work: Path, jobs: int) -> dict[str, Any]:
    """Adapt to every case with so many processes, and return the rate."""
    stamps: list[float] = []
    counted = "cases" if options.protocol == "N-O" else PASSES

    def progress(stage: str, done: int, total: int) -> None:
        if stage == counted:
            stamps.extend([time.perf_counter()] * (done - len(stamps)))

    request = RunRequest(
        SITES["volumes"],
        work / "data",
        weights=options.weights or work / "source.safetensors",
        pipeline=PIPELINES["volumes"]["default"],
        method="tesla",
        protocol=options.protocol,
        out=work / f"jobs-{jobs}",
        device=options.device,
        reset="case" if options.protocol == "N-O" else None,
        overrides=settings(options, "default"),
    )
    start = time.perf_counter()
    result = run_plan(spread(make_plan(request), jobs), progress=progress)
    if result.failed or (options.protocol == "N-O" and len(stamps) != options.cases):
        raise SystemExit(
            f"{jobs} processes: {len(stamps)} of {options.cases} done, failed: {result.failed[:3]}"
        )
    first = min(options.skip, options.cases - 1) if options.protocol == "N-O" else 1
    return {
        "jobs": jobs,
        "cases": options.cases,
        "seconds": time.perf_counter() - start,
        "seconds_until_first": stamps[0] - start,
        "steady_seconds": (stamps[-1] - stamps[first - 1]) / (len(stamps) - first),
        "mean_dice": float(np.mean([item.mean_dice or 0.0 for item in result.results])),
    }


def least_agreement(work: Path, one: int, other: int) -> float:
    """Return the smallest Dice between the masks of two runs, over cases."""
    found = []
    for path in sorted((work / f"jobs-{one}" / "masks").glob("*.nii.gz")):
        pair = [np.asarray(read_mask(path)[0]) > 0]
        pair.append(np.asarray(read_mask(work / f"jobs-{other}" / "masks" / path.name)[0]) > 0)
        total = pair[0].sum() + pair[1].sum()
        found.append(2.0 * float((pair[0] & pair[1]).sum()) / total if total else 1.0)
    return min(found)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, write the JSON; return what was measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--protocol", choices=("N-O", "N-M"), default="N-O")
    parser.add_argument("--cases", type=int, default=52)
    parser.add_argument("--skip", type=int, default=8, help="cases before the steady state")
    parser.add_argument("--slices", type=int, default=24)
    parser.add_argument("--size", type=int, default=256, help="pixels a side")
    parser.add_argument("--width", type=int, default=None, help="default: 64 on a GPU, 16 on the CPU")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--set", nargs="*", default=[], help="key=value over the pipeline")
    parser.add_argument("--quick", action="store_true", help="32 pixels, width 4, 6 cases of 4 slices")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args(arguments)
    options.task = "volumes"
    if options.quick:
        options.size, options.width, options.slices, options.cases, options.skip = 32, 4, 4, 6, 2
    options.width = options.width or (64 if default_device(options.device).type == "cuda" else 16)
    cards = visible_cards(options.device)
    if cards and max(options.jobs) > len(cards):
        raise SystemExit(f"{max(options.jobs)} processes, but {len(cards)} cards are visible")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        generate_volumes(work / "data", options.cases, options.slices, options.size)
        if options.weights is None:
            save_network(work / "source.safetensors", work / "data" / "Case000.nii.gz", options)
        rows = [one_run(options, work, jobs) for jobs in options.jobs]
        for row in rows:
            row["ratio"] = rows[0]["steady_seconds"] / row["steady_seconds"]
            row["least_dice_to_first"] = least_agreement(work, options.jobs[0], row["jobs"])
    each = "case" if options.protocol == "N-O" else "pass"
    heads = "ratio | s in all | s until the first | mean Dice | least agreement"
    print(f"| processes | s per {each}, steady | {heads} |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        figures = row["steady_seconds"], row["ratio"], row["seconds"]
        cells = [f"{value:.2f}" for value in (*figures, row["seconds_until_first"])]
        cells += [f"{row['mean_dice']:.4f}", f"{row['least_dice_to_first']:.4f}"]
        print(f"| {row['jobs']} | {' | '.join(cells)} |")
    content = {
        "command": " ".join(["python", "benchmarks/many_gpus.py", *(arguments or sys.argv[1:])]),
        "device": device_name(default_device(options.device)),
        "cards": len(cards),
        "precision": options.precision,
        "protocol": options.protocol,
        "versions": versions(),
        "results": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


if __name__ == "__main__":
    main()
