"""A network that learns from its own predictions: what Tent, pseudo-labels, SHOT and others share.

Such a method differs from another in its objective, in the parameters that it updates and, perhaps, in its
optimiser. The rest is here: one gradient step per batch, through a forward pass normalised by the statistics
of the batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med.tta._mechanics.ranks import share_gradients
from tesla_med.tta._shared.passes import NetworkPass
from tesla_med.tta.base import MethodParams, Scalars, TTAMethod


class LearnerParams(MethodParams):
    """Parameters of a network that learns and predicts."""

    learning_rate: float = Field(1e-3, ge=0)
    statistics_momentum: float = Field(0.1, gt=0, le=1)
    predict_statistics: Literal["running", "volume"] = Field(
        "volume", description="normalise a prediction by running statistics or by the case's own"
    )
    max_slices: int = Field(64, ge=1, description="'volume' statistics use at most this many slices")


class Learner(TTAMethod):
    """A method with a single network, which takes gradient steps down its objective and predicts.

    Attributes:
        optimizer: the optimiser of the parameters that learn.
        learning: the forward pass that learns, called with images; only this pass moves running statistics.
    """

    @abstractmethod
    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the scalar that a step descends, and its terms.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.
        """

    @abstractmethod
    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that learn; everything else is frozen.

        Raises:
            AdaptationError: the network has none of them.
        """

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimiser of the parameters that learn, Adam unless a method says otherwise."""
        fused = self.context.device.type == "cuda" or None
        return torch.optim.Adam(parameters, lr=self.params.learning_rate, fused=fused)

    @property
    def needs_features(self) -> bool:
        """Whether the objective looks at the features that enter the head."""
        return False

    def setup(self) -> None:
        """Freeze everything but the parameters that learn, and make their optimiser."""
        learned = self.updated_parameters()
        self.model.requires_grad_(False)
        for parameter in learned:
            parameter.requires_grad_(True)
        self.optimizer = self.make_optimizer(learned)

    def make_passes(self) -> None:
        """Make the forward pass that learns; one that returns features is never captured as a graph."""
        self.learning = NetworkPass(
            self.model,
            self.logits,
            momentum=self.params.statistics_momentum,
            features=self.needs_features,
            gradient=True,
            pool=None if self.needs_features else self.graph_pool(),
        )

    def adapt(self, images: Tensor) -> Scalars:
        """Take one gradient step on (N, C, H, W) images in [0, 1]."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, scalars = self.objective(self.to_device(images))
        loss.backward()  # type: ignore[no-untyped-call]
        share_gradients(self.model.parameters())
        self.optimizer.step()
        self.steps += 1
        return scalars

    def passes_per_update(self) -> float:
        """Count a forward and a backward pass."""
        return 3

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the optimiser."""
        return {"model": self.optimizer}
