"""Where the organ lies in one hospital's reference masks, seen from another's: what counts as too far.

Example::

    python benchmarks/organ_prior.py
    python benchmarks/organ_prior.py --recordings restarts --trained-on A

The first form takes the reference masks of every site as a training would keep them, and says how many
standard deviations those of the other sites are away: what a limit must leave alone. The second one says the
same of the masks that ``restarts.py --masks`` recorded, by their Dice: what a limit finds. Masks are on the
model's grid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from reference import SHARED, Reader

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.judging import GuardConfig
from tesla_med.engine.prior import OrganPrior, fitted

SITES = {
    "prostate": {"A": ("A",), "D": ("D",), "E": ("E",)},
    "spinal_cord": {
        "NWU and CEI": ("gm2018-NWU", "gm2018-CEI"),
        "JUN, CHUM and UCL": ("gm2018-JUN", "gm2018-CHUM", "gm2018-UCL"),
    },
}
BOUNDS = (0.0, 40.0, 70.0, 100.1)
"""Of the classes of Dice, in percent."""


def references(task: str, sites: Sequence[str], data: Path) -> list[torch.Tensor]:
    """Return the reference masks (N, H, W) of all cases of some sites."""
    found = []
    for name in sites:
        reader = Reader(load_site(f"{task}/{name}"), load_pipeline(task), data / task, None)
        for ref in reader.refs:
            reader(ref)
            found.append(torch.from_numpy(reader.at_model[ref.name]))
    return found


def between_sites(data: Path) -> Iterator[tuple[str, str, list[float]]]:
    """Yield training, judged sites and the deviations of the reference masks of the latter."""
    for task, groups in SITES.items():
        masks = {name: references(task, sites, data) for name, sites in groups.items()}
        for name, mine in masks.items():
            prior = fitted(mine)
            for other, theirs in masks.items():
                if prior is not None and other != name:
                    yield name, other, [prior.deviation(mask) for mask in theirs]


def recorded(folder: Path, prior: OrganPrior) -> list[tuple[float, float]]:
    """Return Dice in percent and deviation of every recorded mask of the prostate that is not empty."""
    found = []
    for path in sorted((folder / "volumes").glob("*/*/*.npz")):
        about = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        if "cord" in about["model"]:
            continue
        with np.load(path) as masks:
            for name in masks.files:
                if name != "truth" and masks[name].any():
                    value = prior.deviation(torch.from_numpy(masks[name]))
                    found.append((float(about["dice"][name] or 0.0), value))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    parser.add_argument("--recordings", type=Path, help="folder of restarts.py --masks")
    parser.add_argument("--trained-on", default="A", help="site whose masks the card would hold")
    options = parser.parse_args(arguments)
    limit = GuardConfig().farthest
    if options.recordings is None:
        print("| the card's site | judged | masks | median | largest |\n|---|---|---|---|---|")
        for name, other, values in between_sites(options.data):
            print(f"| {name} | {other} | {len(values)} | {np.median(values):.1f} | {max(values):.1f} |")
        return 0
    prior = fitted(references("prostate", (options.trained_on,), options.data))
    if prior is None:
        raise SystemExit(f"{options.trained_on}: fewer than two cases with an organ")
    found = np.array(recorded(options.recordings, prior))
    print(f"| Dice | masks | median | largest | > {limit:g}, % |\n|---|---|---|---|---|")
    for low, high in pairwise(BOUNDS):
        values = found[(found[:, 0] >= low) & (found[:, 0] < high), 1]
        cells = (len(values), np.median(values), max(values), 100 * np.mean(values > limit))
        print(f"| {low:.0f} to {high:.0f} | " + " | ".join(f"{cell:.4g}" for cell in cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
