"""What masks show without labels: do they stay when slices are zoomed, do they agree, are they one body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tesla_med.augment.warp import as_slices, as_volumes
from tesla_med.engine.quality import class_agreement, relative
from tesla_med.models.base import Network, predicted_class
from tesla_med.tta.base import TTAMethod
from tesla_med.types import ZOOMS as ZOOMS

PART = 3
"""Slices from which on a part of a stack counts as a body of its own."""
LACKING = "lacking_{}"
REMAINDER = 0.05
"""Share of a class's pixels of which less counts as nothing."""
NOTABLE = 0.01
"""Share of the foreground from which on a class is missed."""


def zoomed_mask(method: TTAMethod, network: Network, images: Tensor, zoom: float) -> Tensor:
    """Return the mask (N, H, W) that a network finds in enlarged slices, on the grid of the slices."""
    size = [max(round(zoom * side), 1) for side in images.shape[-2:]]
    found = method.probabilities(network, _resized(images, size, antialias=zoom < 1.0).clamp_(0.0, 1.0))
    return stack(predicted_class(_resized(found, list(images.shape[-2:]))))


def stack(mask: Tensor) -> Tensor:
    """Return class indices as slices in order, (N, H, W), of slices or of one volume (1, D, H, W)."""
    return mask if mask.dim() == 3 else mask.flatten(0, 1)


def _resized(images: Tensor, size: list[int], *, antialias: bool = False) -> Tensor:
    """Return slices, or the slices of volumes, at another size."""
    volume = images.dim() == 5
    slices = as_slices(images) if volume else images
    changed = functional.interpolate(slices, size, mode="bilinear", antialias=antialias)
    return as_volumes(changed, images.shape[2:3]) if volume else changed


def consistency(
    mask: Tensor, views: Sequence[Tensor], classes: int, steadiness: tuple[float, float] = (1.0, 1.0)
) -> float:
    """Return the mean agreement of a mask with those of the zoomed slices, relative to the usual one."""
    found = [
        relative(agreement(mask, view, classes), usual) for view, usual in zip(views, steadiness, strict=True)
    ]
    return sum(found) / len(found)


def agreement(first: Tensor, second: Tensor, classes: int) -> float:
    """Return the mean Dice over foreground classes of two (N, H, W) index masks; 1 where both are empty."""
    values = [class_agreement(first, second, index) for index in range(1, classes)]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else 1.0


def stack_shape(mask: Tensor) -> dict[str, float]:
    """Return how a (N, H, W) foreground looks as a body.

    Returns:
        ``components``: their number, faces, edges or corners touching; ``largest_component``: share of
        the foreground in the largest; ``centroid_jump``: mean move of the centroid between neighbouring
        slices, in fields of view.
    """
    import numpy as np
    from scipy import ndimage

    volume = mask.cpu().numpy()
    result = {"components": 0.0, "largest_component": 0.0, "centroid_jump": 0.0}
    if not volume.any():
        return result
    labels, count = ndimage.label(volume, structure=np.ones((3, 3, 3)))
    sizes = np.bincount(labels.ravel())[1:]
    filled = np.flatnonzero(volume.any(axis=(1, 2)))
    centres = np.array([ndimage.center_of_mass(volume[index]) for index in filled]) / volume.shape[1:]
    steps = np.linalg.norm(np.diff(centres, axis=0), axis=1)[np.diff(filled) == 1]
    return {
        "components": float(count),
        "largest_component": float(sizes.max() / sizes.sum()),
        "centroid_jump": float(steps.mean()) if len(steps) else 0.0,
    }


def area_change(mask: Tensor) -> float:
    """Return how often the area of a (N, H, W) foreground rises and falls along the stack.

    Returns:
        The sum of the absolute changes of area from slice to slice over twice the largest area: 1 for a
        single rise and fall and for an empty mask, about 2 for two organs of one size above each other.
    """
    areas = functional.pad(mask.sum(dim=(1, 2)).double(), (1, 1))
    largest = float(areas.max())
    return float(areas.diff().abs().sum()) / (2.0 * largest) if largest > 0 else 1.0


def narrowing(mask: Tensor) -> float:
    """Return to what share of its area a (N, H, W) foreground narrows between two parts of the stack.

    Returns:
        The smallest ratio, over slices, of the area to that of the smaller part above and below, in [0, 1];
        1 where there are no two parts. The area of a part is its ``PART``-th largest, so that a slice or two
        in which something is missed or too much make no part.
    """
    areas = mask.sum(dim=(1, 2)).double().cpu()
    smallest = 1.0
    for index in range(PART, len(areas) - PART):
        parts = (areas[:index], areas[index + 1 :])
        wide = min(float(part.topk(PART).values[-1]) for part in parts)
        if wide > 0:
            smallest = min(smallest, float(areas[index]) / wide)
    return smallest


def compared(
    masks: Mapping[str, Tensor],
    names: tuple[str, ...],
    classes: int,
    steadiness: tuple[float, float] = (1.0, 1.0),
) -> dict[str, float]:
    """Return the signals that follow from masks: see :meth:`tesla_med.engine.guard.Guard.look`."""
    result: dict[str, float] = {}
    for name in names:
        result[f"foreground_{name}"] = float((masks[name] > 0).float().mean())
        views = [masks[f"{name}@{zoom}"] for zoom in ZOOMS]
        result[f"consistency_{name}"] = consistency(masks[name], views, classes, steadiness)
        result[f"area_change_{name}"] = area_change(masks[name] > 0)
        result[f"narrowing_{name}"] = narrowing(masks[name] > 0)
    for index, one in enumerate(names):
        for two in names[index + 1 :]:
            result[f"agreement_{one}_{two}"] = agreement(masks[one], masks[two], classes)
    return result


def lacking(
    masks: Mapping[str, Tensor], names: Sequence[str], unmoved: Sequence[str], classes: int
) -> dict[str, float]:
    """Return how many classes each mask lacks that those of the source's weights have, by ``lacking_<name>``.

    A class counts that has at least ``NOTABLE`` of the foreground in every mask of ``unmoved`` that is there,
    and a mask lacks it that has less than ``REMAINDER`` of the smallest of these. The mean Dice over classes
    does not show it: two masks that both lack a class agree on the others.

    Args:
        masks: (N, H, W) class indices by candidate.
        names: the candidates.
        unmoved: those that have the weights of the source.
        classes: their number, background included.
    """
    counts = {name: masks[name].flatten().bincount(minlength=classes)[1:classes] for name in names}
    known = [counts[name] for name in names if name in unmoved]
    if not known:
        return {}
    least = torch.stack(known).amin(dim=0)
    notable = torch.stack([count >= NOTABLE * count.sum().clamp_min(1) for count in known]).all(dim=0)
    return {
        LACKING.format(name): float((notable & (count < REMAINDER * least)).sum())
        for name, count in counts.items()
    }
