"""A memory of features, their nearest neighbours and their contrast.

AdaContrast uses them (Chen et al., Contrastive Test-Time Adaptation, CVPR 2022, where the equations and
sections of :func:`neighbour_mean` and :func:`info_nce` are from), and so does the pseudo-label refinement of
TeSLA (Tomar et al., CVPR 2023, Eq. 5 and 6). The two differ in what the memory forgets.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 2048
"""Number of features whose neighbours are looked for at once."""


class Memory:
    """Rows of several tensors, first in, first out; of all rows together or of each class separately.

    Args:
        size: number of rows that are kept; if ``balanced``, per class, which is N_Q in Eq. 6 of TeSLA.
        balanced: whether to keep ``size`` rows of each class, so that frequent classes never push a rare one
            out. The last column then holds (n, L) probabilities, and the most likely class counts.
    """

    def __init__(self, size: int, *, balanced: bool = False) -> None:
        self.size = size
        self.balanced = balanced
        self.columns: tuple[Tensor, ...] = ()

    def push(self, *columns: Tensor) -> None:
        """Add rows, each column (n, ...), and drop the oldest ones if there are too many."""
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
        """Replace the content by copies of ``columns``."""
        self.columns = tuple(column.to(device, copy=True) for column in columns)


class Refinement(Memory):
    """Refinement of pseudo-labels by nearest neighbours among earlier tiles (Eq. 6 of TeSLA).

    Args:
        neighbours: n, the number of tiles whose pseudo-labels are averaged.
        size: N_Q, the number of tiles of each class that are remembered.
    """

    def __init__(self, neighbours: int, size: int) -> None:
        super().__init__(size, balanced=True)
        self.neighbours = neighbours

    @torch.no_grad()
    def refined(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean pseudo-label (N, L) of the nearest neighbours of each tile.

        The memory takes in the batch first, so that a tile that stays in it is its own first neighbour.

        Args:
            features: (N, F), averaged over weak views.
            labels: (N, L), averaged likewise.
        """
        queries = functional.normalize(features, dim=1)
        self.push(queries, labels)
        keys, probs = self.columns
        return neighbour_mean(queries, keys, probs, self.neighbours)


def newest_of_each(labels: Tensor, classes: int, size: int) -> Tensor:
    """Return for each row (n,) whether it is among the last ``size`` of its class.

    Args:
        labels: (n,) class of each row, oldest first.
        classes: number of classes.
        size: number of rows per class.
    """
    held = functional.one_hot(labels, classes)
    newer = held.flip(0).cumsum(dim=0).flip(0).gather(1, labels[:, None])[:, 0]  # itself counted
    return newer <= size


def neighbour_mean(queries: Tensor, features: Tensor, probs: Tensor, neighbours: int) -> Tensor:
    """Return the mean probabilities (n, L) of each query's nearest neighbours by cosine (Sec. 3.2).

    Args:
        queries: (n, F) of length 1.
        features: (m, F) of length 1.
        probs: (m, L) of the same rows.
        neighbours: how many neighbours; all m if there are fewer.
    """
    count = min(neighbours, len(features))
    if not count:
        return torch.full((len(queries), probs.shape[1]), 1.0 / probs.shape[1]).to(probs)
    parts = [
        probs[(part @ features.T).topk(count, dim=1).indices].mean(dim=1)
        for part in torch.split(queries, CHUNK)
    ]
    return torch.cat(parts)


def info_nce(
    queries: Tensor, positives: Tensor, labels: Tensor, memory: tuple[Tensor, ...], temperature: float
) -> Tensor:
    """Return InfoNCE without the negatives of the same pseudo-label (Eq. 4 and 5).

    Args:
        queries: (n, F) of length 1, with gradient.
        positives: (n, F) of length 1, one key per query.
        labels: (n,) pseudo-labels of the queries.
        memory: negatives (m, F) of length 1 and their pseudo-labels (m,); empty if there are no negatives.
        temperature: the number by which cosines are divided.

    Returns:
        Scalar >= 0, and exactly 0 without negatives or without queries.
    """
    if not len(queries):
        return queries.sum()
    similarity = (queries * positives).sum(dim=1, keepdim=True)
    if memory:
        keys, key_labels = memory
        same = labels[:, None] == key_labels[None, :]
        similarity = torch.cat([similarity, (queries @ keys.T).masked_fill(same, -torch.inf)], dim=1)
    first = torch.zeros(len(queries), dtype=torch.long, device=queries.device)
    return functional.cross_entropy(similarity / temperature, first)
