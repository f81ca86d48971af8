"""CUDA graphs of passes that repeat.

A method repeats a few kinds of pass thousands of times. On a CUDA device, launching their kernels one by
one can take longer than running them; such a pass is captured as a CUDA graph once and replayed from then
on. Results are those of the kernels, so a reader who wants to understand a method can skip this module.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from tesla_med.models.normalisation import kept_running_statistics

log = logging.getLogger(__name__)

Run = Callable[[Tensor], tuple[Tensor, ...]]


class GraphPool:
    """Memory shared by the graphs of one method, which run one after the other, backward pass included.

    Graphs must be captured in the order in which they run.

    Attributes:
        wanted: whether passes are captured at all.
        waiting: holds all captures back while some pass cannot be captured yet.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.waiting = False
        self._handle: Any = None

    def handle(self) -> Any:
        """Return the identifier of the pool, which is made at the first call."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


class Graph:
    """The graph of one kind of pass, once one has been captured.

    The first shape that comes twice in a row, with the same momentum, is captured if ``pool`` wants graphs
    and the images are on a CUDA device. Everything else runs kernel by kernel.

    Args:
        network: the network that the pass goes through.
        pool: the memory of the graph; None if the pass must never be captured.
    """

    def __init__(self, network: nn.Module, pool: GraphPool | None) -> None:
        self.pool = pool
        self._network = network
        self._last: tuple[Any, ...] = ()
        self._captured: tuple[Any, ...] = ()
        self._replay: Run | None = None

    @property
    def captured(self) -> bool:
        """Whether the pass has been captured."""
        return self._replay is not None

    def choose(self, run: Run, images: Tensor, momentum: float | None) -> Run:
        """Return what to call on ``images``: ``run`` itself, or its replay if images like these have one.

        Args:
            run: the pass, a bound method.
            images: (n, C, H, W).
            momentum: of the running statistics, which a graph keeps as it was at capture.
        """
        if self.pool is None or not self.pool.wanted or self.pool.waiting or not images.is_cuda:
            return run
        kind = (tuple(images.shape), images.requires_grad, momentum)
        if not self._captured and kind == self._last:
            self._capture(run, images, self.pool)
            self._captured = kind
        self._last = kind
        return self._replay if self._replay is not None and kind == self._captured else run

    def _capture(self, run: Run, images: Tensor, pool: GraphPool) -> None:
        # Parameters were first seen on the stream of the capture, which autograd handles, and tells of.
        warnings.filterwarnings("ignore", message="The AccumulateGrad node's stream does not match")
        captured = _Captured(self._network, run)
        sample = images.detach().clone().requires_grad_(images.requires_grad)
        try:
            with kept_running_statistics(self._network):
                torch.cuda.make_graphed_callables(
                    captured, (sample,), allow_unused_input=True, pool=pool.handle()
                )
            self._replay = cast("Run", captured.forward)
            del captured.forward  # it was assigned by the capture, and would keep itself and its memory alive
        except RuntimeError as error:
            log.warning("this network cannot run as a CUDA graph (%s); it runs kernel by kernel", error)
            pool.wanted = False


class _Captured(nn.Module):
    """A pass in the form that a capture needs: a module whose parameters are those of the network.

    It refers to the pass weakly, because the pass owns the graph and with it this module.
    """

    def __init__(self, network: nn.Module, run: Run) -> None:
        super().__init__()
        self.network = network
        self._run = weakref.WeakMethod(run)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        run = self._run()
        assert run is not None  # noqa: S101 - its owner is the one that captures
        result: tuple[Tensor, ...] = run(images)
        return result
