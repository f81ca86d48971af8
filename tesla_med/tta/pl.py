"""PL: pseudo-labels (Lee, ICML workshop 2013), as a baseline of test-time adaptation.

One update, on a batch of slices: a step down the cross-entropy of the network to its own most likely
classes, those of the same forward, over all pixels or those it is confident about.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.tta._shared.learner import Learner, LearnerParams, all_but_head, norm_affine
from tesla_med.tta.base import METHODS, Scalars


class PLParams(LearnerParams):
    """Parameters of pseudo-labels."""

    adapt: Literal["affine", "encoder"] = Field(
        "affine", description="what learns: scale and shift of norm layers, or all but the head"
    )
    confidence_threshold: float = Field(
        0.0, ge=0, le=1, description="pixels less confident than this are left out"
    )


@METHODS.register("pl")
class PL(Learner):
    """Cross-entropy to own hard pseudo-labels; see the module's docstring."""

    name = "pl"
    summary = "cross-entropy to own hard pseudo-labels"
    citation = "Lee, Pseudo-Label: The Simple and Efficient Semi-Supervised Learning Method, ICML-W 2013"
    protocols = ("N-O", "N-M")
    deterministic = True
    Params = PLParams

    def _adapted(self) -> list[nn.Parameter]:
        choose = norm_affine if self.params.adapt == "affine" else all_but_head
        return choose(self.model, self.name)

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the cross-entropy on (N, C, H, W) images in [0, 1]; 0 where no pixel is confident enough."""
        logits, _ = self._learning(images)
        confidence, pseudo_labels = logits.detach().softmax(dim=1).max(dim=1)
        kept = (confidence >= self.params.confidence_threshold).float()
        values = functional.cross_entropy(logits, pseudo_labels, reduction="none")
        loss = (values * kept).sum() / kept.sum().clamp_min(1)
        return loss, {"loss/pseudo_labels": loss.detach(), "kept": kept.mean()}
