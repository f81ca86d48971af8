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

from tesla_med.tta.alignment import AlignmentParams, Anchors, Moments, require_statistics, sampled
from tesla_med.tta.base import METHODS, Scalars
from tesla_med.tta.neighbours import head_features
from tesla_med.tta.passes import NetworkPass
from tesla_med.tta.tesla import TeSLA, TeSLAParams
from tesla_med.tta.ttac import TTAC


class TeSLASParams(AlignmentParams, TeSLAParams):
    """Parameters of TeSLA and of the alignment."""

    alignment_weight: float = Field(1.0, ge=0, description="of the divergence from the source's features")


@METHODS.register("tesla_s")
class TeSLAS(TeSLA):
    """TeSLA with features drawn to the source's; see the module's docstring."""

    name = "tesla_s"
    summary = "TeSLA with the Gaussian of all features aligned with the source's"
    citation = f"{TeSLA.citation}; {TTAC.citation}"
    protocols = ("Y-O", "Y-M")
    Params = TeSLASParams

    def setup(self) -> None:
        """Put the source Gaussian in place."""
        source = require_statistics(self.context, self.model, self.name)
        device = self.context.device
        self.anchor = Anchors(source.mean[None], source.covariance[None], device)
        self.moments = Moments.empty(1, len(source.mean), device)
        super().setup()

    def _make_passes(self) -> None:
        """Make the passes; the student's on clean images hands its features out, which a graph cannot."""
        super()._make_passes()
        self._learning = NetworkPass(
            self.student, self.logits, momentum=self.params.statistics_momentum, gradient=True
        )

    def _clean_terms(self, images: Tensor) -> tuple[Tensor, Tensor | None, Scalars]:
        """Return the student's logits, the weighted divergence and its record."""
        p: TeSLASParams = self.params
        with head_features(self.student) as found:
            logits, _ = self._learning(images)
        features, _ = sampled(logits, found[-1], p.feature_pixels, self.generator)
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
