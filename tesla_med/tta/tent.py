"""Tent: fully test-time adaptation by entropy minimisation (Wang et al., ICLR 2021).

One update, on a batch of slices: a step down the mean entropy of the network's predictions over batch
and pixels (Sec. 3.1 there), under the statistics of the batch, on scale and shift of the norm
layers (Sec. 3.2). Everything else stays as the source left it.
"""

from __future__ import annotations

from torch import Tensor, nn

from tesla_med import losses
from tesla_med.tta._shared.learner import Learner, LearnerParams, norm_affine
from tesla_med.tta.base import METHODS, Scalars


class TentParams(LearnerParams):
    """Parameters of Tent; the learning rate is its authors' for Adam."""


@METHODS.register("tent")
class Tent(Learner):
    """Entropy of the predictions, down, by scale and shift of norm layers; see the module's docstring."""

    name = "tent"
    summary = "entropy of the predictions minimised by scale and shift of norm layers"
    citation = "Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021"
    protocols = ("N-O", "N-M")
    deterministic = True
    Params = TentParams

    def _adapted(self) -> list[nn.Parameter]:
        return norm_affine(self.model, self.name)

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the mean entropy of the predictions on (N, C, H, W) images in [0, 1]."""
        logits, _ = self._learning(images)
        entropy = losses.entropy(logits)
        return entropy, {"loss/entropy": entropy.detach()}
