"""TeSLA-s: TeSLA with the global feature alignment of TTAC (Tomar et al. 2023; Su et al. 2022).

To the student's loss on clean images comes the divergence between the Gaussian of its features at the
head's input and the source's. Everything else is TeSLA's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tesla_med.tta._shared.alignment import AlignmentParams, Anchors, Moments, require_statistics, sampled
from tesla_med.tta.base import METHODS, Scalars
from tesla_med.tta.tesla import TeSLA, TeSLAParams
from tesla_med.tta.ttac import TTAC


class TeSLASParams(AlignmentParams, TeSLAParams):
    """Parameters of TeSLA and of the alignment."""

    alignment_weight: float = Field(0.1, ge=0, description="of the divergence from the source's features")


@METHODS.register("tesla_s")
class TeSLAS(TeSLA):
    """TeSLA with features drawn to the source's; see the module's docstring."""

    name = "tesla_s"
    summary = "TeSLA with the Gaussian of all features aligned with the source's"
    citation = f"{TeSLA.citation}; {TTAC.citation}"
    protocols = ("Y-O", "Y-M")
    aligns = True
    Params = TeSLASParams

    def setup(self) -> None:
        """Put the source Gaussian in place."""
        source = require_statistics(self.context, self.model, self.name)
        device = self.context.device
        self.anchor = Anchors(source.mean[None], source.covariance[None], device)
        self.moments = Moments.empty(1, len(source.mean), device)
        super().setup()

    def _clean_terms(self, images: Tensor) -> tuple[Tensor, Tensor | None, Scalars]:
        """Return the student's logits, the weighted divergence and its record."""
        p: TeSLASParams = self.params
        logits, _, found = self._learning.with_features(images)
        assert found is not None  # noqa: S101 - the pass was made to hand them out
        features, _ = sampled(logits, found, p.feature_pixels, self.generator)
        everything = torch.ones(len(features), 1, device=features.device)
        moments = self.moments.pooled(Moments.of(features, everything))
        self.moments = moments.remembered(p.memory)
        divergence = self.anchor.divergence(moments)[0]
        return logits, p.alignment_weight * divergence, {"loss/alignment": divergence.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of TeSLA and the pooled moments."""
        return super().state_dict() | {"moments": self.moments.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.moments = Moments.from_state(state["moments"], self.context.device)
