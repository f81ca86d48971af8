"""TTAC: test-time anchored clustering (Su et al., NeurIPS 2022).

For each batch, TTAC takes one step down the divergence between Gaussians of the features at the head's input,
on the target (n, T) and at the source (m, S),

    class_weight * mean over classes of KL(class)  +  global_weight * KL(all features),

where KL is the symmetrised Kullback-Leibler divergence of ``Anchors.divergence``. The first term is anchored
clustering, the second global feature alignment. Every parameter except the head's learns, under the
statistics of the batch. A pixel belongs to the class to which the network gives a probability above
``confidence``; moments are pooled over the batches seen. The filter by agreement between visits of a sample
is left out, because images come without names.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from tesla_med.tta._shared.alignment import AlignedLearner, AlignmentParams, require_statistics
from tesla_med.tta._shared.gaussians import Anchors, Moments
from tesla_med.tta._shared.learner import LearnerParams
from tesla_med.tta.base import METHODS, Scalars


class TTACParams(AlignmentParams, LearnerParams):
    """Parameters of TTAC."""

    learning_rate: float = Field(1e-4, ge=0)
    class_weight: float = Field(1.0, ge=0, description="of the mean divergence over classes")
    global_weight: float = Field(1.0, ge=0, description="of the divergence over all features")
    confidence: float = Field(
        0.9, ge=0, le=1, description="a pixel is assigned to its class only above this probability"
    )
    class_minimum: int = Field(16, ge=1, description="a class with fewer features than this is left out")


@METHODS.register("ttac")
class TTAC(AlignedLearner):
    """Alignment of class-wise and global Gaussians of features; see the module's docstring.

    Attributes:
        anchors: the source Gaussians of the classes, and of all features as the last one.
        known: (L,) whether the source has enough features of a class to align with.
    """

    name = "ttac"
    summary = "aligns class-wise and global Gaussians of features with those of the source"
    citation = "Su et al., Revisiting Realistic Test-Time Training (anchored clustering), NeurIPS 2022"
    protocols = ("Y-O", "Y-M")
    Params = TTACParams

    def setup(self) -> None:
        """Keep the source Gaussians, and start target moments from nothing."""
        source = require_statistics(self.context, self.model, self.name)
        device = self.context.device
        mean = torch.cat([source.class_mean, source.mean[None]])
        covariance = torch.cat([source.class_covariance, source.covariance[None]])
        self.anchors = Anchors(mean, covariance, device)
        self.known = source.class_pixels.to(device) >= self.params.class_minimum
        self.moments = Moments.empty(len(mean), mean.shape[1], device)
        super().setup()

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the weighted divergences.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.
        """
        p: TTACParams = self.params
        features, logits = self.look(images)
        target = self.pool(Moments.of(features, self._membership(logits)))
        divergence = self.anchors.divergence(target)
        counted = (self.known & (target.weight[:-1].detach() >= p.class_minimum)).float()
        by_class = (divergence[:-1] * counted).sum() / counted.sum().clamp_min(1.0)
        loss = p.class_weight * by_class + p.global_weight * divergence[-1]
        return loss, {"loss/class": by_class.detach(), "loss/global": divergence[-1].detach()}

    def _membership(self, logits: Tensor) -> Tensor:
        """Return (P, L + 1): the class of each pixel that is certain of it, and ones for all features."""
        probability, winner = logits.detach().softmax(dim=1).max(dim=1)
        member = functional.one_hot(winner, logits.shape[1]).float()
        certain = (probability > self.params.confidence).float()[:, None]
        return torch.cat([member * certain, torch.ones_like(certain)], dim=1)
