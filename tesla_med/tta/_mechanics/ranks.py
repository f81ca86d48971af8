"""Processes that learn from one site together, each from its share of every batch.

Batch norms use the statistics of all shares, gradients are means over all shares, and draws are the same in
every process, so that networks, teacher and policy stay equal in all of them. What they compute is what one
process computes from whole batches, but for rounding, for draws that are made for each image, and for terms
of a loss that are no means over images: the class-marginal term, and means over the pixels that count where
some are fill, are taken within each share. A method that is run by a single process, as nearly all are, never
notices this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from tesla_med.errors import AdaptationError
from tesla_med.models.base import norm_layers

PATIENCE = timedelta(minutes=3)
"""How long a process waits for the others before it gives up."""
MOST_AXES = 8
_words: list[Any] = []
"""The group, if there is one, in which processes tell each other what no device needs to know."""


def join(rank: int, count: int, meeting: Path, device: torch.device) -> None:
    """Meet the other processes; all learn together from now on, until this process ends.

    Args:
        rank: of this process, from 0.
        count: of processes.
        meeting: a file that does not exist yet, the same for all, on a disk that all see.
        device: that this process computes on.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = distributed.FileStore(str(meeting), count)  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    _words.append(distributed.new_group(backend="gloo", timeout=PATIENCE))


def joined() -> int:
    """Return how many processes learn together; 1: this one alone."""
    usable = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if usable else 1


