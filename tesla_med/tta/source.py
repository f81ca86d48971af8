"""Source: the frozen model, the baseline that nothing may end below."""

from __future__ import annotations

from torch import Tensor

from tesla_med.tta.base import METHODS, MethodParams, Scalars, TTAMethod


class SourceParams(MethodParams):
    """The frozen model has no parameters of its own."""


@METHODS.register("source")
class Source(TTAMethod):
    """The source model as it is, running statistics and all."""

    name = "source"
    summary = "the frozen source model"
    citation = "no adaptation"
    protocols = ("N-O", "N-M")
    adapts = False
    Params = SourceParams

    def adapt(self, images: Tensor) -> Scalars:
        """Do nothing."""
        return {}

    def predict(self, images: Tensor) -> Tensor:
        """Return the source model's probabilities (N, L, H, W)."""
        return self.probabilities(self.model, images)
