"""Milliseconds of a training step by augmentation family, on generated slices.

Example::

    python benchmarks/training_speed.py --device cuda --precision bfloat16 --width 64
    python benchmarks/training_speed.py --device cpu --width 16 --steps 3

The steps are those of ``tesla-med train``: draw, vary, forward, backward, update, moving average. Families
are measured in turn, several times over, and the median is printed with its ratio to ``none``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from tesla_med.augment.families import FAMILIES
from tesla_med.config.files import load_pipeline
from tesla_med.models.base import default_device, device_name
from tesla_med.tasks.labelled_slices import LabelledCase, LabelledSlices
from tesla_med.training.loop import TrainingRun


def slices(size: int, count: int = 32) -> LabelledSlices:
    """Return one generated case: a bright square that moves through noise."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(count, 1, size, size, generator=generator)
    labels = torch.zeros(count, size, size, dtype=torch.uint8)
    labels[:, size // 4 : size // 2, size // 4 : size // 2] = 1
    images = 0.5 * images + 0.5 * labels[:, None]
    return LabelledSlices([LabelledCase("P", "a", images, labels, tuple(range(count)))], [], 0.7, 2)


def measure(family: str, options: argparse.Namespace) -> TrainingRun:
    """Return a training of one family, warmed up."""
    overrides = [
        f"train.augment={family}",
        f"train.batch_size={options.batch}",
        f"precision={options.precision}",
        f"model.params.width={options.width}",
        f"train.steps={10 * options.steps * options.rounds}",
    ]
    data = slices(options.size)
    run = TrainingRun(load_pipeline("prostate", overrides), data, default_device(options.device), 0)
    advance(run, options.warm_up)
    return run


def advance(run: TrainingRun, steps: int) -> float:
    """Take steps and return the milliseconds of one."""
    part = run.data.every()
    start = time.perf_counter()
    losses = [run.advance(part) for _ in range(steps)]
    torch.stack(losses).cpu()  # waits for the device
    return 1000 * (time.perf_counter() - start) / max(steps, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every family and print a table."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", maxsplit=1)[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    runs = {family: measure(family, options) for family in FAMILIES}
    times: dict[str, list[float]] = {family: [] for family in FAMILIES}
    for _ in range(options.rounds):
        for family, run in runs.items():
            times[family].append(advance(run, options.steps))
    device, side = device_name(default_device(options.device)), options.size
    print(f"{device}, {options.batch} slices of {side}x{side}, {options.precision}, width {options.width}")
    print("| family | ms a step | ratio to none |\n|---|---|---|")
    medians = {family: statistics.median(values) for family, values in times.items()}
    for family, value in medians.items():
        print(f"| {family} | {value:.1f} | {value / medians['none']:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
