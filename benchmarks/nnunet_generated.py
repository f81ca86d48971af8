"""What adapting three-dimensional nnU-Nets with instance norm gains on generated scanners that differ.

Example::

    python benchmarks/nnunet_generated.py --device cpu --seeds 1 2 3 --out nnunet_generated.json
    python benchmarks/nnunet_generated.py --merge nnunet_generated.json

Small nnU-Nets are trained on generated volumes of the prostate from one scanner (14 volumes, 64x64x14 voxels,
400 steps, augmented much as nnU-Net does) and written as nnU-Net writes them. The scanner is then changed in
one respect: more noise, blur, a receive field, a coil in the rectum. Of rising strengths the first is taken
at which the source's mean Dice is below 85; if it is then below 50, that scanner is left out for that model.
Every model is adapted to three volumes of each by the pipeline ``nnunet``, N-O, with and without the guard.
Strengths are the only thing that labels choose. Dice in percent on the native grid; changes in points.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import nibabel as nib
import numpy as np
import torch
from nnunet_speed import NAME, plans
from torch import Tensor
from your_own_model import write_rows

from tesla_med.adapt import adapt_site
from tesla_med.config.nnunet import read_model
from tesla_med.demo.volumes import ScannerSettings, make_case, preset
from tesla_med.models.nnunet import Nnunet, NnunetParams

SIDE, SLICES, TRAINED_ON, STEPS, BATCH = 64, 14, 14, 400, 2
SIZE = {
    "shape": (SLICES, SIDE, SIDE),
    "patch": [SLICES, SIDE, SIDE],
    "features": [16, 32, 64, 64],
    "strides": [[1, 1, 1], [1, 2, 2], [1, 2, 2], [2, 2, 2]],
}
SHIFTS = {
    "noise": ("noise", (0.1, 0.16, 0.24, 0.32, 0.4, 0.5)),
    "blur": ("blur_mm", (2.0, 3.0, 4.0, 5.0, 6.0, 7.0)),
    "receive field": ("bias", (0.2, 0.35, 0.5, 0.7, 0.9, 1.2)),
    "coil in the rectum": ("endorectal", (0.15, 0.3, 0.45, 0.6, 0.75, 0.9)),
}
"""The setting that is changed, and its strengths."""
BOUNDS = (50.0, 85.0)
Case = tuple[np.ndarray, np.ndarray, np.ndarray]


def scanner(**changes: float) -> ScannerSettings:
    """Return the scanner that is trained on, or one that differs from it."""
    return preset("prostate").model_copy(update={"matrix": SIDE, "slices": SLICES, **changes})


def cases(settings: ScannerSettings, count: int, seed: int) -> list[Case]:
    """Return images, labels (both I, J, K) and affines."""
    return [make_case("prostate", settings, np.random.default_rng([seed, number])) for number in range(count)]


def normalised(image: np.ndarray) -> Tensor:
    """Return an image as nnU-Net sees it, (1, D, H, W) of z-scores."""
    array = image.transpose(2, 1, 0).astype(np.float32)
    return torch.from_numpy((array - array.mean()) / array.std())[None]


def train(folder: Path, seed: int, steps: int) -> Path:
    """Train a model, write it as nnU-Net does, and return its folder."""
    from monai import transforms as mt
    from monai.losses import DiceCELoss

    found = cases(scanner(), TRAINED_ON, 1000)
    spacing = [float(step) for step in np.linalg.norm(found[0][2][:3, :3], axis=0)[::-1]]
    model = folder / NAME
    (model / "fold_0").mkdir(parents=True)
    dataset = {"channel_names": {"0": "T2"}, "labels": {"background": 0, "prostate": 1}}
    contents = {"plans.json": plans(SIZE, spacing), "dataset.json": dataset | {"file_ending": ".nii.gz"}}
    for name, content in contents.items():
        (model / name).write_text(json.dumps(content), encoding="utf-8")
    torch.manual_seed(seed)
    network = Nnunet(NnunetParams.model_validate(read_model(model)["model"]["params"]), 1, 2).folds[0]
    augment = mt.Compose(
        [
            mt.RandFlipd(("image", "label"), 0.5, spatial_axis=2),
            mt.RandAffined(
                ("image", "label"),
                prob=0.4,
                rotate_range=(0.26, 0, 0),
                scale_range=(0.1, 0.2, 0.2),
                translate_range=(0, 3, 3),
                mode=("bilinear", "nearest"),
                padding_mode="border",
            ),
            mt.RandGaussianNoised("image", prob=0.15, std=0.2),
            mt.RandGaussianSmoothd("image", prob=0.2, sigma_x=(0.1, 0.1), sigma_y=(0.5, 1), sigma_z=(0.5, 1)),
            mt.RandScaleIntensityd("image", factors=0.25, prob=0.15),
            mt.RandAdjustContrastd("image", prob=0.3, gamma=(0.7, 1.5)),
        ]
    )
    augment.set_random_state(seed)
    pool = [
        {
            "image": normalised(image),
            "label": torch.from_numpy(labels.transpose(2, 1, 0).astype(np.float32))[None],
        }
        for image, labels, _ in found
    ]
    generator, criterion = np.random.default_rng(seed), DiceCELoss(to_onehot_y=True, softmax=True, batch=True)
    optimizer = torch.optim.AdamW(network.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    network.train()
    for _ in range(steps):
        drawn = [augment(pool[generator.integers(len(pool))]) for _ in range(BATCH)]
        images = torch.stack([torch.as_tensor(np.asarray(item["image"])) for item in drawn]).float()
        labels = torch.stack([torch.as_tensor(np.asarray(item["label"])) for item in drawn]).round()
        optimizer.zero_grad()
        criterion(logits_of(network, images), labels).backward()
        optimizer.step()
        schedule.step()
    saved = {
        "network_weights": network.state_dict(),
        "trainer_name": "nnUNetTrainer",
        "init_args": {"configuration": "3d_fullres", "fold": 0},
        "inference_allowed_mirroring_axes": (2,),
    }
    torch.save(saved, model / "fold_0" / "checkpoint_final.pth")
    return model


def logits_of(network: torch.nn.Module, images: Tensor) -> Tensor:
    """Return the logits at full resolution."""
    found = network(images)
    return found[0] if isinstance(found, (list, tuple)) else found


def dice(mask: np.ndarray, labels: np.ndarray) -> float:
    """Return the Dice of the organ in percent."""
    found, true = mask > 0, labels > 0
    return 200.0 * float((found & true).sum()) / max(int(found.sum() + true.sum()), 1)


def adapted(
    model: Path, found: Sequence[Case], out: Path, options: argparse.Namespace, seed: int, **more: Any
) -> list[dict[str, float]]:
    """Adapt to some volumes; return the Dice of each before and after."""
    images = out / "images"
    images.mkdir(parents=True, exist_ok=True)
    for number, (image, _, affine) in enumerate(found):
        nib.save(nib.Nifti1Image(image, affine), images / f"case{number}_0000.nii.gz")
    adapt_site(
        *(None, images),
        weights=model,
        seed=seed,
        out=out / "run",
        device=options.device,
        overwrite=True,
        overrides=(*options.set, "reports=[table]", "own_form=false"),
        **more,
    )

    def score(part: str, number: int) -> float:
        path = next((out / "run" / part).glob(f"case{number}*_mask.nii.gz"))
        return dice(np.asarray(nib.load(path).dataobj), found[number][1])

    parts = {"source": "source_masks", "dice": "masks"}
    return [{key: score(part, number) for key, part in parts.items()} for number in range(len(found))]


def measure(seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train one model and yield a row for each scanner, with and without the guard, and volume."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = train(root, seed, options.steps)
        for shift in options.shifts:
            setting, strengths = SHIFTS[shift]
            strength, volumes = harder(model, setting, strengths, root / "seek", options, seed)
            if strength is None:
                print(
                    f"model {seed}, {shift}: no strength at which its Dice is {BOUNDS[0]:g} to {BOUNDS[1]:g}"
                )
                continue
            for guard in (False, True):
                about = {"seed": seed, "shift": shift, "strength": strength, "guard": guard}
                found = adapted(model, volumes, root / "out", options, seed, guard=guard)
                print(about, [f"{row['source']:.1f} to {row['dice']:.1f}" for row in found], flush=True)
                yield from (about | {"volume": number} | row for number, row in enumerate(found))


def harder(
    model: Path,
    setting: str,
    strengths: Sequence[float],
    out: Path,
    options: argparse.Namespace,
    seed: int,
) -> tuple[float | None, list[Case]]:
    """Return the first strength at which the source is within the bounds, and its volumes."""
    for strength in strengths:
        volumes = cases(scanner(**{setting: strength}), options.volumes, 2000)
        found = adapted(model, volumes, out, options, seed, method="source")
        mean = fmean(row["dice"] for row in found)
        if mean < BOUNDS[1]:
            return (strength, volumes) if mean >= BOUNDS[0] else (None, volumes)
    return None, []


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the means over volumes by scanner, over all models, as Markdown."""
    lines = ["| scanner | models | volumes | source | without guard | with guard | worst with guard |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for shift in [*dict.fromkeys(row["shift"] for row in rows), "all"]:
        some = [row for row in rows if shift in (row["shift"], "all")]
        plain, guarded = ([row for row in some if row["guard"] is value] for value in (False, True))
        figures = [fmean(row["source"] for row in plain)]
        figures += [fmean(row["dice"] for row in part) for part in (plain, guarded)]
        worst = min(row["dice"] - row["source"] for row in guarded)
        models = len({row["seed"] for row in some})
        cells = [shift, str(models), str(len(guarded)), *(f"{value:.1f}" for value in figures)]
        lines.append(f"| {' | '.join(cells)} | {worst:+.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--shifts", nargs="+", default=list(SHIFTS), choices=list(SHIFTS))
    parser.add_argument("--volumes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--set", nargs="*", default=[], help="key=value over the pipeline")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--merge", type=Path, nargs="+", help="table of earlier --out files")
    parser.add_argument("--quick", action="store_true", help="one barely trained model, one scanner")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.merge:
        parts = [json.loads(path.read_text(encoding="utf-8"))["rows"] for path in options.merge]
        print(table([row for rows in parts for row in rows]))
        return
    if options.quick:
        options.seeds, options.steps, options.volumes, options.shifts = [1], 60, 1, ["noise"]
    rows = [row for seed in options.seeds for row in measure(seed, options)]
    if rows:
        print(table(rows))
    if options.out:
        write_rows(options.out, Path(__file__).name, rows, options.device)


if __name__ == "__main__":
    main()
