"""How long TeSLA takes a slice, against the passes through the network that it cannot do without.

Example::

    python benchmarks/speed.py --device cuda --width 64 --precision bfloat16 --out speed.json
    python benchmarks/speed.py --device cpu --width 16 --batch 8

The floor of a step is its pass count times what one pass costs in the same run, at the same batch
size and precision: V + 1 teacher forwards of which one with a backward, and two student forwards
with backwards, V the weak views. Slices are generated phantoms, or those of --volumes.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.models.base import (
    build_model,
    default_device,
    device_name,
    parameter_count,
    to_model_range,
)
from tesla_med.models.checkpoint import versions
from tesla_med.models.loading import load_model
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tasks.volumes import Volumes
from tesla_med.tta.base import MethodContext, make_method


def timed(function: Callable[[], Any], device: torch.device, repeats: int, warm_up: int = 2) -> float:
    """Return the median seconds of one call, the device synchronised around each."""
    for _ in range(warm_up):
        function()
    times = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        function()
        synchronise(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def generated_slices(count: int, size: int) -> Tensor:
    """Return smooth random slices (count, 1, size, size) in [0, 1] with a bright ellipse each."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 1, size // 16, size // 16, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic", align_corners=False)
    axis = torch.linspace(-1, 1, size)
    ellipse = ((axis[:, None] / 0.3) ** 2 + (axis[None, :] / 0.4) ** 2 < 1).float()
    noise = torch.rand(count, 1, size, size, generator=generator)
    return (0.5 * smooth + 0.3 * ellipse + 0.1 * noise).clamp(0, 1)


def given_slices(site: str, volumes: Path, count: int) -> Tensor:
    """Return the first ``count`` prepared slices of a site's cases."""
    config = load_site(site)
    task = Volumes(config, load_pipeline(config.pipeline))
    parts: list[Tensor] = []
    for ref in task.refs(task.find(volumes, ()), seed=0, size=1):
        images = task.load(ref).images
        if images is not None:
            parts.append(images)
        if sum(len(part) for part in parts) >= count:
            break
    return torch.cat(parts)[:count]


