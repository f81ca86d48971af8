"""How long a run will take and how much memory it will need, from a few passes that are measured here.

The passes are those of this network, on this device and with the batches of this run, made by copies of
source and method that are thrown away afterwards: results do not depend on whether a run was forecast.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from tesla_med.actions.usage import Peak, highest, release, resident
from tesla_med.engine.guard import MAX_SLICES
from tesla_med.engine.memory import free_device_memory
from tesla_med.engine.signals import ZOOMS
from tesla_med.models.base import norm_layers
from tesla_med.plan import Plan
from tesla_med.prepare.stream import SLICE_CACHE_BYTES, read_ahead
from tesla_med.tta._mechanics.patches import drawn_patches
from tesla_med.tta.base import TTAMethod
from tesla_med.types import Failure, Progress, Ref, Unit

SHARE = 0.04
"""Share of the images that a run sees which are spent on measuring a pass, if that is less than a batch."""
SHORT_SECONDS = 5.0
"""A run that will be shorter, going by a single pass, is not measured any further."""
QUICK_SECONDS = 3.0
"""A pass or an update that takes less is timed again."""
LONG_SECONDS = 300.0
"""Of a run that will be longer it is said what would be faster."""
LATER_BYTES = 280 << 20
"""Libraries for scores, figures and reports, loaded when they are needed, and what allocators hold back."""
REPORT_BYTES = 60 << 20
"""The libraries among these that measuring has not loaded."""
START_SECONDS = 3.0
"""Loading these libraries, and making the reports."""
VOXEL_SECONDS = 1e-6
"""Restoring, scoring and writing, for each voxel of an item's own grid and each class."""


@dataclass(frozen=True)
class Forecast:
    """What a run would take.

    Attributes:
        seconds: in all.
        seconds_per_unit: of one unit, its share of passes over the site included.
        memory_mib: highest memory of the process.
        device_memory_mib: of tensors on the GPU; None without one.
        faster: what would be faster, with the seconds per unit if they are known; none for a short run.
    """

    seconds: float
    seconds_per_unit: float
    memory_mib: float
    device_memory_mib: float | None = None
    faster: tuple[tuple[str, float | None], ...] = ()


NOTHING = Forecast(0.0, 0.0, 0.0)
"""Where no unit can be read."""


