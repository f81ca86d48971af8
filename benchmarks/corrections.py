"""Dice of the other cases of a site, without and with 1, 2 and 4 corrected cases (``adapt --corrections``).

Example::

    python benchmarks/corrections.py --device cpu --seeds 3 4 5 --out corrections.json
    python benchmarks/corrections.py --device cpu --weights 0.3 1 3 --seeds 10 --out weights.json

Every site is generated, no patient: a small U-Net is trained on the source site of the demo and adapted to
its hard site. The first 0, 1, 2 or 4 cases are given with their true masks as corrected; the Dice is that of
``--others`` further cases, which are never corrected and the same in every column. Only what the columns need
is adapted to. Images are smaller and updates fewer than by default, so that it takes minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COUNTS = (0, 1, 2, 4)
SMALL = (
    *("preprocessing.size=[48,48]", "train.steps=160", "scaling.candidates=[]", "reports=[table]"),
    *("protocols.N-O.tesla.updates_per_case=8", "methods.tesla.weak_views=3"),
)


def prepare(task: str, folder: Path, seed: int, device: str, cases: int) -> tuple[Any, Any, Path]:
    """Generate source and hard site, train, and return the pipeline, the hard site and the weights."""
    from tesla_med.config.files import load_pipeline
    from tesla_med.config.models import SiteConfig
    from tesla_med.demo.recipes import RECIPES, TERMS
    from tesla_med.training.train import train_source

    recipe = RECIPES[task]
    pipeline = load_pipeline(recipe.pipeline, (*recipe.overrides, *SMALL))
    sites = {}
    for number, name in enumerate(("source", "hard")):
        known = {"id": name, "pipeline": recipe.pipeline, "institution": name.capitalize(), "terms": TERMS}
        sites[name] = SiteConfig(**known, **recipe.describe(name))
        count = recipe.counts[0] if name == "source" else cases
        recipe.make(folder / "volumes" / name.capitalize(), name, count, 100 * seed + number)
    trained = train_source(
        pipeline, [sites["source"]], folder / "volumes", folder / "source", seed=seed, device=device
    )
    return pipeline, sites["hard"], trained.weights


def choose(site: Any, pipeline: Any, volumes: Path, folder: Path, count: int, others: int) -> Path | None:
    """Link the first ``count`` and the last ``others`` cases into a folder, and correct the first.

    Returns:
        The folder of corrected masks, as a clinician would hand them in; None for none.
    """
    from tesla_med.io.cases import find_cases
    from tesla_med.io.references import read_reference
    from tesla_med.io.volumes import read_case, write_mask

    found = find_cases(volumes, site).cases
    (folder / "nii").mkdir(parents=True)
    for case in (*found[:count], *found[-others:]):
        for path in (case.image, *(mask for mask in case.masks if mask is not None)):
            (folder / "nii" / path.name).symlink_to(path)
    for case in found[:count]:
        volume = read_case(case, site)
        mask = read_reference(case, site.files, volume, pipeline.values)
        write_mask(folder / "corrected" / f"{case.name}_mask.nii.gz", mask, volume)
    return folder / "corrected" if count else None


def measure(options: argparse.Namespace, task: str, seed: int) -> list[dict[str, Any]]:
    """Return the Dice of the other cases of one site, a row for each method, protocol, weight and count."""
    from tesla_med.adapt import adapt_site

    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        most = max(options.counts)
        pipeline, site, weights = prepare(task, folder, seed, options.device, most + options.others)
        for count in options.counts:
            here = folder / f"with-{count}"
            given = choose(site, pipeline, folder / "volumes" / "Hard", here, count, options.others)
            for method in options.methods:
                for protocol in options.protocols:
                    for weight in options.weights if count else (options.weights or (None,))[:1]:
                        start = time.perf_counter()
                        texts = (*options.set, *(() if weight is None else (f"corrections.weight={weight}",)))
                        result = adapt_site(
                            site,
                            here / "nii",
                            pipeline=pipeline,
                            weights=weights,
                            method=method,
                            protocol=protocol,
                            out=folder / "run",
                            seed=seed,
                            device=options.device,
                            corrections=given,
                            overrides=texts,
                            overwrite=True,
                        )
                        others = result.results[-options.others :]
                        rows.append(
                            {
                                "task": task,
                                "seed": seed,
                                "method": method,
                                "protocol": protocol,
                                "weight": weight,
                                "corrected": count,
                                "dice": [item.mean_dice for item in others],
                                "dice_source": [item.mean_dice_source for item in others],
                                "used": [item.used for item in others],
                                "seconds": time.perf_counter() - start,
                            }
                        )
                        show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print one row as it is measured."""
    mean = 100 * sum(row["dice"]) / len(row["dice"])
    source = 100 * sum(row["dice_source"]) / len(row["dice_source"])
    words = (
        f"{row['task']:<12} seed {row['seed']:<3} {row['method']:<8} {row['protocol']} weight {row['weight']}"
    )
    print(
        f"{words} corrected {row['corrected']}: source {source:.1f}, {mean:.1f} ({row['seconds']:.0f} s)",
        flush=True,
    )


