"""Features of pixels and tiles, a memory of them, their neighbours and their contrast.

For AdaContrast (Chen et al., Contrastive Test-Time Adaptation, CVPR 2022; equations and sections of
:func:`neighbour_mean` and :func:`info_nce` are from there) and for the pseudo-label refinement of TeSLA
(Tomar et al., CVPR 2023, Eq. 5 and 6). They differ in what the memory forgets.
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
    """Rows of several tensors, first in, first out; of all rows together, or of each class alone.

    Args:
        size: rows kept; where ``balanced``, of each class, N_Q in Eq. 6 of TeSLA.
        balanced: keep ``size`` rows of each class, which the last column says: (n, L) probabilities, the
            most likely class counts. A rare class is then never pushed out by frequent ones.
    """

    def __init__(self, size: int, *, balanced: bool = False) -> None:
        self.size = size
        self.balanced = balanced
        self.columns: tuple[Tensor, ...] = ()

    def push(self, *columns: Tensor) -> None:
        """Add rows; each column is (n, ...), the oldest rows go where there are too many."""
        before = self.columns or tuple(column[:0] for column in columns)
        pairs = zip(before, columns, strict=True)
        joined = tuple(torch.cat(pair).detach() for pair in pairs)
        if self.balanced:
            kept = newest_of_each(joined[-1].argmax(dim=1), joined[-1].shape[1], self.size)
            self.columns = tuple(column[kept] for column in joined)
        else:
            self.columns = tuple(column[-self.size :] for column in joined)

    def copied(self) -> tuple[Tensor, ...]:
        """Return copies of the columns."""
        return tuple(column.clone() for column in self.columns)

    def restore(self, columns: tuple[Tensor, ...], device: torch.device) -> None:
        """Take copies of ``columns`` as the content."""
        self.columns = tuple(column.to(device, copy=True) for column in columns)


def newest_of_each(labels: Tensor, classes: int, size: int) -> Tensor:
    """Return which rows (n,) are among the last ``size`` of their class.

    Args:
        labels: (n,) class of each row, oldest first.
        classes: L.
        size: rows a class.
    """
    held = functional.one_hot(labels, classes)
    newer = held.flip(0).cumsum(dim=0).flip(0).gather(1, labels[:, None])[:, 0]  # itself counted
    return newer <= size


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
