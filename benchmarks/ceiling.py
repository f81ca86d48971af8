"""What labels of the target would give: the source U-Net fine-tuned on the site itself, cross-validated.

Example::

    python benchmarks/ceiling.py --device cuda --sites D E --out ceiling.json

No adaptation without labels can be expected to do better than training with them. The volumes of a site
are split into folds; for each fold the source U-Net is trained on the slices of the other volumes and their
references, and judged on the fold: Dice at 256x256, mean over volumes, with the largest component kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference import SHARED, SITES, WEIGHTS, Reader, mean_dice

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.engine.postprocess import keep_largest
from tesla_med.models.base import default_device, device_name, to_model_range
from tesla_med.models.checkpoint import versions
from tesla_med.models.loading import load_model


def fine_tuned(model: Any, images: torch.Tensor, labels: torch.Tensor, options: Any, seed: int) -> Any:
    """Return a copy of the model trained on slices (N, C, H, W) in the model's range and labels (N, H, W)."""
    from monai.losses import DiceCELoss

    device = images.device
    network = copy.deepcopy(model).to(device).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.learning_rate, weight_decay=1e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.learning_rate, total_steps=options.steps
    )
    loss = DiceCELoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(options.steps):
        index = torch.randint(len(images), (options.batch,), generator=generator).to(device)
        gain = 1.0 + 0.2 * (torch.rand(options.batch, 1, 1, 1, generator=generator).to(device) - 0.5)
        batch = images[index] * gain
        with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bfloat16"):
            logits = network(batch)
        optimizer.zero_grad()
        loss(logits.float(), labels[index][:, None]).backward()
        optimizer.step()
        schedule.step()
    return network.eval()


@torch.no_grad()
def predicted(network: Any, images: torch.Tensor) -> np.ndarray:
    """Return class indices (N, H, W) of slices in the model's range, in evaluation mode."""
    parts = [network(images[start : start + 8]).argmax(1) for start in range(0, len(images), 8)]
    return keep_largest(torch.cat(parts).cpu().numpy().astype(np.uint8))


def measure(task: str, site_id: str, options: Any) -> dict[str, Any]:
    """Cross-validate one site."""
    site, pipeline = load_site(f"{task}/{site_id}"), load_pipeline(task)
    reader = Reader(site, pipeline, options.data / task, options.limit)
    device = default_device(options.device)
    model = load_model(options.weights / WEIGHTS[task], pipeline).model
    images, labels = {}, {}
    for ref in reader.refs:
        prepared = reader(ref).images
        images[ref.name] = to_model_range(prepared, pipeline.preprocessing.model_range).to(device)
        labels[ref.name] = torch.from_numpy(reader.at_model[ref.name].astype(np.int64)).to(device)
    names = list(images)
    found: dict[str, float | None] = {}
    for fold in range(options.folds):
        test = names[fold :: options.folds]
        train = [name for name in names if name not in test]
        # slices with the structure and as many of the others
        kept = [labels[name].flatten(1).any(dim=1) for name in train]
        pairs = [(images[name][have], labels[name][have]) for name, have in zip(train, kept, strict=True)]
        pairs += [
            (images[name][~have][::3], labels[name][~have][::3])
            for name, have in zip(train, kept, strict=True)
        ]
        network = fine_tuned(
            model,
            torch.cat([pair[0] for pair in pairs]),
            torch.cat([pair[1] for pair in pairs]),
            options,
            fold,
        )
        for name in test:
            mask = predicted(network, images[name])
            found[name] = mean_dice(reader.at_model[name], mask, len(pipeline.classes))
            print(f"{site_id} {name}: {found[name]:.2f}", flush=True)
    mean = float(np.mean([value for value in found.values() if value is not None]))
    return {"task": task, "site": site_id, "volumes": found, "dice_256": mean}


def main() -> None:
    """Parse the command line, run, print a line a site."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path, default=SHARED / "data")
    parser.add_argument("--weights", type=Path, default=SHARED / "reference")
    parser.add_argument("--sites", nargs="*", default=["D", "E"])
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--limit", type=int, default=None, help="first cases of a site only")
    parser.add_argument("--quick", action="store_true", help="one site, four volumes, two steps")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    if options.quick:
        options.sites, options.limit, options.steps, options.folds = ["E"], 4, 2, 2
    rows = []
    for task, sites in SITES.items():
        for site in [item for item in sites if item in options.sites]:
            rows.append(measure(task, site, options))
            print(f"{site}: Dice {rows[-1]['dice_256']:.2f} at 256, {options.folds} folds", flush=True)
            if options.out:
                content = {
                    "command": " ".join(["python", "benchmarks/ceiling.py", *sys.argv[1:]]),
                    "device": device_name(default_device(options.device)),
                    "versions": versions(),
                    "rows": rows,
                }
                options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
