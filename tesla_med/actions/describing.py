"""What was understood of a model, in words: network, images, classes, what will be adapted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from tesla_med.models.base import norm_layers, parameter_count
from tesla_med.scoring.text import counted

if TYPE_CHECKING:
    from tesla_med.plan import Plan

NORMS = {"BatchNorm": "batch norm", "InstanceNorm": "instance norm", "GroupNorm": "group norm"}


def describe(plan: Plan) -> dict[str, str]:
    """Return what is known of the model of a run, by headings.

    Raises:
        AdaptationError: the method cannot adapt this model.
    """
    pipeline = plan.pipeline
    classes = ", ".join(f"{item.value} {item.name}" for item in pipeline.classes)
    how = "overlapping regions, painted in this order" if pipeline.regions else "one for each voxel"
    found = {
        "network": _network(plan),
        "images": _images(plan),
        "classes": classes if pipeline.whole_images else f"{classes} ({how})",
        "adapted": _adapted(plan),
    }
    return {name: text for name, text in found.items() if text}


def _network(plan: Plan) -> str:
    model, params = plan.model, plan.pipeline.model.params
    kind = str(params.get("kind") or params.get("class_name") or plan.pipeline.model.name)
    folds = f"{counted(int(params['folds']), 'fold')}, " if "folds" in params else ""
    return f"{kind}, {folds}{parameter_count(model)} parameters, {_norms(model)}"


def _norms(model: nn.Module) -> str:
    kinds = {kind.__name__ for layer in model.modules() for kind in type(layer).__mro__}
    names = [text for name, text in NORMS.items() if any(kind.startswith(name) for kind in kinds)]
    running = " with running statistics" if norm_layers(model) else ""
    return (" and ".join(names) or "no norm layers") + running


def _images(plan: Plan) -> str:
    pipeline = plan.pipeline
    size = "x".join
    parts = [counted(pipeline.channels, "channel")]
    plans = pipeline.preprocessing.nnunet
    if plans is not None:
        schemes = [
            item.scheme + (" inside the nonzero part" if item.masked else "") for item in plans.channels
        ]
        parts[0] += f" ({', '.join(schemes)})"
        parts += ["volumes" if plans.dimensions == 3 else "slices"]
        parts += [f"spacing {size(f'{step:g}' for step in plans.spacing)} mm"]
        if plans.transpose != (0, 1, 2):
            parts += [f"axes (z, y, x) in the order {plans.transpose}"]
    elif pipeline.preprocessing.size is not None:
        parts += [f"resized to {size(map(str, pipeline.preprocessing.size))} pixels"]
    if plan.model.patch is not None:
        mirror = len(plan.pipeline.model.params.get("mirror", ()))
        axes = "all" if mirror == len(plan.model.patch) else mirror
        also = f", mirrored over {axes} axes" if mirror else ""
        parts += [f"patches of {size(map(str, plan.model.patch))}{also}"]
    return "; ".join(parts)


def _adapted(plan: Plan) -> str:
    method = plan.make_method(plan.method)
    if not method.adapts:
        return ""
    learning = sum(item.numel() for item in method.model.parameters() if item.requires_grad)
    share = 100 * learning / max(parameter_count(method.model), 1)
    return f"{learning} of {parameter_count(method.model)} parameters ({share:.0f} %) by {plan.method}"
