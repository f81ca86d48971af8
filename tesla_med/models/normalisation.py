"""Which statistics batch norms use, and which passes move their running statistics.

A batch norm has two sources of statistics, the batch at hand and its running averages. Everything that
changes either goes through this module, so that the state of a method is easy to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tesla_med.models.base import norm_layers


@contextmanager
def batch_statistics(model: nn.Module, *, momentum: float | None) -> Iterator[None]:
    """Normalise with the statistics of each batch inside the block.

    Args:
        model: the network, whose other layers stay as they are (dropout stays off).
        momentum: share of the batch in the running statistics, in (0, 1]; None leaves them alone.
    """
    layers = norm_layers(model)
    before = [(layer.training, layer.momentum) for layer in layers]
    for layer in layers:
        layer.train()
        layer.momentum = 0.0 if momentum is None else momentum
    try:
        yield
    finally:
        for layer, (training, old) in zip(layers, before, strict=True):
            layer.train(training)
            layer.momentum = old


Statistics = list[tuple[Tensor, Tensor]]
"""Mean and variance of each batch norm, in module order."""


@contextmanager
def mixed_with(model: nn.Module, rest: Statistics, share: float) -> Iterator[None]:
    """Mix the statistics of each batch with others, where a batch norm uses those of the batch.

    Features are normalised by ``share`` times the mean and variance of the batch plus 1 - ``share`` times
    those of ``rest`` (You et al., Test-time batch statistics calibration for covariate shift, 2021).
    Gradients take the statistics of the batch as batch norm does, and the mixture as given.

    Args:
        model: the network.
        rest: one pair a batch norm.
        share: of the batch, in [0, 1].
    """

    def mixing(mean_rest: Tensor, variance_rest: Tensor) -> Callable[..., Tensor]:
        def mix(layer: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            if not layer.training:
                return output
            axes = [0, *range(2, inputs[0].dim())]
            with torch.no_grad():
                variance, mean = torch.var_mean(inputs[0].float(), dim=axes, correction=0)
                if len(inputs) > 1 and inputs[1] is not None:  # the bias that the norm adds by itself
                    mean = mean + inputs[1]
                root = (share * variance + (1.0 - share) * variance_rest + layer.eps).sqrt()
                scale = (variance + layer.eps).sqrt() / root
                offset = (1.0 - share) * (mean - mean_rest) / root
            shift = offset
            if layer.affine:
                shift = layer.weight * offset + layer.bias * (1.0 - scale)
            shape = (1, -1, *[1] * (output.dim() - 2))
            mixed: Tensor = output * scale.to(output).view(shape) + shift.to(output).view(shape)
            return mixed

        return mix

    layers = norm_layers(model)
    pairs = zip(layers, rest, strict=True)
    handles = [layer.register_forward_hook(mixing(mean, variance)) for layer, (mean, variance) in pairs]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def running_statistics(model: nn.Module) -> Statistics:
    """Return the mean and variance of each batch norm; they are its live buffers."""
    return [
        (layer.running_mean, layer.running_var)
        for layer in norm_layers(model)
        if layer.running_mean is not None and layer.running_var is not None
    ]


def copied(statistics: Statistics) -> Statistics:
    """Return a copy of pairs of mean and variance."""
    return [(mean.detach().clone(), variance.detach().clone()) for mean, variance in statistics]


@torch.no_grad()
def blend_running_statistics(model: nn.Module, source: Statistics, share: float) -> None:
    """Set the running statistics to ``share`` times their values plus 1 - ``share`` times ``source``."""
    for (mean, variance), (mean_source, variance_source) in zip(
        running_statistics(model), source, strict=True
    ):
        mean.lerp_(mean_source, 1.0 - share)
        variance.lerp_(variance_source, 1.0 - share)


@contextmanager
def kept_running_statistics(model: nn.Module) -> Iterator[None]:
    """Restore the running statistics when the block ends."""
    saved = copied(running_statistics(model))
    counts = [layer.num_batches_tracked for layer in norm_layers(model)]
    kept_counts = [None if count is None else count.clone() for count in counts]
    try:
        yield
    finally:
        with torch.no_grad():
            for now, old in zip(running_statistics(model), saved, strict=True):
                now[0].copy_(old[0])
                now[1].copy_(old[1])
            for count, kept in zip(counts, kept_counts, strict=True):
                if count is not None and kept is not None:
                    count.copy_(kept)


def evenly_spaced(images: Tensor, limit: int) -> Tensor:
    """Return at most ``limit`` images, evenly spaced along the stack."""
    if images.shape[0] <= limit:
        return images
    index = torch.linspace(0, images.shape[0] - 1, limit).round().long().to(images.device)
    return images[index]


def statistics_distance(first: Statistics, second: Statistics) -> float:
    """Return the symmetric KL divergence of two normal distributions a channel, mean over all layers."""
    values = []
    for (mean, variance), (mean_other, variance_other) in zip(first, second, strict=True):
        one, two = variance.clamp_min(1e-8), variance_other.clamp_min(1e-8)
        spread = 0.5 * (one / two + two / one - 2.0)
        shift = 0.5 * (mean - mean_other).square() * (1.0 / one + 1.0 / two)
        values.append((spread + shift).clamp_max(1e3).mean())
    return float(torch.stack(values).mean()) if values else 0.0
