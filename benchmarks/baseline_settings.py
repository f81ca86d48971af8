"""Settings of the comparison methods on generated sites, from which those of the pipelines are chosen.

Example::

    python benchmarks/baseline_settings.py --device cpu --methods cotta --out cotta.json

Source model and sites are those of ``benchmarks/safety.py``: a small U-Net, trained once a task on the source
scanner, and sites at strengths up to 1 (the preset ``hard``). Every variant in VARIANTS is the default
pipeline with a few values set, without the guard. The table gives the mean Dice in percent over volumes and
seeds, and the largest loss of a volume against its own source Dice in points.
"""

from __future__ import annotations

import argparse
import functools
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safety import ARMS, pipeline_of, train, volume_row, write_site

from tesla_med.adapt import adapt_site
from tesla_med.demo.volumes import TASKS, Task
from tesla_med.models.base import default_device, device_name
from tesla_med.models.checkpoint import versions

RATES = ("7.5e-06", "3e-05", "0.0001", "0.0003", "0.001")
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "bn": {"default": ()},
    "cotta": {
        f"rate {rate}": (
            f"methods.cotta.learning_rate={float(rate):.7f}",
            "methods.cotta.confidence_of=pixel",
            "methods.cotta.confidence_threshold=0.69",
        )
        for rate in RATES
    }
    | {
        "rate 0.001, all pixels averaged": (
            "methods.cotta.learning_rate=0.001",
            "methods.cotta.confidence_of=batch",
            "methods.cotta.confidence_threshold=1",
        )
    },
    "ttac": {
        f"rate {rate}, replay {replay}": (
            f"methods.ttac.learning_rate={rate}",
            f"methods.ttac.replay={replay}",
        )
        for rate in (0.0001, 0.001, 0.01)
        for replay in (0, 64)
    },
}
"""Values by method and name of the variant."""
made_once = functools.cache(write_site)


def run_variant(
    task: Task,
    protocol: str,
    method: str,
    variant: str,
    place: tuple[float, int],
    made: tuple[Path, Path],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Run one variant on one site, generated if it is not there, and return a row a volume."""
    (strength, seed), (weights, folder) = place, made
    name = f"s{strength:g}-{seed}".replace(".", "_")
    site = made_once(folder, task, name, strength, options.cases, seed=1000 + seed)
    pipeline = pipeline_of(task, ARMS["source"], options)
    overrides = [*VARIANTS[method][variant], *options.set]
    if options.epochs is not None and protocol.endswith("M"):
        overrides.append(f"protocols.{protocol}.{method}.epochs={options.epochs}")
    described = {"task": task, "protocol": protocol, "method": method, "variant": variant}
    out = folder / "runs" / "-".join([task, protocol, method, variant, name]).replace(" ", "_")
    result = adapt_site(
        site,
        folder / "volumes",
        weights=weights,
        pipeline=pipeline,
        overrides=overrides,
        method=method,
        protocol=protocol,
        out=out,
        seed=seed,
        device=options.device,
        guard=False,
    )
    return [described | {"strength": strength, "seed": seed} | volume_row(item) for item in result.results]


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean Dice and the worst harm of every task, protocol, method and variant."""
    keys = ("task", "protocol", "method", "variant")
    found = []
    for key in dict.fromkeys(tuple(row[name] for name in keys) for row in rows):
        group = [row for row in rows if tuple(row[name] for name in keys) == key]
        scored = [row for row in group if row["dice_percent"] is not None]
        losses = [row["dice_source_percent"] - row["dice_percent"] for row in scored]
        summary = {
            "volumes": len(scored),
            "dice_percent": sum(row["dice_percent"] for row in scored) / len(scored) if scored else None,
            "worst_harm_points": max(0.0, *losses) if scored else None,
        }
        found.append(dict(zip(keys, key, strict=True)) | summary)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run the variants and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--protocols", nargs="+", choices=("O", "M"), default=["O", "M"])
    parser.add_argument("--strengths", nargs="+", type=float, default=[0.5, 1.0], help="0 or more")
    parser.add_argument("--seeds", type=int, default=2, help="sites a strength: seeds 1 to this")
    parser.add_argument("--cases", type=int, default=3, help="volumes a site")
    parser.add_argument("--epochs", type=int, default=None, help="under M; default: the pipeline's")
    parser.add_argument("--set", nargs="+", default=[], help="KEY=VALUE, of every variant")
    parser.add_argument("--width", type=int, default=8, help="of the U-Net")
    parser.add_argument("--size", type=int, default=64, help="pixels a side")
    parser.add_argument("--steps", type=int, default=300, help="of source training")
    parser.add_argument("--source-cases", type=int, default=12, help="volumes to train on")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args(words)
    options.updates = None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for task in options.task:
            folder = Path(name) / task
            weights, record = train(task, folder, options)
            print(json.dumps(record), flush=True)
            for method in options.methods:
                kind = "Y" if method in ("ttac", "ttt_pp", "tesla_s") else "N"
                for variant in VARIANTS[method]:
                    for end in options.protocols:
                        protocol, made = f"{kind}-{end}", (weights, folder)
                        for strength in options.strengths:
                            for seed in range(1, options.seeds + 1):
                                place = (strength, seed)
                                rows += run_variant(task, protocol, method, variant, place, made, options)
                        last = summaries(rows)[-1]
                        print(json.dumps(last), flush=True)
    result = {
        "command": shlex.join(["python", "benchmarks/baseline_settings.py", *(words or sys.argv[1:])]),
        "versions": versions(),
        "device": device_name(default_device(options.device)),
        "summaries": summaries(rows),
        "volumes": rows,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
