"""TTT++: test-time feature alignment (Liu et al., NeurIPS 2021).

One update, on a batch of slices: a step down the distance between first and second moments of the
features at the head's input and those of the source, on every parameter but the head's, under the
statistics of the batch. Moments are pooled over the batches seen, in place of the authors' queue of
features. Their self-supervised branch is left out: it needs a source model that was trained with it.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from tesla_med.tta._shared.alignment import AlignedLearner, AlignmentParams, Moments, require_statistics
from tesla_med.tta._shared.learner import LearnerParams
from tesla_med.tta.base import METHODS, Scalars


class TTTPlusPlusParams(AlignmentParams, LearnerParams):
    """Parameters of TTT++."""

    learning_rate: float = Field(1e-4, ge=0)
    mean_weight: float = Field(1.0, ge=0, description="of the mean squared difference of the means")
    covariance_weight: float = Field(
        1.0, ge=0, description="of the squared Frobenius distance of the covariances over 4 D^2"
    )


@METHODS.register("ttt_pp")
class TTTPlusPlus(AlignedLearner):
    """First and second moments of features aligned with the source's; see the module's docstring."""

    name = "ttt_pp"
    summary = "mean and covariance of features aligned with the source's"
    citation = "Liu et al., TTT++: When Does Self-Supervised Test-Time Training Fail or Thrive?, NeurIPS 2021"
    protocols = ("Y-O", "Y-M")
    Params = TTTPlusPlusParams

    def setup(self) -> None:
        """Put the source moments in place."""
        source = require_statistics(self.context, self.model, self.name)
        device = self.context.device
        self.source_mean, self.source_covariance = source.mean.to(device), source.covariance.to(device)
        self.moments = Moments.empty(1, len(source.mean), device)
        super().setup()

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the weighted distance of the moments.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.
        """
        p: TTTPlusPlusParams = self.params
        features, _ = self._look(images)
        everything = torch.ones(len(features), 1, device=features.device)
        moments = self.moments.pooled(Moments.of(features, everything))
        self.moments = moments.remembered(p.memory)
        mean = (moments.mean[0] - self.source_mean).square().mean()
        covariance = (moments.covariance[0] - self.source_covariance).square().mean() / 4.0
        loss = p.mean_weight * mean + p.covariance_weight * covariance
        return loss, {"loss/mean": mean.detach(), "loss/covariance": covariance.detach()}
