"""Passes of batches through a network, normalised by each batch's own statistics.

A method repeats a few kinds of pass thousands of times. On a CUDA device launching their kernels one
by one can take longer than running them; such a pass is captured as a CUDA graph and replayed.
"""

from __future__ import annotations

import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from tesla_med.models.base import Network, norm_layers
from tesla_med.models.normalisation import batch_statistics, kept_running_statistics
from tesla_med.tta._shared.neighbours import head_features

log = logging.getLogger(__name__)

Logits = Callable[[nn.Module, Tensor], Tensor]
Run = Callable[[Tensor], tuple[Tensor, ...]]


class _MeanTap(torch.autograd.Function):
    """The identity and the spatial mean of each channel, with one pass over memory backward."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> tuple[Tensor, Tensor]:
        ctx.pixels = features.shape[2] * features.shape[3]
        return features.view_as(features), features.mean(dim=(2, 3), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, passed: Tensor, mean: Tensor) -> Tensor:
        share = (mean / ctx.pixels).to(passed.dtype)
        gradient: Tensor = passed + share[:, :, None, None]
        return gradient


@contextmanager
def activations(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the spatial mean of each channel at the input of every batch norm, (n, C) a layer."""
    means: list[Tensor] = []

    def keep(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        passed, mean = _MeanTap.apply(inputs[0])
        means.append(mean)
        return (passed, *inputs[1:])

    handles = [layer.register_forward_pre_hook(keep) for layer in norm_layers(model)]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()


class GraphPool:
    """Memory that the graphs of one method share: they run one after the other, backward included.

    They must be captured in the order in which they run. ``waiting`` holds all back while some pass cannot be
    captured yet.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.waiting = False
        self._handle: Any = None

    def handle(self) -> Any:
        """Return the pool's identifier, made at the first call."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class NetworkPass:
    """One kind of pass: images (n, C, H, W) in [0, 1] to logits and, where asked for, activations.

    The first shape that comes twice running, with the same momentum, is captured where ``pool`` wants graphs
    and the images are on a CUDA device; others run kernel by kernel. All graphs of a pool share memory, so
    logits must be used, and backward done, before another pass of the pool; activations without gradient
    are copied out.

    Args:
        network: its running statistics move by ``momentum``.
        logits: (network, images) -> float32 logits.
        momentum: share of a batch in running statistics; None leaves them alone.
        tap: return the mean activations at the input of every batch norm too.
        features: hand out what enters the head too, by :meth:`with_features`.
        gradient: whether results need a gradient, of the images or of the network.
        pool: where graphs are kept; None: never capture.
    """

    def __init__(
        self,
        network: nn.Module,
        logits: Logits,
        *,
        momentum: float | None,
        tap: bool = False,
        features: bool = False,
        gradient: bool = False,
        pool: GraphPool | None = None,
    ) -> None:
        self.network = network
        self.momentum = momentum
        # A pass must not keep its method alive: both hold networks, and graphs their memory.
        self._logits: Callable[[], Logits | None] = (
            weakref.WeakMethod(logits) if inspect.ismethod(logits) else lambda: logits
        )
        self._tap = tap
        self._features = features
        self._gradient = gradient
        self._pool = pool
        self._channels: list[int] = []
        self._last: tuple[Any, ...] = ()
        self._captured: tuple[Any, ...] = ()
        self._replay: Run | None = None

    def __call__(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return float32 logits (n, L, H, W) and the (n, C) mean activations of each norm, or none."""
        logits, means, _ = self.with_features(images)
        return logits, means

    def with_features(self, images: Tensor) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Return logits and activations, and the features that entered the head, None if not asked for.

        Features are float32, (n, F) of tiles and (n, F, H, W) of slices.
        """
        with torch.set_grad_enabled(self._gradient):
            chosen = self._chosen(images)
            logits, *rest = chosen(images)
        if not self._gradient:  # they outlive other passes, which share the memory of a graph
            rest = [item.clone() for item in rest]
        features = rest.pop() if self._features else None
        means = list(torch.split(rest[0], self._channels, dim=1)) if rest else []
        return logits, means, features

    def _run(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return logits, then the joined activations where tapped, then the features where wanted."""
        compute = self._logits()
        assert compute is not None  # noqa: S101 - the method that owns this pass is at work
        with batch_statistics(self.network, momentum=self.momentum), ExitStack() as stack:
            means = stack.enter_context(activations(self.network)) if self._tap else []
            network = cast("Network", self.network)
            found = stack.enter_context(head_features(network)) if self._features else []
            logits = compute(self.network, images)
        self._channels = [mean.shape[1] for mean in means]
        tapped = (torch.cat(means, dim=1),) if means else ()
        return (logits, *tapped, *found[-1:])

    def _chosen(self, images: Tensor) -> Run:
        if self._pool is None or not self._pool.wanted or self._pool.waiting or not images.is_cuda:
            return self._run
        kind = (tuple(images.shape), images.requires_grad, self.momentum)  # a graph keeps the momentum
        if not self._captured and kind == self._last:
            self._capture(images)
            self._captured = kind
        self._last = kind
        return self._replay if self._replay is not None and kind == self._captured else self._run

    def _capture(self, images: Tensor) -> None:
        assert self._pool is not None  # noqa: S101 - for the type checker
        # Parameters were first seen on the stream of the capture, which autograd handles, and tells of.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        captured = _Captured(self)
        sample = images.detach().clone().requires_grad_(images.requires_grad)
        try:
            with kept_running_statistics(self.network):
                torch.cuda.make_graphed_callables(
                    captured, (sample,), allow_unused_input=True, pool=self._pool.handle()
                )
            self._replay = cast("Run", captured.forward)
            del captured.forward  # which was put there, and would keep itself and the memory alive
        except RuntimeError as error:
            log.warning("this network cannot run as a CUDA graph (%s); it runs kernel by kernel", error)
            self._pool.wanted = False


class _Captured(nn.Module):
    """A pass in the form that capture wants: a module whose parameters are the network's."""

    def __init__(self, owner: NetworkPass) -> None:
        super().__init__()
        self.network = owner.network
        self._owner = weakref.ref(owner)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        owner = self._owner()
        assert owner is not None  # noqa: S101 - it is the one that captures
        return owner._run(images)
