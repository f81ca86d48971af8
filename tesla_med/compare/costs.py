"""What the cells of a comparison cost: seconds, passes of the network, memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tesla_med.compare.cells import Cell
from tesla_med.compare.figures import Cost
from tesla_med.compare.statistics import Key
from tesla_med.engine.memory import free_device_memory
from tesla_med.plan import Plan
from tesla_med.records import SiteResult


def costs_of(cells: Sequence[Cell], known: Mapping[str, Mapping[str, Any]]) -> dict[Key, Cost]:
    """Return the time and passes per slice and the memory of every row that has run.

    Args:
        cells: the cells of the comparison.
        known: what was noted of each cell that was run, by its name.
    """
    found: dict[Key, Cost] = {}
    for key in dict.fromkeys(cell.key for cell in cells):
        mine = [known.get(cell.name, {}) for cell in cells if cell.key == key]
        ready = [entry for entry in mine if entry.get("complete") and entry.get("slices")]
        if ready:
            slices = sum(entry["slices"] for entry in ready)
            seconds = sum(entry["seconds"] for entry in ready) / slices
            memory = [entry["peak_memory_mib"] for entry in ready if entry["peak_memory_mib"] is not None]
            passes = [entry.get("passes") for entry in ready]
            known_passes = [item for item in passes if item is not None]
            share = sum(known_passes) / slices if len(known_passes) == len(ready) else None
            found[key] = Cost(seconds, max(memory, default=None), share)
    return found


class Watch:
    """Seconds and the device's highest memory from now on; on the CPU memory is not measured."""

    def __init__(self, device: str) -> None:
        import torch

        free_device_memory()
        self.start = time.perf_counter()
        self.cuda = device != "cpu" and torch.cuda.is_available()
        self.device = device if ":" in device else None
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def read(self, before: float = 0.0) -> dict[str, float | None]:
        """Return ``seconds``, with those of earlier calls ``before``, and ``peak_memory_mib``."""
        import torch

        memory = torch.cuda.max_memory_allocated(self.device) / 2**20 if self.cuda else None
        return {"seconds": before + time.perf_counter() - self.start, "peak_memory_mib": memory}


def passes_of(plan: Plan, result: SiteResult) -> float:
    """Return the single-slice forward passes of a finished run, about; a backward pass counts as two.

    It is what the recipe makes of the number of slices (tiles) of each unit: predictions of the unadapted
    and of the adapted model, updates, and what judges them. Items without a result count nothing.

    Args:
        plan: of the run.
        result: what came of it.
    """
    predictor = plan.make_predictor(lambda *_: None)
    method = predictor.method
    slices = {item.case: getattr(item, "slices", 1) for item in result.results if item.status != "failed"}
    counts = [sum(slices.get(name, 0) for name in ref.items) for ref in plan.refs]
    learned = method.learning_passes if method.adapts else lambda _: 0.0
    return float(sum(predictor.passes(count) + learned(count) for count in counts if count))