class Bench:
    """One model, one precision, one device."""

    def __init__(self, options: argparse.Namespace, precision: str) -> None:
        self.options = options
        self.device = default_device(options.device)
        self.precision = precision
        overrides = (f"model.params.width={options.width}",)
        self.pipeline = load_pipeline(options.pipeline, overrides)
        torch.manual_seed(0)
        if options.weights:
            self.model = load_model(options.weights, self.pipeline).model
        else:
            self.model = build_model(self.pipeline)

    def method(self, protocol: str, batch: int, overrides: dict[str, Any] | None = None) -> Any:
        """Return TeSLA as the pipeline has it under a protocol, with the batch size asked for."""
        params = self.pipeline.method_params("tesla", protocol) | (overrides or {}) | {"batch_slices": batch}
        context = MethodContext(
            self.device,
            seed=1,
            model_range=self.pipeline.preprocessing.model_range,
            precision=self.precision,
            predict_batch=self.options.predict_batch,
            cuda_graphs=not self.options.no_graphs,
        )
        return make_method("tesla", self.model, params, context)

    def passes(self, method: Any, images: Tensor) -> dict[str, float]:
        """Return seconds of a forward, a forward with backward, and a prediction's forward."""
        model = method.student
        inputs = to_model_range(images.to(self.device), (-1.0, 1.0))
        if self.device.type == "cuda":
            inputs = inputs.contiguous(memory_format=torch.channels_last)

        def forward() -> None:
            with torch.no_grad(), batch_statistics(model, momentum=None), method.autocast():
                model(inputs)

        def both() -> None:
            model.zero_grad(set_to_none=True)
            with batch_statistics(model, momentum=None), method.autocast():
                loss = model(inputs).float().mean()
            loss.backward()

        def inference() -> None:
            with torch.no_grad(), method.autocast():
                model(inputs)

        repeats = self.options.repeats
        result = {
            "forward": timed(forward, self.device, repeats),
            "forward_backward": timed(both, self.device, repeats),
            "inference": timed(inference, self.device, repeats),
        }
        model.zero_grad(set_to_none=True)
        return result

    def step(self, protocol: str, batch: int, images: Tensor, overrides: dict[str, Any]) -> dict[str, Any]:
        """Time whole updates of one protocol, its parts, and the floor."""
        method = self.method(protocol, batch, overrides)
        method.epoch = 1  # past the first pass, whose views may be fewer
        on_device = images[:batch].to(self.device)
        passes = self.passes(method, on_device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = timed(lambda: method.adapt(images[:batch]), self.device, self.options.repeats)
        peak = torch.cuda.max_memory_allocated(self.device) / 2**20 if self.device.type == "cuda" else None
        labels, reference = method._pseudo_labels(on_device)
        parts = {
            "weak_views": timed(lambda: method._pseudo_labels(on_device), self.device, self.options.repeats),
            "policy": timed(
                lambda: method._update_policy(on_device, reference), self.device, self.options.repeats
            ),
            "student": timed(
                lambda: method._update_student(on_device, labels), self.device, self.options.repeats
            ),
            "data": timed(lambda: images[:batch].to(self.device), self.device, self.options.repeats),
        }
        views = method.params.weak_views + len(method.params.corrected_views)
        floor = views * passes["forward"] + 3 * passes["forward_backward"]
        return {
            "protocol": protocol,
            "precision": self.precision,
            "batch": batch,
            "weak_views": views,
            "ms_per_slice": 1e3 * seconds / batch,
            "floor_ms_per_slice": 1e3 * floor / batch,
            "ratio_to_floor": seconds / floor,
            "ratio_to_inference": seconds / passes["inference"],
            "forward_ms_per_slice": 1e3 * passes["forward"] / batch,
            "forward_backward_ms_per_slice": 1e3 * passes["forward_backward"] / batch,
            "inference_ms_per_slice": 1e3 * passes["inference"] / batch,
            "peak_memory_mib": peak,
            "share_percent": {name: 100 * value / seconds for name, value in parts.items()},
        }

    def one_pass(self, images: Tensor, step: dict[str, Any]) -> dict[str, Any]:
        """Time N-O on one volume: its updates and its prediction, against the floor of both."""
        method = self.method("N-O", step["batch"])

        def updates() -> None:
            for batch in method.batches(method.to_device(images)):
                method.adapt(batch)

        count = sum(len(batch) for batch in method.batches(images))
        adapting = timed(updates, self.device, max(3, self.options.repeats // 5), warm_up=1)
        predicting = timed(lambda: method.predict(images), self.device, self.options.repeats)
        floor = step["floor_ms_per_slice"] * count / len(images) + step["inference_ms_per_slice"]
        total = 1e3 * (adapting + predicting) / len(images)
        return {
            "slices": len(images),
            "slice_updates": count,
            "ms_per_slice": total,
            "adapt_ms_per_slice": 1e3 * adapting / len(images),
            "predict_ms_per_slice": 1e3 * predicting / len(images),
            "floor_ms_per_slice": floor,
            "ratio_to_floor": total / floor,
        }


def show(row: dict[str, Any], title: str) -> None:
    """Print one result."""
    peak = "" if row.get("peak_memory_mib") is None else f", peak {row['peak_memory_mib']:.0f} MiB"
    print(
        f"{title:<34}{row['ms_per_slice']:9.2f} ms a slice, floor {row['floor_ms_per_slice']:8.2f}, "
        f"ratio {row['ratio_to_floor']:.2f}{peak}",
        flush=True,
    )
    if "share_percent" in row:
        shares = ", ".join(f"{name} {value:.0f} %" for name, value in row["share_percent"].items())
        print(f"{'':<34}{shares}; {row['ratio_to_inference']:.1f} times plain inference", flush=True)


def profile(bench: Bench, batch: int, images: Tensor) -> str:
    """Return the torch.profiler table of three updates."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    method = bench.method("N-M", batch)
    method.epoch = 1
    for _ in range(3):
        method.adapt(images[:batch])
    cuda = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if cuda else [])
    with record(activities=activities) as result:
        for _ in range(3):
            method.adapt(images[:batch])
        synchronise(bench.device)
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    return str(result.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=50))


def main() -> None:
    """Parse the command line, measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--pipeline", default="prostate_released")
    parser.add_argument("--width", type=int, default=None, help="default: 64 on a GPU, 16 on the CPU")
    parser.add_argument("--size", type=int, default=256, help="pixels a side of generated slices")
    parser.add_argument("--batch", type=int, default=None, help="of N-M; default 16 on a GPU, 8 on the CPU")
    parser.add_argument("--slices", type=int, default=24, help="of the N-O volume")
    parser.add_argument("--precision", nargs="*", default=None, help="float32 bfloat16")
    parser.add_argument("--predict-batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--weights", type=Path, default=None)
    parser.add_argument("--site", default=None, help="with --volumes: real slices of this site")
    parser.add_argument("--volumes", type=Path, default=None)
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel: no CUDA graphs")
    parser.add_argument("--profile", type=Path, default=None, help="for the tables: STEM-PRECISION.txt")
    parser.add_argument("--quick", action="store_true", help="width 4, 64 pixels, few repeats")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    gpu = default_device(options.device).type == "cuda"
    options.width = options.width or (64 if gpu else 16)
    options.batch = options.batch or (16 if gpu else 8)
    options.repeats = options.repeats or (20 if gpu else 3)
    if options.quick:
        options.width, options.size, options.batch, options.repeats, options.slices = 4, 64, 4, 2, 8
    precisions = options.precision or (["float32", "bfloat16"] if gpu else ["float32"])
    count = max(options.batch, options.slices)
    if options.volumes:
        images = given_slices(options.site, options.volumes, count)
    else:
        images = generated_slices(count, options.size)
    rows: list[dict[str, Any]] = []
    for precision in precisions:
        gc.collect()  # the networks and graphs of the last one
        if gpu:
            torch.cuda.empty_cache()
        bench = Bench(options, precision)
        many = bench.step("N-M", options.batch, images, {})
        show(many, f"N-M {precision}, a pass")
        small = min(8, options.batch)
        one = bench.step("N-O", small, images, {})
        show(one, f"N-O {precision}, a slice update")
        volume = bench.one_pass(images[: options.slices], one)
        show(volume, f"N-O {precision}, a volume")
        rows.append({"precision": precision, "N-M": many, "N-O": one, "N-O volume": volume})
        if options.profile:
            path = options.profile.with_stem(f"{options.profile.stem}-{precision}")
            path.write_text(profile(bench, options.batch, images), encoding="utf-8")
    if options.out:
        content = {
            "command": " ".join(["python", "benchmarks/speed.py", *sys.argv[1:]]),
            "device": device_name(default_device(options.device)),
            "threads": torch.get_num_threads(),
            "tf32_convolutions": bool(torch.backends.cudnn.allow_tf32),
            "width": options.width,
            "size": options.size,
            "parameters": parameter_count(bench.model),
            "versions": versions(),
            "results": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
