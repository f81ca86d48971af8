"""TeSLA-s: TeSLA with the global feature alignment of TTAC (Tomar et al. 2023; Su et al. 2022).

To the student's loss on clean images, TeSLA-s adds ``alignment_weight`` times the divergence between the
Gaussian of the student's features at the head's input and that of the source. Everything else is TeSLA's.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from tesla_med.tta._shared.alignment import Aligned, AlignmentParams, require_statistics
from tesla_med.tta._shared.features import sampled
from tesla_med.tta._shared.gaussians import Anchors, Moments
from tesla_med.tta._shared.passes import Output
from tesla_med.tta.base import METHODS, Scalars
from tesla_med.tta.tesla import TeSLA, TeSLAParams
from tesla_med.tta.ttac import TTAC


class TeSLASParams(AlignmentParams, TeSLAParams):
    """Parameters of TeSLA and of the alignment."""

    alignment_weight: float = Field(0.1, ge=0, description="of the divergence from the source's features")


@METHODS.register("tesla_s")
class TeSLAS(Aligned, TeSLA):
    """TeSLA with features aligned with those of the source; see the module's docstring.

    Attributes:
        anchor: the source Gaussian of all features.
    """

    name = "tesla_s"
    summary = "TeSLA that also aligns the Gaussian of all features with that of the source"
    citation = f"{TeSLA.citation}; {TTAC.citation}"
    protocols = ("Y-O", "Y-M")
    needs_features = True
    binary_regions = False
    Params = TeSLASParams

    def setup(self) -> None:
        """Keep the source Gaussian, and start target moments from nothing."""
        source = require_statistics(self.context, self.model, self.name)
        device = self.context.device
        self.anchor = Anchors(source.mean[None], source.covariance[None], device)
        self.moments = Moments.empty(1, len(source.mean), device)
        super().setup()

    def added_loss(self, output: Output) -> tuple[Tensor, Scalars]:
        """Return the weighted divergence of the student's features on clean images."""
        p: TeSLASParams = self.params
        assert output.features is not None  # noqa: S101 - the pass was made to return them
        about = output.logits, output.features, p.feature_pixels, self.generator
        features, _ = sampled(*about, self.pixel_weight)
        divergence = self.anchor.divergence(self.pool(Moments.of(features)))[0]
        return p.alignment_weight * divergence, {"loss/alignment": divergence.detach()}
