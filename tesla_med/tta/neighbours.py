"""Features of pixels and tiles, a memory of them, their neighbours and their contrast: for AdaContrast.

Equations and sections are those of Chen et al., Contrastive Test-Time Adaptation, CVPR 2022.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.models.base import Network

CHUNK = 2048
"""Features whose neighbours are looked for at once."""


class Memory:
    """Rows of several tensors, first in, first out.

    Args:
        size: rows kept.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.columns: tuple[Tensor, ...] = ()

    def push(self, *columns: Tensor) -> None:
        """Add rows; each column is (n, ...), the oldest rows go where there are too many."""
        before = self.columns or tuple(column[:0] for column in columns)
        pairs = zip(before, columns, strict=True)
        self.columns = tuple(torch.cat(pair)[-self.size :].detach() for pair in pairs)

    def copied(self) -> tuple[Tensor, ...]:
        """Return copies of the columns."""
        return tuple(column.clone() for column in self.columns)

    def restore(self, columns: tuple[Tensor, ...], device: torch.device) -> None:
        """Take copies of ``columns`` as the content."""
        self.columns = tuple(column.to(device, copy=True) for column in columns)


@contextmanager
def head_features(network: Network) -> Iterator[list[Tensor]]:
    """Collect what enters the head, at the size of what leaves it, float32, a forward an entry."""
    found: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        features = inputs[0].float()
        if features.shape[2:] != output.shape[2:]:
            features = functional.interpolate(features, output.shape[2:])
        found.append(features)

    handle = network.head.register_forward_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def in_frame_of(logits: Tensor, features: Tensor) -> Tensor:
    """Return features (N, F, *spatial) cropped as the logits were after padding, or brought to their size."""
    if logits.dim() == 2:
        return features
    height, width = logits.shape[2:]
    features = features[..., :height, :width]
    if features.shape[2:] != logits.shape[2:]:
        features = functional.interpolate(features, (height, width))
    return features


def rows(maps: Tensor, positions: Tensor) -> Tensor:
    """Return (N * p, K): the (N, K, *spatial) maps at flat positions (p,), image by image.

    A tile, (N, K), has the one position 0.
    """
    count, width = maps.shape[:2]
    return maps.reshape(count, width, -1)[:, :, positions].transpose(1, 2).reshape(-1, width)


def neighbour_mean(queries: Tensor, features: Tensor, probs: Tensor, neighbours: int) -> Tensor:
    """Return the mean probabilities (n, L) of each query's nearest neighbours by cosine (Sec. 3.2).

    Args:
        queries: (n, F) of length 1.
        features: (m, F) of length 1.
        probs: (m, L) of the same rows.
        neighbours: how many, at most all m.
    """
    count = min(neighbours, len(features))
    parts = [
        probs[(part @ features.T).topk(count, dim=1).indices].mean(dim=1)
        for part in torch.split(queries, CHUNK)
    ]
    return torch.cat(parts)


def info_nce(
    queries: Tensor, positives: Tensor, labels: Tensor, memory: tuple[Tensor, ...], temperature: float
) -> Tensor:
    """Return InfoNCE with the negatives of the same pseudo-label left out (Eq. 4 and 5).

    Args:
        queries: (n, F) of length 1, with gradient.
        positives: (n, F) of length 1, the key of each query.
        labels: (n,) pseudo-labels of the queries.
        memory: negatives (m, F) of length 1 and their pseudo-labels (m,); empty: no negatives.
        temperature: divides the cosines.

    Returns:
        Scalar >= 0, exactly 0 without negatives.
    """
    similarity = (queries * positives).sum(dim=1, keepdim=True)
    if memory:
        keys, key_labels = memory
        same = labels[:, None] == key_labels[None, :]
        similarity = torch.cat([similarity, (queries @ keys.T).masked_fill(same, -torch.inf)], dim=1)
    first = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    return functional.cross_entropy(similarity / temperature, first)
