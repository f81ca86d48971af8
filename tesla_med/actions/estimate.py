"""What a run would do, before it is done: items, regions, time and memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tesla_med.actions.describing import describe
from tesla_med.actions.forecast import NOTHING, Forecast, Sample, forecast, read_timed
from tesla_med.actions.usage import resident
from tesla_med.plan import Plan
from tesla_med.prepare.stream import named_error
from tesla_med.types import Failure, ItemEstimate, Progress, Unit


@dataclass(frozen=True)
class Estimate:
    """What a run would be.

    Attributes:
        cases: one entry per item.
        region: the part of the field that the model would see.
        size: pixels of an image as the model sees it.
        forecast: time and memory.
        units: how many units go through the network.
        batch: images in a batch.
        model: what was understood of it, in words by heading.
    """

    cases: tuple[ItemEstimate, ...]
    region: str
    size: tuple[int, ...] | None
    forecast: Forecast
    units: int = 0
    batch: int = 0
    model: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> int:
        """Number of items that would fail."""
        return sum(bool(item.problem) for item in self.cases)


def estimate(plan: Plan, progress: Progress = lambda *_: None) -> Estimate:
    """Read every unit, measure a few passes, and add up. Nothing is written."""
    rows: list[ItemEstimate] = []
    task, base, sample = plan.task, resident(), Sample(plan)
    for loaded, seconds in read_timed(plan, plan.refs):
        unit = loaded if isinstance(loaded, Unit) else None
        failed = loaded.error if isinstance(loaded, Failure) else None
        problem = "" if failed is None else str(named_error(task.named(loaded.ref), failed))
        if unit is not None:
            sample.add(unit, seconds)
        rows += task.expected(loaded.ref, unit, problem)
        progress(f"reading {task.item}s", len(rows), len(plan.items.names))
    order = {name: index for index, name in enumerate(plan.items.names)}
    rows.sort(key=lambda row: order[row.case])
    images = sample.images
    if images is None:
        return Estimate(tuple(rows), _region(plan), None, NOTHING, len(plan.refs), model=describe(plan))
    shape = tuple(int(side) for side in images.shape[2:])
    batch = plan.params(plan.method).batch_slices or len(images)
    found = forecast(plan, sample, base, units=len(sample.counts), progress=progress)
    return Estimate(tuple(rows), _region(plan), shape, found, len(plan.refs), batch, describe(plan))


def _region(plan: Plan) -> str:
    region = plan.site.region
    if region.kind == "whole":
        return "whole field"
    about = {"square": "centred", "mask": f"about {region.pattern}", "point": f"about {region.point_mm} mm"}
    return f"square of {region.size_mm:g} mm, {about[region.kind]}"
