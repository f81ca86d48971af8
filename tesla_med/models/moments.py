"""Moments of the features of a network, which is what methods of the Y protocols know of the source.

Features are what enters the head of the network, one vector per pixel or per tile. Sums are kept in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.errors import CheckpointError, DataError
from tesla_med.models.base import Network

PIXELS_PER_SLICE = 16384


@dataclass(frozen=True)
class SourceStatistics:
    """Moments of D source features in L classes, float32 on the CPU.

    Attributes:
        mean: (D,) over all pixels.
        covariance: (D, D), divided by the number of pixels.
        class_mean: (L, D) by reference class; zeros for a class without pixels.
        class_covariance: (L, D, D); zeros for a class without pixels.
        class_pixels: (L,) int64, number of pixels used of each class.
        class_ratio: (L,) share of each class among the pixels; the shares sum to 1.
    """

    mean: Tensor
    covariance: Tensor
    class_mean: Tensor
    class_covariance: Tensor
    class_pixels: Tensor
    class_ratio: Tensor


class _Moments:
    """Running sums of the features per class, from which those of all features follow."""

    def __init__(self, classes: int, features: int, device: torch.device) -> None:
        self.count = torch.zeros(classes, dtype=torch.float64, device=device)
        self.total = torch.zeros(classes, features, dtype=torch.float64, device=device)
        self.square = torch.zeros(classes, features, features, dtype=torch.float64, device=device)
        self.origin = self.total[0].clone()

    def add(self, vectors: Tensor, labels: Tensor) -> None:
        """Add (P, D) vectors with (P,) class indices."""
        exact = vectors.double()
        if not self.count.any():  # sums about a nearby point lose fewer digits
            self.origin = exact.mean(dim=0)
        exact = exact - self.origin
        for index in range(len(self.count)):
            part = exact[labels == index]
            self.count[index] += len(part)
            self.total[index] += part.sum(dim=0)
            self.square[index] += part.T @ part

    def result(self) -> SourceStatistics:
        """Return means and covariances."""
        mean, covariance = _mean_and_covariance(self.count.sum(), self.total.sum(0), self.square.sum(0))
        class_mean, class_covariance = _mean_and_covariance(self.count, self.total, self.square)
        seen = self.count > 0
        class_mean = torch.where(seen[:, None], class_mean + self.origin, 0.0)
        return SourceStatistics(
            mean=(mean + self.origin).float().cpu(),
            covariance=covariance.float().cpu(),
            class_mean=class_mean.float().cpu(),
            class_covariance=class_covariance.float().cpu(),
            class_pixels=self.count.long().cpu(),
            class_ratio=(self.count / self.count.sum()).float().cpu(),
        )


def _mean_and_covariance(count: Tensor, total: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    known = count.clamp_min(1)
    mean = total / known[..., None]
    return mean, square / known[..., None, None] - mean[..., :, None] * mean[..., None, :]


@torch.no_grad()
def source_statistics(
    model: Network,
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: int,
    *,
    pixels_per_slice: int | None = PIXELS_PER_SLICE,
    generator: torch.Generator | None = None,
) -> SourceStatistics:
    """Measure the features at the input of ``model.head``, in eval mode.

    Args:
        model: the network, on its device; its mode is restored afterwards.
        batches: images (N, C, *spatial) float32 in the model's range, with class indices (N, *spatial) of
            pixels or (N,) of tiles.
        classes: number of classes.
        pixels_per_slice: largest number of pixels of each slice, drawn without replacement; None takes all.
        generator: generator of the draw, on the CPU; seeded with 0 if not given.

    Raises:
        DataError: no batch came.
        CheckpointError: what enters the head is not (N, D, *spatial), or (N, D) in a tile classifier.
    """
    generator = generator or torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    caught: list[Tensor] = []
    layers = list(model.head) if isinstance(model.head, nn.ModuleList) else [model.head]
    hooks = [layer.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0])) for layer in layers]
    training = model.training
    model.eval()
    moments: _Moments | None = None
    try:
        for images, labels in batches:
            caught.clear()
            model(images.to(device))
            features = _feature_map(caught, labels.dim(), len(layers))
            moments = moments or _Moments(classes, features.shape[1], device)
            if labels.dim() == 1:
                moments.add(features.flatten(1), labels.to(device))
                continue
            for vectors, targets in _pixels(features, labels.to(device), images.shape[2:]):
                kept = _subset(len(targets), pixels_per_slice, generator).to(device)
                moments.add(vectors[kept], targets[kept])
    finally:
        for hook in hooks:
            hook.remove()
        model.train(training)
    if moments is None:
        raise DataError("source statistics need at least one labelled slice, got none")
    return moments.result()


def _feature_map(caught: list[Tensor], label_axes: int, heads: int) -> Tensor:
    """Return the features (N, D, *spatial), those of an ensemble joined; a tile has a single pixel."""
    found = torch.cat(caught[-heads:], dim=1) if caught else None
    shape = "nothing" if found is None else tuple(found.shape)
    if found is not None and label_axes == 1 and found.dim() == 2:
        return found[:, :, None, None]
    if found is None or label_axes == 1 or found.dim() != label_axes + 1:
        wanted = {1: "(N, D)", 3: "(N, D, h, w)"}.get(label_axes, "(N, D, d, h, w)")
        raise CheckpointError(f"the head's input should be {wanted} features, got {shape}")
    return found


def _pixels(features: Tensor, labels: Tensor, size: Sequence[int]) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield for each slice (P, D) vectors and (P,) labels.

    Padding is cropped off the features; if they are coarser than the labels, the labels are resampled.
    """
    if all(have >= side for have, side in zip(features.shape[2:], size, strict=True)):
        inside: Any = (..., *(slice(side) for side in size))
        features = features[inside]
    else:
        labels = functional.interpolate(labels[:, None].float(), features.shape[2:])[:, 0].long()
    for feature, target in zip(features, labels, strict=True):
        yield feature.flatten(1).T, target.flatten().long()


def _subset(count: int, limit: int | None, generator: torch.Generator) -> Tensor:
    if limit is None or count <= limit:
        return torch.arange(count)
    return torch.randperm(count, generator=generator)[:limit]