def table(rows: list[dict[str, Any]]) -> str:
    """Return the means over seeds as Markdown, with the smallest change of a case against no correction."""
    counts = sorted({row["corrected"] for row in rows})
    names = [f"{count} corrected" for count in counts]
    lines = ["| task | method | weight | source | " + " | ".join(names) + " | worst change |"]
    lines.append("|---" * (5 + len(counts)) + "|")
    keys = dict.fromkeys((row["task"], row["method"], row["protocol"], row["weight"]) for row in rows)
    for task, method, protocol, weight in keys:
        own = [
            row for row in rows if (row["task"], row["method"], row["protocol"]) == (task, method, protocol)
        ]
        plain = {row["seed"]: row for row in own if not row["corrected"]}
        own = [row for row in own if row["weight"] == weight or not row["corrected"]]
        cells, worst = [], 0.0
        for count in counts:
            found = [row for row in own if row["corrected"] == count]
            values = [value for row in found for value in row["dice"]]
            cells.append(f"{100 * sum(values) / len(values):.1f}")
            for row in found:
                pairs = zip(row["dice"], plain[row["seed"]]["dice"], strict=True)
                worst = min(worst, *(after - before for after, before in pairs))
        source = [value for row in plain.values() for value in row["dice_source"]]
        shown = "default" if weight is None else f"{weight:g}"
        before = f"{100 * sum(source) / len(source):.1f}"
        head = f"| {task} | {method} {protocol} | {shown} | {before} | "
        lines.append(head + " | ".join(cells) + f" | {100 * worst:+.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure every site, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, one method, N-O, 0 and 2 corrected cases"
    )
    parser.add_argument("--others", type=int, default=4, help="cases that are scored")
    parser.add_argument("--tasks", nargs="+", default=["prostate"], help="prostate, spinal_cord")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=["tesla"])
    parser.add_argument("--protocols", nargs="+", default=["N-O"])
    parser.add_argument("--weights", nargs="+", type=float, default=[None])
    parser.add_argument("--set", nargs="*", default=[], help="key=value over the pipeline")
    parser.add_argument("--counts", nargs="+", type=int, default=list(COUNTS))
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.seeds, options.methods = options.tasks[:1], options.seeds[:1], ["tesla"]
        options.protocols, options.counts = ["N-O"], [0, 2]
    rows = [row for task in options.tasks for seed in options.seeds for row in measure(options, task, seed)]
    print(table(rows))
    if options.out is not None:
        from tesla_med.models.base import default_device, device_name
        from tesla_med.models.checkpoint import versions

        content = {
            "command": " ".join(["python", "benchmarks/corrections.py", *sys.argv[1:]]),
            "versions": versions(),
            "device": device_name(default_device(options.device)),
            "scored_cases": options.others,
            "rows": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
