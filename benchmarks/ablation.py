"""What each element of the default recipe is worth, on the development data.

Example::

    python benchmarks/ablation.py --device cuda --precision bfloat16 --seeds 3 --out ablation.json
    python benchmarks/ablation.py --device cuda --variants default flip-none scale-0.9 --sites E

Every variant is the default recipe with something changed or left out; VARIANTS has them. The table gives
the mean Dice at 256x256 over volumes and seeds, and under it the largest loss of a volume against its
own source Dice. ``--guard`` judges with the guard on; without it the raw method is compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from reference import SHARED, SITES, measure

from tesla_med.models.checkpoint import versions

TESLA = "methods.tesla."
N_O = "protocols.N-O.tesla."
N_M = "protocols.N-M.tesla."
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "ops-released": (f"{TESLA}op_set=released_mri",),
    "ops-mri": (f"{TESLA}op_set=mri",),
    "ops-artefacts": (f"{TESLA}op_set=intensity_artefacts",),
    "no-adversarial": (f"{TESLA}distillation_weight=0",),
    "flip-none": (f"{TESLA}weak_flip=none",),
    "flip-last": (f"{TESLA}weak_flip=last",),
    "scale-0.9": (f"{TESLA}weak_scale=0.9", f"{TESLA}weak_shift=0.05"),
    "flip-none-scale-0.9": (f"{TESLA}weak_flip=none", f"{TESLA}weak_scale=0.9", f"{TESLA}weak_shift=0.05"),
    "flip-last-scale-0.9": (f"{TESLA}weak_flip=last", f"{TESLA}weak_scale=0.9", f"{TESLA}weak_shift=0.05"),
    "shift-only": (f"{TESLA}weak_flip=none", f"{TESLA}weak_scale=1.0"),
    "one-view": (f"{TESLA}weak_views=1",),
    "mri-flip-none": (f"{TESLA}op_set=mri", f"{TESLA}weak_flip=none"),
    "mri-flip-last": (f"{TESLA}op_set=mri", f"{TESLA}weak_flip=last"),
    "mri-flip-none-scale-0.9": (
        f"{TESLA}op_set=mri",
        f"{TESLA}weak_flip=none",
        f"{TESLA}weak_scale=0.9",
        f"{TESLA}weak_shift=0.05",
    ),
    "mri-one-view": (f"{TESLA}op_set=mri", f"{TESLA}weak_views=1"),
    "released-flip-last": (f"{TESLA}op_set=released_mri", f"{TESLA}weak_flip=last"),
    "released-flip-none": (f"{TESLA}op_set=released_mri", f"{TESLA}weak_flip=none"),
    "released-one-view": (f"{TESLA}op_set=released_mri", f"{TESLA}weak_views=1"),
    "marginal-0": (f"{TESLA}marginal_weight=0",),
    "marginal-0.5": (f"{TESLA}marginal_weight=0.5",),
    "marginal-1": (f"{TESLA}marginal_weight=1",),
    "marginal-teacher": (f"{TESLA}marginal_target=teacher",),
    "neighbours": (f"{TESLA}neighbour_share=0.25",),
    "reliability-1": (f"{TESLA}reliability=1",),
    "momentum-0.95": (f"{TESLA}teacher_momentum=0.95",),
    "momentum-0.99": (f"{TESLA}teacher_momentum=0.99",),
    "updates-8": (f"{N_O}updates_per_case=8",),
    "updates-12": (f"{N_O}updates_per_case=12",),
    "updates-48": (f"{N_O}updates_per_case=48",),
    "epochs-6": (f"{N_M}epochs=6",),
    "epochs-10": (f"{N_M}epochs=10",),
    "mri-epochs-10": (f"{TESLA}op_set=mri", f"{N_M}epochs=10"),
    "flip-none-epochs-10": (f"{TESLA}weak_flip=none", f"{N_M}epochs=10"),
    "released": (f"{TESLA}op_set=released_mri",),
    "released-marginal-0.5": (f"{TESLA}op_set=released_mri", f"{TESLA}marginal_weight=0.5"),
    "released-marginal-1": (f"{TESLA}op_set=released_mri", f"{TESLA}marginal_weight=1"),
    "released-momentum-0.98": (f"{TESLA}op_set=released_mri", f"{TESLA}teacher_momentum=0.98"),
    "released-momentum-0.99": (f"{TESLA}op_set=released_mri", f"{TESLA}teacher_momentum=0.99"),
    "released-marginal-1-momentum-0.99": (
        f"{TESLA}op_set=released_mri",
        f"{TESLA}marginal_weight=1",
        f"{TESLA}teacher_momentum=0.99",
    ),
    "released-batch-16": (f"{TESLA}op_set=released_mri", f"{N_O}batch_slices=16"),
    "released-updates-36": (f"{TESLA}op_set=released_mri", f"{N_O}updates_per_case=36"),
    "released-rate-1e-4": (f"{TESLA}op_set=released_mri", f"{TESLA}learning_rate=0.0001"),
    "marginal-0.5-flip-none": (f"{TESLA}marginal_weight=0.5", f"{TESLA}weak_flip=none"),
    "batch-16": (f"{N_O}batch_slices=16",),
    "rate-4e-4": (f"{TESLA}learning_rate=0.0004",),
    "affine": (f"{TESLA}freeze_norm_affine=false",),
    "running-statistics": (f"{TESLA}predict_statistics=running",),
    "carry-on": ("reset.N-O=site",),
    "carry-on-8": ("reset.N-O=site", f"{N_O}updates_per_case=8"),
    "largest-off": ("keep_largest=false",),
}


def table(rows: list[dict[str, Any]], sites: list[str]) -> str:
    """Return mean Dice and worst harm by variant and site."""
    lines = [f"{'variant':<22}" + "".join(f"{site.removeprefix('gm2018-'):>9}" for site in sites)]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells, harms = [], []
        for site in sites:
            group = [row for row in rows if row["variant"] == variant and row["site"] == site]
            cells.append(f"{np.mean([row['dice_256'] for row in group]):9.2f}" if group else " " * 9)
            harm = max((row["worst_harm_points"] for row in group), default=0.0)
            harms.append(f"{-harm:9.1f}" if group else " " * 9)
        lines += [f"{variant:<22}" + "".join(cells), f"{'  worst volume':<22}" + "".join(harms)]
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, run every variant, print the table after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    parser.add_argument("--weights", type=Path, default=SHARED / "reference")
    parser.add_argument("--sites", nargs="*", default=[site for sites in SITES.values() for site in sites])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--protocols", nargs="*", default=["N-O"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--set", nargs="*", default=[], help="key=value over every variant")
    parser.add_argument("--guard", action="store_true")
    parser.add_argument("--limit", type=int, default=None, help="first cases of a site only")
    parser.add_argument("--quick", action="store_true", help="one variant, one cord site, one seed")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.quick:
        options.variants, options.sites, options.seeds = ["default"], ["gm2018-CHUM"], 1
    rows: list[dict[str, Any]] = []
    for variant in options.variants:
        guard = f"guard.enabled={str(options.guard).lower()}"
        arguments = argparse.Namespace(**vars(options))
        arguments.recipes, arguments.calibration, arguments.out = ["default"], False, None
        arguments.set = [guard, *VARIANTS[variant], *options.set]
        label = " ".join([variant, *options.set])
        rows += [{**row, "variant": label} for row in measure(arguments)]
        print(table(rows, options.sites), flush=True)
        if options.out:
            content = {
                "command": " ".join(["python", "benchmarks/ablation.py", *sys.argv[1:]]),
                "versions": versions(),
                "rows": rows,
            }
            options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
