"""What a run would do, before it is done: cases, regions, time and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tesla_med.models.base import Network
from tesla_med.plan import Plan
from tesla_med.prepare.stream import CaseLoader, Failure, read_ahead
from tesla_med.types import Progress


@dataclass(frozen=True)
class CaseEstimate:
    """What one case would be; ``problem`` says why it would fail."""

    case: str
    shape: tuple[int, ...] | None
    slices: int
    labelled: bool
    problem: str = ""


@dataclass(frozen=True)
class Estimate:
    """What a run would be.

    Attributes:
        cases: one entry a case.
        region: the part of the field that the model would see.
        size: pixels of a slice as the model sees it.
        seconds: about how long, from one measured forward pass.
        memory_mib: about the largest memory of networks and one batch.
    """

    cases: tuple[CaseEstimate, ...]
    region: str
    size: tuple[int, int] | None
    seconds: float
    memory_mib: float


def estimate(plan: Plan, progress: Progress = lambda *_: None) -> Estimate:
    """Read every case, time one slice on the device, and add up. Nothing is written."""
    rows: list[CaseEstimate] = []
    sample: Tensor | None = None
    for loaded in read_ahead(plan.cases, CaseLoader(plan.site, plan.pipeline, plan.card)):
        case = loaded.case
        if isinstance(loaded, Failure):
            rows.append(CaseEstimate(case.name, None, 0, case.labelled, str(loaded.error)))
        else:
            images = loaded.prepared.images if loaded.prepared is not None else None
            sample = images[:1] if images is not None else sample
            count = 0 if images is None else images.shape[0]
            rows.append(CaseEstimate(case.name, loaded.volume.shape, count, case.labelled))
        progress("reading cases", len(rows), len(plan.cases))
    if sample is None:
        return Estimate(tuple(rows), _region(plan), None, 0.0, 0.0)
    method = plan.make_method(plan.method)
    source = plan.make_method("source")
    seconds = _forward_seconds(source.model, sample.to(plan.device))
    passes = sum(method.passes(row.slices) + row.slices for row in rows if row.slices)
    batch = method.params.batch_slices or max(row.slices for row in rows)
    memory = _memory_mib(source.model, sample.to(plan.device), batch, trains=method.adapts)
    size = (int(sample.shape[2]), int(sample.shape[3]))
    return Estimate(tuple(rows), _region(plan), size, passes * seconds, memory)


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
