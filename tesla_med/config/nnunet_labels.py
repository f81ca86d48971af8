"""What dataset.json of an nnU-Net v2 folder says of labels and regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.errors import CheckpointError


def classes_of(
    path: Path, labels: Mapping[str, Any], order: Sequence[int] | None
) -> tuple[list[dict[str, Any]], bool]:
    """Return the classes in the order of the network's outputs, and whether they are overlapping regions."""
    if labels.get("background") != 0:
        first = " (labels by value are those of nnU-Net v1)" if "0" in labels else ""
        raise CheckpointError(
            f"{path}: dataset.json has no label 'background' of the number 0 but "
            f"{dict(list(labels.items())[:4])}{first}"
        )
    parts = {name: value for name, value in labels.items() if name not in ("background", "ignore")}
    parts = {name: value for name, value in parts.items() if value not in (0, [0])}
    background = {"value": 0, "name": "background", "color": "#000000"}
    regions = any(isinstance(value, list) and len(value) > 1 for value in parts.values())
    if regions:
        if order is None or len(order) != len(parts):
            raise CheckpointError(
                f"{path}: dataset.json has {len(parts)} regions and regions_class_order {order}"
            )
        if len(set(order)) < len(order):
            raise CheckpointError(f"{path}: regions_class_order {order} paints regions with the same value")
        named = list(zip(parts, (int(value) for value in order), strict=True))
    else:
        values = {name: int(value[0] if isinstance(value, list) else value) for name, value in parts.items()}
        named = sorted(values.items(), key=lambda item: item[1])
        if [value for _, value in named] != list(range(1, len(named) + 1)):
            raise CheckpointError(f"{path}: labels {sorted(values.values())} are not 1 to {len(named)}")
    colours = ("#e6550d", "#3182bd", "#31a354", "#756bb1", "#fdae6b", "#9ecae1", "#a1d99b", "#bcbddc")
    foreground = [
        {"value": value, "name": name, "color": colours[index % len(colours)]}
        for index, (name, value) in enumerate(named)
    ]
    return [background, *foreground], regions
