"""Bringing the classes of an nnU-Net back to the scan's grid: part by part against resampling the whole.

Example::

    python benchmarks/nnunet_restore.py --shape 400 400 120 --classes 5

A scan of ``--shape`` voxels of 0.75 x 0.75 x 1 mm, a model at 1.5 x 1.5 x 2 mm. "Whole" resamples the
log-probabilities of each class by scikit-image, as nnU-Net does. Prints seconds and the most memory at a time
in multiples of the result, and the share of voxels whose class differs, for random probabilities.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tesla_med.config.models import Preprocessing, Region
from tesla_med.config.nnunet import ChannelNorm, NnunetPreprocessing
from tesla_med.prepare.nnunet import NnunetCase, NnunetPreprocessor, resample
from tesla_med.types import Volume

NATIVE, MODEL = (0.75, 0.75, 1.0), (2.0, 1.5, 1.5)
PAGE = 4096


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE


def watched(work: Callable[[], np.ndarray]) -> tuple[np.ndarray, float, float]:
    """Return a result, its seconds, and the most memory above that at the start, in results."""
    before, most, done = resident(), [0], threading.Event()

    def look() -> None:
        while not done.wait(0.01):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=look)
    thread.start()
    start = time.perf_counter()
    try:
        found = work()
    finally:
        seconds = time.perf_counter() - start
        done.set()
        thread.join()
    return found, seconds, (most[0] - before) / found.nbytes


def whole(case: NnunetCase, probs: torch.Tensor) -> np.ndarray:
    """Return class probabilities on the grid of the scan, (L, K, J, I), all resampled at once."""
    logs = probs[0].log().numpy()
    found = resample(logs, case.before, case.target, case.spacing, case.config.logits)
    return torch.from_numpy(found).softmax(dim=0).numpy()


def measure(shape: Sequence[int], classes: int) -> dict[str, Any]:
    """Return seconds and memory of both ways, and the share of voxels whose class differs."""
    config = NnunetPreprocessing(spacing=MODEL, channels=(ChannelNorm(scheme="none"),))
    prepare = NnunetPreprocessor(Preprocessing(nnunet=config), Region(), classes, regions=False)
    image = np.ones((1, *shape), np.float32)
    scan = Volume(array=image, affine=np.diag([*NATIVE, 1.0]), spacing=NATIVE, header=None, path=Path("scan"))
    case = prepare(scan)
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(1, classes, *case.images.shape[2:], generator=generator).softmax(dim=1)
    case.restore(probs)  # imports
    by_parts = watched(lambda: case.restore(probs))
    at_once = watched(lambda: whole(case, probs))
    differ = by_parts[0].argmax(0) != at_once[0].argmax(0).transpose(2, 1, 0)
    return {"by parts": by_parts[1:], "whole": at_once[1:], "differ": float(differ.mean())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=3, default=(400, 400, 120), help="voxels of the scan")
    parser.add_argument("--classes", type=int, default=5)
    options = parser.parse_args(arguments)
    found = measure(options.shape, options.classes)
    print("| way | seconds | memory, in results |\n|---|---|---|")
    for name in ("whole", "by parts"):
        seconds, memory = found[name]
        print(f"| {name} | {seconds:.2f} | {memory:.1f} |")
    print(f"\nVoxels whose class differs: {100 * found['differ']:.5f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