def shares(batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the part of each batch (N, ...) that this process learns from, as long in every process.

    Where N cannot be divided, the first images come twice, so that no image is left out.

    Raises:
        AdaptationError: batches are not the same in every process, as after an image that one could not read.
    """
    count = joined()
    if count == 1:
        yield from batches
        return
    for batch in batches:
        _check_same(batch.shape)
        rows = torch.arange(distributed.get_rank(), -(-len(batch) // count) * count, count) % len(batch)
        yield batch[rows.to(batch.device, non_blocking=True)]
    _check_same(())


def _check_same(shape: Sequence[int]) -> None:
    """Compare a shape with those in other processes; () where there is no further batch."""
    ours = torch.zeros(MOST_AXES, dtype=torch.long)
    ours[: len(shape)] = torch.tensor(shape, dtype=torch.long)
    both = torch.cat([ours, -ours])
    distributed.all_reduce(both, op=distributed.ReduceOp.MAX, group=_words[0])
    if not torch.equal(both, torch.cat([ours, -ours])):
        raise AdaptationError(
            f"processes that learn together have different batches, here one of shape {tuple(shape)}; "
            "an image may have been unreadable in one of them"
        )


@torch.no_grad()
def share_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace gradients by their means over all processes."""
    count = joined()
    if count == 1:
        return
    gradients = [item.grad for item in parameters if item.grad is not None]
    flat = torch.cat([item.flatten() for item in gradients])
    distributed.all_reduce(flat)
    parts = torch.split(flat / count, [item.numel() for item in gradients])
    torch._foreach_copy_(gradients, [part.view_as(item) for part, item in zip(parts, gradients, strict=True)])


def all_agree(yes: bool) -> bool:
    """Return whether something holds in every process."""
    if joined() == 1:
        return yes
    doubts = torch.tensor(int(not yes))
    distributed.all_reduce(doubts, group=_words[0])
    return doubts.item() == 0


# ---------------------------------------------------------------- batch norm


@contextmanager
def together(model: nn.Module) -> Iterator[None]:
    """Let batch norms that use the statistics of a batch use those of all shares of it inside the block."""
    if joined() == 1:
        yield
        return
    layers = [layer for layer in norm_layers(model) if layer.training]
    for layer in layers:
        layer.forward = partial(_normalised, layer)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _normalised(layer: Any, features: Tensor, shift: Tensor | None = None) -> Tensor:
    """Normalise ``features + shift`` (N, C, ...) by the statistics of all shares, and move running ones."""
    bias, momentum = layer.bias, layer.momentum
    if shift is not None and bias is not None and torch.is_grad_enabled() and shift.requires_grad:
        bias = bias + 0.0 * shift  # batch statistics leave it no say: its gradient is zero, but it is there
    normalise: Callable[..., Tensor] = _on_cuda if features.is_cuda else _on_cpu
    output = normalise(layer, features, bias, momentum)
    if shift is not None and momentum and layer.running_mean is not None:
        layer.running_mean.data.add_(shift.detach(), alpha=momentum)
    return output


def _on_cuda(layer: Any, features: Tensor, bias: Tensor | None, momentum: float) -> Tensor:
    output: Tensor = _SharedBatchNorm.apply(features, layer.weight, bias, layer, momentum)
    return output


# Torch's stubs do not know all arguments of these.
_gather_moments: Callable[..., tuple[Tensor, Tensor]] = torch.batch_norm_gather_stats_with_counts
_normalise_backward: Callable[..., Tensor] = torch.batch_norm_backward_elemt


class _SharedBatchNorm(torch.autograd.Function):
    """Batch norm over all processes, by the kernels of torch's ``SyncBatchNorm``.

    That one waits for the device in every layer, because shares may differ there; here they never do.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor | None, bias: Tensor | None, layer: Any, momentum: float
    ) -> Tensor:
        features = _packed(features)
        moments = torch.cat(torch.batch_norm_stats(features, layer.eps))
        gathered = moments.new_empty(joined(), 2, features.shape[1])
        distributed.all_gather_into_tensor(gathered.view(-1), moments)
        counts = moments.new_full((joined(),), features.numel() // features.shape[1])
        means, deviations = gathered[:, 0].contiguous(), gathered[:, 1].contiguous()
        running = [None if item is None else item.data for item in (layer.running_mean, layer.running_var)]
        mean, deviation = _gather_moments(features, means, deviations, *running, momentum, layer.eps, counts)
        ctx.save_for_backward(features, weight, mean, deviation, counts.int())
        output: Tensor = torch.batch_norm_elemt(features, weight, bias, mean, deviation, layer.eps)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, mean, deviation, counts = ctx.saved_tensors
        gradient, needs = _packed(gradient), ctx.needs_input_grad[:3]
        *sums, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, features, mean, deviation, weight, *needs
        )
        of_features = None
        if needs[0]:
            both = torch.cat(sums)
            distributed.all_reduce(both)
            of_features = _normalise_backward(
                gradient, features, mean, deviation, weight, *both.chunk(2), counts
            )
        return of_features, of_weight, of_bias, None, None


def _packed(values: Tensor) -> Tensor:
    """Return values that lie in memory without gaps, with their channels last if they are."""
    last = torch.channels_last if values.dim() == 4 else torch.channels_last_3d
    ready = values.dim() > 3 and values.is_contiguous(memory_format=last)
    return values if ready else values.contiguous()


def _on_cpu(layer: Any, features: Tensor, bias: Tensor | None, momentum: float) -> Tensor:
    axes, shape = [0, *range(2, features.dim())], (1, -1, *[1] * (features.dim() - 2))
    count = joined() * features.numel() // features.shape[1]
    values = features.double()
    sums: Tensor = _Sum.apply(torch.stack([values.sum(axes), values.square().sum(axes)]))
    mean, square = sums[0] / count, sums[1] / count
    variance = square - mean.square()
    if momentum and layer.running_mean is not None:
        with torch.no_grad():
            layer.running_mean.data.lerp_(mean.to(layer.running_mean), momentum)
            unbiased = variance * (count / max(count - 1, 1))
            layer.running_var.data.lerp_(unbiased.to(layer.running_var), momentum)
    output: Tensor = (values - mean.view(shape)) / (variance + layer.eps).sqrt().view(shape)
    if layer.weight is not None and bias is not None:
        output = output * layer.weight.view(shape) + bias.view(shape)
    return output.to(features)


class _Sum(torch.autograd.Function):
    """The sum over all processes; so is its gradient, since each process's loss depends on it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total)
        return total
