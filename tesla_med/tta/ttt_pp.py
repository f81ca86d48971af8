"""TTT++, alignment only: test-time feature alignment (Liu et al., NeurIPS 2021).

For each batch there is one step down the distance between the first and second moments of the features
at the head's input (target mean n and covariance T) and those of the source (m and S),

    mean_weight * ||n - m||^2 / D  +  covariance_weight * ||T - S||_F^2 / (4 D^2),

with respect to every parameter except the head's, under the statistics of the batch. Target moments are
pooled over the batches seen, in place of the authors' queue of features. This is half of TTT++: its
self-supervised branch is left out, because it needs a source model that was trained with it.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from tesla_med.tta._shared.alignment import AlignedLearner, AlignmentParams, require_statistics
from tesla_med.tta._shared.gaussians import Moments
from tesla_med.tta._shared.learner import LearnerParams
from tesla_med.tta.base import METHODS, Scalars


class TTTPlusPlusParams(AlignmentParams, LearnerParams):
    """Parameters of the alignment of TTT++."""

    learning_rate: float = Field(1e-4, ge=0)
    mean_weight: float = Field(1.0, ge=0, description="of the mean squared difference of the means")
    covariance_weight: float = Field(
        1.0, ge=0, description="of the squared Frobenius distance of the covariances over 4 D^2"
    )


@METHODS.register("ttt_pp")
class TTTPlusPlus(AlignedLearner):
    """Alignment of the first and second moments of features; see the module's docstring."""

    name = "ttt_pp"
    summary = "alignment only: aligns the mean and covariance of features with those of the source"
    citation = "Liu et al., TTT++: When Does Self-Supervised Test-Time Training Fail or Thrive?, NeurIPS 2021"
    protocols = ("Y-O", "Y-M")
    Params = TTTPlusPlusParams

    def setup(self) -> None:
        """Keep the source moments, and start target moments from nothing."""
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
        features, _ = self.look(images)
        target = self.pool(Moments.of(features))
        mean = (target.mean[0] - self.source_mean).square().mean()
        covariance = (target.covariance[0] - self.source_covariance).square().mean() / 4.0
        loss = p.mean_weight * mean + p.covariance_weight * covariance
        return loss, {"loss/mean": mean.detach(), "loss/covariance": covariance.detach()}
