"""A network somewhere between two: the steps that the guard may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def between(network: nn.Module, source: nn.Module, share: float) -> Iterator[None]:
    """Put a network at ``share`` of the way from ``source`` inside the block; afterwards it is as before.

    Args:
        network: moved in place: floating-point parameters and buffers.
        source: of the same structure.
        share: 0 gives the source, 1 the network itself.
    """
    ours = [*network.parameters(), *network.buffers()]
    theirs = [*source.parameters(), *source.buffers()]
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.is_floating_point()]
    kept = [a.detach().clone() for a, _ in pairs]
    try:
        with torch.no_grad():
            for (a, b), old in zip(pairs, kept, strict=True):
                a.copy_(torch.lerp(b.to(old), old, share))
        yield
    finally:
        with torch.no_grad():
            for (a, _), old in zip(pairs, kept, strict=True):
                a.copy_(old)
