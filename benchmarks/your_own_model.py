"""What adapting somebody else's model gains on shifted images, and what the guard lets through.

Example::

    python benchmarks/your_own_model.py --weights nnUNetTrainer__nnUNetPlans__3d_fullres --out own.json

The models must segment a bright ball (1) with a brighter core (2) in noise, as the small nnU-Nets that
``benchmarks/nnunet_oracle.py`` makes do. Images are generated and shifted: a receive field, blur, noise, an
inverted contrast, or nothing. Every model is adapted to every kind by each method with and without the guard,
N-O, case by case; Dice is the mean of both classes on the native grid, in percent, and changes are in points.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import nibabel as nib
import numpy as np
from scipy import ndimage

from tesla_med.adapt import adapt_site
from tesla_med.models.base import default_device, device_name
from tesla_med.models.checkpoint import versions

SHIFTS = ("none", "field", "strong field", "blur", "noise", "strong noise", "noise and blur", "inverted")
SHAPE, SPACING = (24, 64, 64), (2.0, 1.0, 1.0)
"""Voxels and mm along z, y, x."""


def ball(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return image and labels (z, y, x): a ball of 15 mm with a core of 8 mm, in noise."""
    axes = [np.arange(size) * step for size, step in zip(SHAPE, SPACING, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"))
    middle = np.array([size * step / 2 for size, step in zip(SHAPE, SPACING, strict=True)])
    centre = middle + generator.uniform(-5, 5, 3)
    radius = np.sqrt(np.square(grid - centre[:, None, None, None]).sum(axis=0))
    labels = (radius < 15).astype(np.uint8) + (radius < 8)
    return labels + 0.25 * generator.standard_normal(SHAPE), labels


def shifted(image: np.ndarray, shift: str, generator: np.random.Generator) -> np.ndarray:
    """Return the image as another scanner might have made it."""
    _, y, x = np.meshgrid(*[np.linspace(-0.5, 0.5, size) for size in SHAPE], indexing="ij")
    if "field" in shift:
        image = (image + 0.5) * np.exp((2.0 if "strong" in shift else 1.2) * x + y)
    if shift in ("blur", "noise and blur"):
        image = ndimage.gaussian_filter(image, (0, 1.5, 1.5))
    if "noise" in shift:
        image = image + (1.8 if "strong" in shift else 1.2) * generator.standard_normal(SHAPE)
    return -image if shift == "inverted" else image


def make(folder: Path, shift: str, seed: int, count: int) -> dict[str, np.ndarray]:
    """Write shifted images; return the labels (x, y, z) of each by its name."""
    generator = np.random.default_rng(100 + seed)
    folder.mkdir(parents=True)
    affine, found = np.diag([*SPACING[::-1], 1.0]), {}
    for number in range(count):
        image, labels = ball(generator)
        name = f"case_{number:03d}_0000"
        array = shifted(image, shift, generator).astype(np.float32)
        nib.save(nib.Nifti1Image(array.transpose(2, 1, 0), affine), folder / f"{name}.nii.gz")
        found[name] = labels.transpose(2, 1, 0)
    return found


def dice(mask: Path, labels: np.ndarray) -> float:
    """Return the mean Dice of both classes in percent."""
    found = np.asarray(nib.load(mask).dataobj)
    pairs = [(found == value, labels == value) for value in (1, 2)]
    return 100 * fmean(2 * (one & two).sum() / max(one.sum() + two.sum(), 1) for one, two in pairs)


def measure(options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Return a row for each model, shift, method, seed and image."""
    rows = []
    for weights in options.weights:
        for shift in options.shifts:
            for seed in range(options.seeds):
                images = root / weights.name / f"{shift}-{seed}"
                labels = make(images, shift, seed, options.cases)
                for method, guard in itertools.product(options.methods, (False, True)):
                    about = {"model": weights.name, "shift": shift, "method": method}
                    about |= {"guard": guard, "seed": seed}
                    found = adapted(weights, images, labels, about, options, root / "out")
                    rows += [about | row for row in found]
                    print(about, [f"{row['dice_source']:.1f} to {row['dice']:.1f}" for row in found])
    return rows


def adapted(
    weights: Path,
    images: Path,
    labels: dict[str, np.ndarray],
    about: dict[str, Any],
    options: argparse.Namespace,
    out: Path,
) -> list[dict[str, Any]]:
    """Adapt to a folder of images; return Dice before and after by image."""
    adapt_site(
        *(None, images),
        weights=weights,
        method=about["method"],
        guard=about["guard"],
        seed=about["seed"],
        out=out,
        device=options.device,
        overwrite=True,
        overrides=(*options.set, "reports=[table]", "own_form=false"),
    )
    parts = {"dice_source": "source_masks", "dice": "masks"}
    return [
        {"case": name} | {key: dice(out / part / f"{name}_mask.nii.gz", mask) for key, part in parts.items()}
        for name, mask in labels.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return the means as Markdown: source, and each method without and with the guard."""
    lines = ["| model | shift | images | method | source | without guard | with guard | worst with guard |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    keys = dict.fromkeys((row["model"], row["shift"], row["method"]) for row in rows)
    for model, shift, method in keys:
        some = [row for row in rows if (row["model"], row["shift"], row["method"]) == (model, shift, method)]
        plain, guarded = ([row for row in some if row["guard"] is value] for value in (False, True))
        worst = min(row["dice"] - row["dice_source"] for row in guarded)
        means = [fmean(row["dice"] for row in part) for part in (plain, guarded)]
        source = fmean(row["dice_source"] for row in plain)
        figures = " | ".join(f"{value:.1f}" for value in (source, *means))
        lines.append(f"| {model} | {shift} | {len(guarded)} | {method} | {figures} | {worst:+.1f} |")
    return "\n".join(lines)


def write_rows(path: Path, program: str, rows: list[dict[str, Any]], device: str) -> None:
    """Write what a program of this folder measured, with the command line and the versions."""
    command = " ".join(["python", f"benchmarks/{program}", *sys.argv[1:]])
    name = device_name(default_device(device))
    content = {"command": command, "versions": versions(), "device": name, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line, measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, nargs="+", required=True, help="folders of models")
    parser.add_argument("--shifts", nargs="+", default=list(SHIFTS), choices=SHIFTS)
    parser.add_argument("--methods", nargs="+", default=["tesla"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", type=int, default=2, help="images for each shift and seed")
    parser.add_argument("--set", nargs="*", default=[], help="key=value over the pipeline")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="one seed, one image, one shift")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.cases, options.shifts = 1, 1, ["noise"]
    with tempfile.TemporaryDirectory() as name:
        rows = measure(options, Path(name))
    print(table(rows))
    if options.out:
        write_rows(options.out, Path(__file__).name, rows, options.device)


if __name__ == "__main__":
    main()
