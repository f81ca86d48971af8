"""One network that learns from its own predictions and predicts: what Tent, pseudo-labels and SHOT share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med.errors import AdaptationError
from tesla_med.models.base import Network
from tesla_med.tta._shared.passes import GraphPool, NetworkPass
from tesla_med.tta.base import MethodParams, Scalars, TTAMethod

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
"""Norm layers, of batches and of instances, whose scale and shift can learn."""


class LearnerParams(MethodParams):
    """Parameters of a network that learns and predicts."""

    learning_rate: float = Field(1e-3, ge=0)
    statistics_momentum: float = Field(0.1, gt=0, le=1)
    predict_statistics: Literal["running", "volume"] = Field(
        "volume", description="normalise a prediction by running statistics or by the case's own"
    )
    max_slices: int = Field(64, ge=1, description="slices that 'volume' statistics come from at most")


class Learner(TTAMethod):
    """A method whose only network takes gradient steps, under the batch's statistics, and predicts.

    Subclasses say which parameters learn, by which optimiser, and the objective.

    Attributes:
        optimizer: of the parameters that learn.
    """

    optimizer: torch.optim.Optimizer
    _learning: NetworkPass

    def setup(self) -> None:
        """Freeze everything but the parameters that learn; make the optimiser."""
        chosen = self._adapted()
        self.model.requires_grad_(False)
        for parameter in chosen:
            parameter.requires_grad_(True)
        self.optimizer = self._make_optimizer(chosen)
        self._make_learning()

    @abstractmethod
    def _adapted(self) -> list[nn.Parameter]:
        """Return the parameters that learn; AdaptationError where there are none."""

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        fused = self.context.device.type == "cuda" or None
        return torch.optim.Adam(parameters, lr=self.params.learning_rate, fused=fused)

    @property
    def _wants_graphs(self) -> bool:
        return self.context.cuda_graphs and self.limit is None

    def _make_learning(self) -> None:
        """Make the pass that learns, the only one that moves running statistics."""
        momentum, pool = self.params.statistics_momentum, GraphPool(self._wants_graphs)
        self._learning = NetworkPass(self.model, self.logits, momentum=momentum, gradient=True, pool=pool)

    def use_less_memory(self, limit: int | None, *, stitch_on_cpu: bool = False) -> None:
        """Also do without graphs, which hold memory, while there is a limit."""
        changed = (self.limit is None) != (limit is None)
        super().use_less_memory(limit, stitch_on_cpu=stitch_on_cpu)
        if changed:
            self._make_learning()

    # ------------------------------------------------------------ adapting

    def adapt(self, images: Tensor) -> Scalars:
        """Take one gradient step on (N, C, H, W) images in [0, 1]."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, scalars = self.objective(self.to_device(images))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.steps += 1
        return scalars

    @abstractmethod
    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the scalar that a step descends, and its terms.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.
        """

    # ------------------------------------------------------------ predicting

    @contextmanager
    def deployed(self, images: Tensor | None = None) -> Iterator[Network]:
        """Give the network, with the statistics of ``images`` where predictions use a case's own."""
        if images is None or self.params.predict_statistics == "running":
            yield self.model
            return
        with self.own_statistics(self.model, images, self.params.max_slices):
            yield self.model

    def predict(self, images: Tensor) -> Tensor:
        """Return probabilities (N, L, *spatial); the network is left as it is."""
        with self.deployed(images) as model:
            return self.probabilities(model, images)

    def _slices_seen(self, slices: int) -> int:
        """Return how many slices the updates of one pass over a case of ``slices`` see."""
        batch = self.params.batch_slices or slices
        drawn: int = batch * (self.params.updates_per_case or -(-slices // batch))
        return slices if self.params.draw == "ordered" else drawn

    def passes(self, slices: int) -> float:
        """Return forward passes, a backward counted as two."""
        own_statistics = slices if self.params.predict_statistics == "volume" else 0
        return float(self.params.epochs * self._slices_seen(slices) * 3 + own_statistics + slices)

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the optimiser."""
        return {"model": self.optimizer}


def norm_affine(model: nn.Module, method: str) -> list[nn.Parameter]:
    """Return scale and shift of every norm layer of ``model``, in module order.

    Args:
        model: any network.
        method: its name, for the error.

    Raises:
        AdaptationError: there are none, with the number of norm layers found.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NORMS)]
    found = [item for layer in layers for item in layer.parameters(recurse=False)]
    if not found:
        raise AdaptationError(
            f"method {method!r} adapts scale and shift of norm layers, and the model has 0 ({len(layers)} "
            "norm layers without them); use method 'tesla', or a network whose norm layers have them "
            "(MONAI: norm: batch)"
        )
    return found


def all_but_head(model: Network, method: str) -> list[nn.Parameter]:
    """Return every parameter of ``model`` but those of its head.

    Args:
        model: any network.
        method: its name, for the error.

    Raises:
        AdaptationError: there are none.
    """
    frozen = {id(item) for item in model.head.parameters()}
    found = [item for item in model.parameters() if id(item) not in frozen]
    if not found:
        raise AdaptationError(
            f"method {method!r} adapts every parameter but the head's, and the model has 0 (it is all head)"
        )
    return found
