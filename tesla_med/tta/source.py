"""Source: the frozen model, which is the baseline that no method should end below."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pydantic import Field
from torch import Tensor

from tesla_med.models.base import Network, norm_layers
from tesla_med.models.normalisation import copied, running_statistics
from tesla_med.tta._shared.teacher import Flip, require_slices, view_mean, with_neighbours
from tesla_med.tta.base import METHODS, MethodParams, Scalars, TTAMethod


class SourceParams(MethodParams):
    """How the frozen model is normalised; the card of adapted weights says what they need."""

    statistics: Literal["running", "volume"] = Field(
        "running", description="normalise by running statistics or by the case's own"
    )
    max_slices: int = Field(64, ge=1, description="'volume' statistics use at most this many slices")
    statistics_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of 'volume' statistics; the rest is the running ones, in every layer",
    )
    statistics_shares: tuple[float, ...] = Field(
        (), description="shares of which one is chosen for each case, in place of statistics_share"
    )
    predict_views: int = Field(1, ge=1, description="weak views that a prediction averages")
    weak_scale: float = Field(0.8, gt=0, le=1, description="side of a view's crop, a share of the field")
    weak_shift: float = Field(0.1, ge=0, le=1, description="largest displacement, in halves of the field")
    weak_flip: Flip = Field("first", description="in-plane axis mirrored: first, last, both or none")
    neighbour_share: float = Field(
        0.0,
        ge=0,
        le=0.33,
        description="weight of each neighbouring slice in the predicted probabilities of a slice",
    )


@METHODS.register("source")
class Source(TTAMethod):
    """The source model as it is, with its running statistics."""

    name = "source"
    summary = "predicts with the frozen source model"
    citation = "no adaptation"
    protocols = ("N-O", "N-M")
    adapts = False
    deterministic = True
    Params = SourceParams

    def setup(self) -> None:
        """Start with the share of the parameters."""
        require_slices(self.model, self.name, self.params.neighbour_share)
        self.share = float(self.params.statistics_share)

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares to choose from, where a case's own statistics are used."""
        masks = self.params.statistics == "volume" and self.model.task == "segmentation"
        known = masks and bool(norm_layers(self.model))
        return tuple(self.params.statistics_shares) if known else ()

    def use_share(self, share: float) -> None:
        """Normalise by this share of a case's own statistics from now on."""
        self.share = share

    def adapt(self, images: Tensor) -> Scalars:
        """Do nothing."""
        return {}

    def predict(self, images: Tensor) -> Tensor:
        """Return the probabilities (N, L, *spatial); weights and statistics stay as they are."""
        with self.deployed(images) as network:
            return self._averaged(network, images)

    @contextmanager
    def deployed(self, images: Tensor | None = None) -> Iterator[Network]:
        """Provide the model as it is, or inside the block with the statistics of a case."""
        p: SourceParams = self.params
        if images is None or p.statistics == "running":
            yield self.model
            return
        rest = copied(running_statistics(self.model)) if self.share < 1.0 else None
        with self.own_statistics(self.model, images, p.max_slices, self.share, rest):
            yield self.model

    def _averaged(self, network: Network, images: Tensor) -> Tensor:
        """Return the probabilities, as the mean over weak views if there are several, neighbours mixed in."""
        p: SourceParams = self.params
        one = p.predict_views == 1
        probs = self.probabilities(network, images) if one else view_mean(self, network, images)
        return with_neighbours(probs, p.neighbour_share) if p.neighbour_share > 0 else probs
