"""Passes of batches through a network, which is normalised by the statistics of each batch."""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tesla_med.models.base import Network, norm_layers
from tesla_med.models.normalisation import Statistics, batch_statistics, mixed_with
from tesla_med.tta._mechanics.graphs import Graph, GraphPool
from tesla_med.tta._mechanics.ranks import together
from tesla_med.tta._shared.features import head_features

Logits = Callable[[nn.Module, Tensor], Tensor]


class Output(NamedTuple):
    """What a pass returns.

    Attributes:
        logits: (n, L, *spatial) float32.
        activations: the mean activations (n, C) at the input of each batch norm; empty if not asked for.
        features: what entered the head, float32, (n, F) for tiles and (n, F, H, W) for slices; None if not
            asked for.
    """

    logits: Tensor
    activations: list[Tensor]
    features: Tensor | None


class NetworkPass:
    """One kind of pass through a network, called with images (n, C, H, W) in [0, 1] on its device.

    On a CUDA device the pass may be replayed as a graph (see ``graphs.py``). All graphs of a pool share
    memory, so logits must be used, and the backward pass done, before another pass of the pool runs; what
    is returned beside the logits without a gradient is copied out.

    Args:
        network: the network; its running statistics move by ``momentum``.
        logits: maps network and images to float32 logits.
        momentum: share of a batch in the running statistics; None leaves them alone.
        tap: whether to return the mean activations at the input of every batch norm; ``encoder``: of those of
            the encoder, where the network says what that is.
        features: whether to return what enters the head.
        gradient: whether results need a gradient, with respect to the images or to the network.
        pool: the memory of the graph; None if the pass must never be captured.
        rest: statistics that those of the batch are mixed with; None: the batch's are used alone.
        share: of the batch in that mixture.
    """

    def __init__(
        self,
        network: Network,
        logits: Logits,
        *,
        momentum: float | None,
        tap: bool | Literal["encoder"] = False,
        features: bool = False,
        gradient: bool = False,
        pool: GraphPool | None = None,
        rest: Statistics | None = None,
        share: float = 1.0,
    ) -> None:
        self.network = network
        self._mixture = None if rest is None or share == 1.0 else (rest, share)
        self.momentum = momentum
        self.gradient = gradient
        self.graph = Graph(network, pool)
        # A pass must not keep its method alive: both hold networks, and graphs hold memory.
        self._logits: Callable[[], Logits | None] = (
            weakref.WeakMethod(logits) if inspect.ismethod(logits) else lambda: logits
        )
        self._tap = tap
        self._features = features
        self._channels: list[int] = []

    def __call__(self, images: Tensor) -> Output:
        """Return logits, activations and features of the images."""
        with torch.set_grad_enabled(self.gradient):
            logits, *rest = self.graph.choose(self._run, images, self.momentum)(images)
        if not self.gradient:  # they outlive other passes, which share the memory of a graph
            rest = [item.clone() for item in rest]
        features = rest.pop() if self._features else None
        activations = list(torch.split(rest[0], self._channels, dim=1)) if rest else []
        return Output(logits, activations, features)

    def _run(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return the logits, then the joined activations if tapped, then the features if asked for."""
        compute = self._logits()
        assert compute is not None  # noqa: S101 - the method that owns this pass is at work
        with batch_statistics(self.network, momentum=self.momentum), ExitStack() as stack:
            stack.enter_context(together(self.network))
            means = stack.enter_context(activations(self.network, self._tap)) if self._tap else []
            found = stack.enter_context(head_features(self.network)) if self._features else []
            if self._mixture is not None:
                stack.enter_context(mixed_with(self.network, *self._mixture))
            logits = compute(self.network, images)
        self._channels = [mean.shape[1] for mean in means]
        tapped = (torch.cat(means, dim=1),) if means else ()
        return (logits, *tapped, *found[-1:])


@contextmanager
def activations(model: nn.Module, tap: bool | Literal["encoder"] = True) -> Iterator[list[Tensor]]:
    """Collect the spatial mean of each channel at the input of every batch norm, (n, C) per layer.

    Args:
        model: any network.
        tap: ``encoder`` asks for the layers of the encoder alone; where a network does not say what that is,
            as a classifier, everything but the head is.
    """
    means: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        passed, mean = _MeanTap.apply(inputs[0])
        means.append(mean)
        return (passed, *inputs[1:])

    parts = getattr(model, "encoder", ()) if tap == "encoder" else ()
    layers = [layer for part in parts for layer in norm_layers(part)] or norm_layers(model)
    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


class _MeanTap(torch.autograd.Function):
    """The identity and the spatial mean of each channel, with a single pass over memory backward."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> tuple[Tensor, Tensor]:
        ctx.shape = features.shape
        return features.view_as(features), features.flatten(2).mean(dim=2, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, passed: Tensor, mean: Tensor) -> Tensor:
        count, channels, *spatial = ctx.shape
        share = (mean / math.prod(spatial)).to(passed.dtype)
        gradient: Tensor = passed + share.view(count, channels, *[1] * len(spatial))
        return gradient
