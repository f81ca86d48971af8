"""Source: the frozen model, the baseline that nothing may end below."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor

from tesla_med.tta.base import METHODS, MethodParams, Scalars, TTAMethod


class SourceParams(MethodParams):
    """How the frozen model is normalised; adapted weights say in their card what they need."""

    statistics: Literal["running", "volume"] = Field(
        "running", description="normalise by running statistics or by the case's own"
    )
    max_slices: int = Field(64, ge=1, description="slices that 'volume' statistics come from at most")


@METHODS.register("source")
class Source(TTAMethod):
    """The source model as it is, running statistics and all."""

    name = "source"
    summary = "the frozen source model"
    citation = "no adaptation"
    protocols = ("N-O", "N-M")
    adapts = False
    deterministic = True
    Params = SourceParams

    def adapt(self, images: Tensor) -> Scalars:
        """Do nothing."""
        return {}

    def predict(self, images: Tensor) -> Tensor:
        """Return the model's probabilities (N, L, H, W); its weights and statistics stay as they are."""
        if self.params.statistics == "running":
            return self.probabilities(self.model, images)
        with self.own_statistics(self.model, images, self.params.max_slices):
            return self.probabilities(self.model, images)
