"""Tent: fully test-time adaptation by entropy minimisation (Wang et al., ICLR 2021).

For each batch, Tent takes one step down the entropy of the network's predictions p (Sec. 3.1),

    H = - mean over batch and pixels of  sum_k p_k log p_k,

with respect to the scale and shift of the norm layers, which normalise by the statistics of the batch
(Sec. 3.2). All other parameters stay as the source left them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tesla_med import losses
from tesla_med.tta._mechanics.parameters import norm_affine
from tesla_med.tta._shared.learner import Learner, LearnerParams
from tesla_med.tta.base import METHODS, Scalars


class TentParams(LearnerParams):
    """Parameters of Tent; the learning rate is the one its authors use with Adam."""


@METHODS.register("tent")
class Tent(Learner):
    """Entropy minimisation on the scale and shift of norm layers; see the module's docstring."""

    name = "tent"
    summary = "minimises the entropy of the predictions by updating the scale and shift of norm layers"
    citation = "Wang et al., Tent: Fully Test-Time Adaptation by Entropy Minimization, ICLR 2021"
    binary_regions = True
    protocols = ("N-O", "N-M")
    deterministic = True
    Params = TentParams

    @classmethod
    def joins(cls, params: Any) -> bool:
        """Whether the gradient of a batch is the mean of those of its shares."""
        return cls is Tent

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the scale and shift of every norm layer."""
        return norm_affine(self.model, self.name)

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the mean entropy of the predictions on (N, C, H, W) images in [0, 1]."""
        entropy = losses.entropy(self.learning(images).logits, self.pixel_weight)
        return entropy, {"loss/entropy": entropy.detach()}