class Sample:
    """Figures of some units, which stand for all, and the images of the largest."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.images: Tensor | None = None
        self.counts: list[int] = []
        self._voxels: list[int] = []
        self._seconds: list[float] = []
        self.scalings = 0

    def add(self, unit: Unit, seconds: float) -> None:
        """Add a unit that was read in so many seconds; one without images tells nothing."""
        images = unit.images
        if images is None:
            return
        if self.images is None or len(images) > len(self.images):
            self.images = images
        shapes = [item.shape for item in self.plan.task.expected(unit.ref, unit, "") if item.shape]
        self.counts.append(len(images))
        self._voxels.append(sum(torch.Size(shape).numel() for shape in shapes))
        self._seconds.append(seconds)
        self.scalings = max(self.scalings, len(unit.scalings))

    @property
    def voxels(self) -> float:
        """Mean number of voxels of a unit, on its own grid."""
        return fmean(self._voxels)

    @property
    def seconds(self) -> float:
        """Mean time of reading a unit."""
        return fmean(self._seconds)

    def mean(self, passes: Callable[[int], float]) -> float:
        """Return the mean over units of what depends on the number of images."""
        return fmean(map(passes, self.counts))


def read_timed(plan: Plan, refs: Sequence[Ref]) -> Iterator[tuple[Unit | Failure, float]]:
    """Yield units as they are read, with the seconds that one had to wait."""
    start = time.perf_counter()
    for loaded in read_ahead(refs, plan.task.load, plan.task.ahead):
        yield loaded, time.perf_counter() - start
        start = time.perf_counter()


def few_of(plan: Plan) -> Sample:
    """Read the first unit, and of many a few more.

    It is read twice if others follow it, because the first time libraries are loaded.
    """
    sample, refs = Sample(plan), plan.refs
    for part in (refs[:: max(len(refs) // 3, 8)], refs[1:4]):
        first = refs[:1] if len(refs) > 1 else ()
        for number, (loaded, seconds) in enumerate(read_timed(plan, [*first, *part])):
            if isinstance(loaded, Unit) and number >= len(first):
                sample.add(loaded, seconds)
        if sample.counts:
            break
    return sample


def forecast(
    plan: Plan,
    sample: Sample,
    base: int,
    *,
    units: float | None = None,
    passes: float = 1.0,
    progress: Progress = lambda *_: None,
) -> Forecast:
    """Measure a few passes and add up what the recipe makes of them. Nothing is written.

    Args:
        plan: of the run.
        sample: units that were read; at least one with images.
        base: bytes of the process when the plan was made.
        units: how many are to be done; default: all.
        passes: share of the passes over the site that is to be done.
        progress: called as the measuring goes on.
    """
    count = len(plan.refs) if units is None else units
    devices = [plan.device] if plan.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        meter = _Meter(plan, sample, count, progress)
    found = meter.forecast(count, passes, base)
    devices_at_once = getattr(plan.elsewhere, "devices", 1)
    found = replace(found, seconds=START_SECONDS + (found.seconds - START_SECONDS) / devices_at_once)
    thorough = meter.thorough
    del meter
    if thorough:  # a method and its passes refer to each other; looking for such cycles takes half a second
        gc.collect()
    free_device_memory()
    return found


class _Meter:
    """Seconds and bytes of an image in a pass of a prediction, and in one of an update.

    Attributes:
        thorough: whether the run is long enough for more than a single pass.
    """

    def __init__(self, plan: Plan, sample: Sample, units: float, progress: Progress) -> None:
        assert sample.images is not None  # noqa: S101 - as the callers see to
        self.plan, self.sample, self.images = plan, sample, sample.images
        self.predictor = plan.make_predictor(lambda *_: None)
        self.method = method = self.predictor.method
        looked, learned = sample.mean(self.predictor.passes), sample.mean(method.learning_passes)
        progress("measuring", 0, 3)
        self._look(self.images[:1])  # warms up
        self.looking, self.look_bytes = self._timed(lambda: self._look(self.images[:1]))
        self.learning, self.learn_bytes = self.looking, self.look_bytes
        progress("measuring", 1, 3)
        self.thorough = units * self.looking * (looked + learned) >= SHORT_SECONDS
        if not self.thorough:
            return
        count = self._few(units * looked, min(plan.pipeline.predict_batch, len(self.images)))
        seconds, grown = self._timed(lambda: self._look(self.images[:count]))
        self.looking, self.look_bytes = seconds / count, grown / count
        progress("measuring", 2, 3)
        if method.adapts:
            self._measure_update(self._few(units * sample.mean(method.slices_seen), self.batch))
        progress("measuring", 3, 3)

    @property
    def batch(self) -> int:
        """Images of an update."""
        return int(self.method.params.batch_slices or len(self.images))

    def _few(self, seen: float, most: int) -> int:
        return min(most, max(2, self.plan.task.smallest_batch, round(SHARE * seen)))

    def _look(self, images: Tensor) -> None:
        self.predictor.source.probabilities(self.predictor.source.model, images)

    def _timed(self, work: Callable[[], object], *, repeats: int = 2) -> tuple[float, float]:
        """Return the seconds that some work takes, and the bytes that it needs on top of what is there.

        Quick work is repeated, because memory that is used again is faster.
        """
        found: list[tuple[float, float]] = []
        while len(found) < repeats and (not found or found[-1][0] < QUICK_SECONDS):
            with Peak(self.plan.device) as peak:
                start = time.perf_counter()
                work()
                if self.plan.device.type == "cuda":
                    torch.cuda.synchronize(self.plan.device)
                seconds = time.perf_counter() - start
            found.append((seconds, float(peak.grown)))
        return min(found)[0], max(grown for _, grown in found)

    def _measure_update(self, count: int) -> None:
        """Time an update on so many images; where one is a whole search, a pass with its backward pass."""
        method, each = self.method, self.method.passes_per_update()

        def update(images: Tensor) -> None:
            if each:
                method.start_epoch(0, iter((images,)))
                method.adapt(images)
            else:
                leaf = method.to_device(images).clone().requires_grad_(True)
                method.logits(method.model, leaf).sum().backward()  # type: ignore[no-untyped-call]

        images = self.images[torch.arange(count) % len(self.images)]
        if method.patch is not None:
            images = drawn_patches(self.images, method.patch, count, None, torch.Generator().manual_seed(0))
        update(images[: self._few(0, count)])  # warms up, makes gradients and moments
        repeats = 4 if self.plan.device.type == "cuda" else 2  # graphs are captured on the way
        seconds, grown = self._timed(lambda: update(images), repeats=repeats)
        self.learning, self.learn_bytes = seconds / (count * (each or 3)), grown / count

    # ------------------------------------------------------------ adding up

    def forecast(self, units: float, passes: float, base: int) -> Forecast:
        """Return what so many units and this share of the passes over the site take."""
        sample, method = self.sample, self.method
        learn = sample.mean(method.learning_passes) * self.learning * passes if method.adapts else 0.0
        rest = sample.mean(self.predictor.passes) * self.looking + sample.seconds
        rest += VOXEL_SECONDS * sample.voxels * len(self.plan.pipeline.classes)
        seconds = START_SECONDS + units * (learn + rest)
        cuda = self.plan.device.type == "cuda"
        held, copies, work = self._held(units), self._copies(), self._work()
        release()
        libraries = max(base + LATER_BYTES, resident() - copies + REPORT_BYTES)
        host = resident() + LATER_BYTES + held if cuda else libraries + held + copies + work
        return Forecast(
            seconds,
            learn + rest,
            max(host, highest()) / 2**20,
            (copies + work) / 2**20 if cuda else None,
            self._faster(learn, rest) if seconds > LONG_SECONDS else (),
        )

    def _copies(self) -> int:
        """Return the bytes of every copy of the networks, gradients and moments included."""
        source = _size(self.predictor.source.model.state_dict())
        if not self.method.adapts:
            return 3 * source  # the model, its first state, what is saved
        modules, moments = _size(_states(self.method)), _size(_moments(self.method))
        carried = 0 if self.plan.reset == "case" else modules + moments
        return 4 * source + 2 * modules + moments + _size(_learned(self.method)) + carried

    def _work(self) -> float:
        """Return the bytes of the largest pass: an update, or a prediction beside what is compared."""
        count, method, guard = len(self.images), self.method, self.predictor.guard
        largest = float(min(self.plan.pipeline.predict_batch, count))
        kept = 12 * len(self.plan.pipeline.classes)  # probabilities of source, adapted and a candidate
        if guard is not None:
            largest = max(largest * max(ZOOMS) ** 2, min(count, MAX_SLICES))
            kept += 8 * len(guard.candidates) * (1 + len(ZOOMS))
        elif method.adapts and method.predicting_passes(count) > count:
            largest = max(largest, min(count, getattr(method.params, "max_slices", 1)))
        pixels = self.images[:, 0].numel()
        return max(self.batch * self.learn_bytes, largest * self.look_bytes + kept * pixels)

    def _held(self, units: float) -> float:
        """Return the bytes of units that were read: at work, read ahead, kept between passes."""
        images, sample = self.images.numel() * self.images.element_size(), self.sample
        found = (1 + self.plan.task.ahead) * ((1 + sample.scalings) * images + 4 * sample.voxels)
        kept = 0.0 if self.predictor.driver.case_by_case else min(units * images, SLICE_CACHE_BYTES)
        return found + kept

    def _faster(self, learn: float, rest: float) -> tuple[tuple[str, float | None], ...]:
        """Return what would be faster, with the seconds per unit."""
        plan, params = self.plan, self.method.params
        found: list[tuple[str, float | None]] = []
        if plan.device.type == "cpu":
            found.append(("a GPU (--device cuda)", None))
        if not self.method.adapts:
            return tuple(found)
        updates = params.updates_per_case if params.draw == "replacement" else None
        for name, value in (("updates_per_case", updates), ("epochs", params.epochs)):
            if value is not None and value > 1:
                fewer = value // 2
                text = f"fewer updates (--set protocols.{plan.protocol}.{plan.method}.{name}={fewer})"
                found.append((text, learn * fewer / value + rest))
        if plan.method != "bn" and norm_layers(self.method.model):
            found.append(
                ("normalisation statistics alone (--method bn)", rest + self.looking * len(self.images))
            )
        return tuple(found)


def _size(state: Any) -> int:
    """Return the bytes of all tensors in nested mappings and sequences."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(map(_size, state.values()))
    return sum(map(_size, state)) if isinstance(state, list | tuple) else 0


def _states(method: TTAMethod) -> list[Any]:
    return [module.state_dict() for module in method.modules().values()]


def _moments(method: TTAMethod) -> list[Any]:
    return [item.state_dict()["state"] for item in method.optimizers().values()]


def _learned(method: TTAMethod) -> list[Tensor]:
    return [item for part in method.modules().values() for item in part.parameters() if item.requires_grad]
