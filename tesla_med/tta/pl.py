"""PL: pseudo-labels (Lee, ICML workshop 2013), as a baseline of test-time adaptation.

For each batch, PL takes one step down the cross-entropy of the network to its own most likely classes,

    y = argmax_k p_k,    loss = - mean over pixels with p_y >= threshold of  log p_y,

where the labels y come from the same forward pass as the predictions p.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.tta._mechanics.parameters import all_but_head, norm_affine
from tesla_med.tta._shared.learner import Learner, LearnerParams
from tesla_med.tta.base import METHODS, Scalars


class PLParams(LearnerParams):
    """Parameters of pseudo-labels."""

    adapt: Literal["affine", "encoder"] = Field(
        "affine",
        description="parameters that are updated: scale and shift of norm layers, or all but the head",
    )
    confidence_threshold: float = Field(
        0.0, ge=0, le=1, description="pixels less confident than this are left out"
    )


@METHODS.register("pl")
class PL(Learner):
    """Cross-entropy to the network's own hard pseudo-labels; see the module's docstring."""

    name = "pl"
    summary = "trains the network on its own most likely classes by cross-entropy"
    citation = "Lee, Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method, ICML-W 2013"
    binary_regions = True
    protocols = ("N-O", "N-M")
    deterministic = True
    Params = PLParams

    @classmethod
    def joins(cls, params: Any) -> bool:
        """Whether the gradient of a batch is the mean of those of its shares."""
        return cls is PL and params.confidence_threshold == 0

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return the scale and shift of norm layers, or everything but the head, as ``adapt`` says."""
        choose = norm_affine if self.params.adapt == "affine" else all_but_head
        return choose(self.model, self.name)

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the cross-entropy on (N, C, H, W) images in [0, 1]; 0 if no pixel is confident enough."""
        logits = self.learning(images).logits
        confidence, pseudo_labels = logits.detach().softmax(dim=1).max(dim=1)
        kept = (confidence >= self.params.confidence_threshold).float()
        if self.pixel_weight is not None:
            kept = kept * self.pixel_weight
        values = functional.cross_entropy(logits, pseudo_labels, reduction="none")
        loss = (values * kept).sum() / kept.sum().clamp_min(1)
        return loss, {"loss/pseudo_labels": loss.detach(), "kept": kept.mean()}
