"""What a run would do, before it is done: items, regions, time and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tesla_med.models.base import Network
from tesla_med.plan import Plan
from tesla_med.prepare.stream import named_error, read_ahead
from tesla_med.types import Failure, ItemEstimate, Progress, Unit


@dataclass(frozen=True)
class Estimate:
    """What a run would be.

    Attributes:
        cases: one entry per item.
        region: the part of the field that the model would see.
        size: pixels of an image as the model sees it.
        seconds: about how long, from one measured forward pass.
        memory_mib: about the largest memory of networks and one batch.
        units: how many units go through the network.
        batch: images in a batch.
    """

    cases: tuple[ItemEstimate, ...]
    region: str
    size: tuple[int, ...] | None
    seconds: float
    memory_mib: float
    units: int = 0
    batch: int = 0

    @property
    def problems(self) -> int:
        """Number of items that would fail."""
        return sum(bool(item.problem) for item in self.cases)


def estimate(plan: Plan, progress: Progress = lambda *_: None) -> Estimate:
    """Read every unit, time one image on the device, and add up. Nothing is written."""
    rows: list[ItemEstimate] = []
    sample: Tensor | None = None
    counts: list[int] = []
    task = plan.task
    for loaded in read_ahead(plan.refs, task.load, task.ahead):
        unit = loaded if isinstance(loaded, Unit) else None
        failed = loaded.error if isinstance(loaded, Failure) else None
        problem = "" if failed is None else str(named_error(task.named(loaded.ref), failed))
        images = None if unit is None else unit.images
        if images is not None:
            sample = images[:1]
            counts.append(images.shape[0])
        rows += task.expected(loaded.ref, unit, problem)
        progress(f"reading {task.item}s", len(rows), len(plan.items.names))
    order = {name: index for index, name in enumerate(plan.items.names)}
    rows.sort(key=lambda row: order[row.case])
    size = plan.params(plan.method).batch_slices
    common: dict[str, Any] = {"region": _region(plan), "units": len(plan.refs)}
    if sample is None:
        return Estimate(tuple(rows), **common, size=None, seconds=0.0, memory_mib=0.0)
    method = plan.make_method(plan.method)
    source = plan.make_method("source")
    seconds = _forward_seconds(source.model, sample.to(plan.device))
    passes = sum(method.passes(count) + count for count in counts)
    batch = size or max(counts)
    memory = _memory_mib(source.model, sample.to(plan.device), batch, trains=method.adapts)
    shape = tuple(int(side) for side in sample.shape[2:])
    common |= {"size": shape, "batch": batch}
    return Estimate(tuple(rows), **common, seconds=passes * seconds, memory_mib=memory)


def _region(plan: Plan) -> str:
    region = plan.site.region
    if region.kind == "whole":
        return "whole field"
    about = {"square": "centred", "mask": f"about {region.pattern}", "point": f"about {region.point_mm} mm"}
    return f"square of {region.size_mm:g} mm, {about[region.kind]}"


@torch.no_grad()
def _forward_seconds(model: Network, images: Tensor) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        model(images).sum().item()
        times.append(time.perf_counter() - start)
    return min(times)


@torch.no_grad()
def _memory_mib(model: Network, images: Tensor, batch: int, *, trains: bool) -> float:
    sizes: list[int] = []

    def count(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size())

    leaves = [layer for layer in model.modules() if not list(layer.children())]
    handles = [layer.register_forward_hook(count) for layer in leaves]
    model(images)
    for handle in handles:
        handle.remove()
    weights = sum(item.numel() * item.element_size() for item in model.parameters())
    copies = 6 if trains else 2  # source, student, teacher, gradient, two moments
    activations = sum(sizes) if trains else 2 * max(sizes)
    return (copies * weights + batch * activations) / 2**20
