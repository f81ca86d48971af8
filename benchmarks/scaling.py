"""Time and peak memory of a whole run against the number of cases and of slices a case.

Example::

    python benchmarks/scaling.py --device cpu --out scaling.json
    python benchmarks/scaling.py --device cpu --load --updates 1    # 500 cases, and one 512x512x400 volume

Linear time and flat memory are what to look for: seconds a slice should not grow with the number of cases,
nor peak memory. Every size runs in a process of its own on generated volumes, with a small U-Net.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

MARK = "scaling-result: "


def generate(folder: Path, cases: int, slices: int, size: int) -> None:
    """Write ``cases`` volumes with a bright ellipse, and their masks, as site prostate/F expects them."""
    from tesla_med.io.volumes import save_image

    axis = np.linspace(-1, 1, size)
    ellipse = (axis[:, None] / 0.4) ** 2 + (axis[None, :] / 0.5) ** 2 < 1
    mask = np.repeat(ellipse[:, :, None], slices, axis=2)
    affine = np.diag([1.2, 1.2, 3.0, 1.0])
    for case in range(cases):
        generator = np.random.default_rng(case)
        image = 300 * mask + 200 * generator.random((size, size, slices))
        save_image(folder / f"Case{case:03d}.nii.gz", image, affine, dtype=np.int16)
        save_image(folder / f"Case{case:03d}_segmentation.nii.gz", mask, affine, dtype=np.uint8)


def one_run(options: argparse.Namespace) -> dict[str, Any]:
    """Adapt to one generated site in this process and return time and peak memory."""
    import torch

    from tesla_med.adapt import adapt_site
    from tesla_med.config.files import load_pipeline
    from tesla_med.models.base import build_model
    from tesla_med.models.checkpoint import make_card, save_checkpoint

    overrides = [
        f"model.params.width={options.width}",
        f"preprocessing.size=[{options.size},{options.size}]",
        f"protocols.N-O.tesla.updates_per_case={options.updates}",
        "report.max_cases_with_overlays=5",
    ]
    pipeline = load_pipeline("prostate", overrides)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate(folder / "nii", options.cases, options.slices, options.field or options.size)
        torch.manual_seed(0)
        weights = folder / "source.safetensors"
        save_checkpoint(weights, build_model(pipeline), make_card(pipeline))
        start = time.perf_counter()
        result = adapt_site(
            "prostate/F",
            folder / "nii",
            weights=weights,
            pipeline=pipeline,
            method=options.method,
            protocol=options.protocol,
            out=folder / "out",
            device=options.device,
        )
        seconds = time.perf_counter() - start
    cuda = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
    return {
        "cases": options.cases,
        "slices_per_case": options.slices,
        "pixels_a_side": options.field or options.size,
        "seconds": seconds,
        "seconds_per_case": seconds / options.cases,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "peak_gpu_memory_mib": cuda,
        "failed": len(result.failed),
    }


def in_process(options: argparse.Namespace, cases: int, slices: int, field: int) -> dict[str, Any]:
    """Run one size in a process of its own."""
    command = [sys.executable, __file__, "--child", "--cases", str(cases), "--slices", str(slices)]
    command += ["--field", str(field)]
    for name in ("device", "width", "size", "updates", "method", "protocol"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - own file
    line = next(line for line in done.stdout.splitlines() if line.startswith(MARK))
    result: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return result


def main() -> None:
    """Parse the command line, run every size, print the table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="pixels a side")
    parser.add_argument("--updates", type=int, default=2, help="updates a case")
    parser.add_argument("--method", default="tesla")
    parser.add_argument("--protocol", default="N-O")
    parser.add_argument("--quick", action="store_true", help="1 and 5 cases only")
    parser.add_argument("--load", action="store_true", help="500 small cases; one volume of 512x512x400")
    parser.add_argument("--field", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cases", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--slices", type=int, default=12, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(MARK + json.dumps(one_run(options)))
        return
    size = options.size
    sizes = [(1, 12, size), (10, 12, size), (30, 12, size), (100, 12, size), (5, 48, size), (5, 192, size)]
    if options.quick:
        sizes = [(1, 12, size), (5, 12, size)]
    elif options.load:
        sizes = [(500, 6, 32), (1, 400, 512)]
    rows = []
    print(
        f"{'cases':>6}{'slices':>8}{'seconds':>10}{'s a case':>10}{'peak MiB':>10}{'GPU MiB':>9}{'failed':>8}"
    )
    for cases, slices, field in sizes:
        row = in_process(options, cases, slices, field)
        rows.append(row)
        gpu = "-" if row["peak_gpu_memory_mib"] is None else f"{row['peak_gpu_memory_mib']:.0f}"
        print(
            f"{cases:>6}{slices:>8}{row['seconds']:>10.1f}{row['seconds_per_case']:>10.2f}"
            f"{row['peak_memory_mib']:>10.0f}{gpu:>9}{row['failed']:>8}",
            flush=True,
        )
    if options.out:
        from tesla_med.models.checkpoint import versions

        content = {
            "command": " ".join(["python", "benchmarks/scaling.py", *sys.argv[1:]]),
            "method": options.method,
            "protocol": options.protocol,
            "width": options.width,
            "size": options.size,
            "updates_per_case": options.updates,
            "versions": versions(),
            "results": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
