"""Features of pixels and tiles: what enters the head of a network, one vector per pixel or per tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.models.base import Network


@contextmanager
def head_features(network: Network) -> Iterator[list[Tensor]]:
    """Collect what enters the head, one float32 entry per forward pass, at the size of what leaves it."""
    found: list[Tensor] = []
    parts: list[Tensor] = []
    layers = list(network.head) if isinstance(network.head, nn.ModuleList) else [network.head]

    def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        features = inputs[0].float()
        if features.shape[2:] != output.shape[2:]:
            features = functional.interpolate(features, output.shape[2:])
        parts.append(features)
        if len(parts) == len(layers):  # those of an ensemble are joined
            found.append(torch.cat(parts, dim=1) if len(parts) > 1 else parts[0])
            parts.clear()

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def in_frame_of(logits: Tensor, features: Tensor) -> Tensor:
    """Return features (N, F, *spatial) in the frame of the logits.

    Features of padded images are cropped as the logits were; those of another size are resampled.
    """
    if logits.dim() == 2:
        return features
    size = logits.shape[2:]
    inside: Any = (..., *(slice(side) for side in size))
    features = features[inside]
    return features if features.shape[2:] == size else functional.interpolate(features, size)


def rows(maps: Tensor, positions: Tensor) -> Tensor:
    """Return (N * p, K), image by image: the (N, K, *spatial) maps at the flat positions (p,).

    A tile, (N, K), has the single position 0.
    """
    count, width = maps.shape[:2]
    return maps.reshape(count, width, -1)[:, :, positions].transpose(1, 2).reshape(-1, width)


def sampled(
    logits: Tensor,
    features: Tensor,
    pixels: int,
    generator: torch.Generator,
    weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return features (P, F) and logits (P, L) of pixels that are drawn once for all slices.

    A tile counts as a single pixel.

    Args:
        logits: (N, L, *spatial).
        features: (N, F, *spatial), as they enter the head.
        pixels: the largest number of pixels per slice.
        generator: generator on the CPU.
        weight: (N, *spatial), 0 where a pixel is not to be used; None where all are.
    """
    size = logits[0, 0].numel()
    drawn = torch.randperm(size, generator=generator)[:pixels].to(logits.device)
    found, outputs = rows(in_frame_of(logits, features), drawn), rows(logits, drawn)
    if weight is None:
        return found, outputs
    kept = rows(weight.to(logits.device)[:, None], drawn)[:, 0] > 0
    return found[kept], outputs[kept]
