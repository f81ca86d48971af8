"""What run.json says of a run beside its cases: what a reader needs to judge and repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tesla_med.models.base import device_name
from tesla_med.models.checkpoint import versions
from tesla_med.tta.base import METHODS

if TYPE_CHECKING:
    from tesla_med.plan import Plan

NOT_A_DEVICE = "Not a medical device: for research use only."


def manifest_of(plan: Plan, results: Sequence[Any] = ()) -> dict[str, Any]:
    """Return the manifest of a run, with what became of its items."""
    params = plan.params(plan.method).model_dump(mode="json")
    about = {"name": plan.method, "citation": METHODS.get(plan.method).citation, "parameters": params}
    return {
        "notice": NOT_A_DEVICE,
        "terms": plan.site.terms,
        "versions": versions(),
        "device": device_name(plan.device),
        "weights": plan.weights.name,
        "weights_sha256": plan.weights_sha256,
        "statistics": None if plan.statistics is None else plan.statistics.record(),
        "seed": plan.seed,
        "method": about,
        "protocol": plan.protocol,
        "reset": plan.reset,
        "notes": list(plan.notes),
        **plan.task.account(plan.items, results),
    }
