"""Alignment of features with the moments of the source: what the methods of the Y protocols share.

Features are what enters the head of the network, one vector per pixel or per tile. Their moments on the
target are pooled over the batches seen so far; only the newest batch carries a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field
from torch import Tensor, nn

from tesla_med.config.models import Section
from tesla_med.errors import CheckpointError, ConfigError
from tesla_med.models.base import Network
from tesla_med.models.moments import SourceStatistics
from tesla_med.tta._mechanics.parameters import all_but_head
from tesla_med.tta._shared.features import sampled
from tesla_med.tta._shared.gaussians import Moments
from tesla_med.tta._shared.learner import Learner
from tesla_med.tta.base import MethodContext, TTAMethod


class AlignmentParams(Section):
    """Parameters of every method that aligns features with those of the source."""

    feature_pixels: int = Field(
        4096, ge=1, description="pixels of each slice whose features are used, drawn anew for each update"
    )
    memory: int = Field(
        262144,
        ge=0,
        description="the pooled target moments remember at most this many features; 0: the batch alone",
    )


def require_statistics(context: MethodContext, model: Network, method: str) -> SourceStatistics:
    """Return the source statistics of the run, checked against the network.

    Raises:
        ConfigError: there are none.
        CheckpointError: they describe another number of features than the head takes.
    """
    statistics = context.statistics
    if statistics is None:
        raise ConfigError(
            f"method {method!r} aligns features with source statistics, but there are none: measure them "
            "with 'tesla-med statistics --weights W --sites S --volumes DIR', or give --statistics FILE"
        )
    taken = head_inputs(model)
    if taken is not None and taken != len(statistics.mean):
        raise CheckpointError(
            f"method {method!r}: the source statistics are of {len(statistics.mean)} features, but the head "
            f"of this network takes {taken}; measure them again with 'tesla-med statistics' for these weights"
        )
    return statistics


def head_inputs(model: Network) -> int | None:
    """Return how many features the head takes; None if it has no weights to tell by."""
    for parameter in model.head.parameters():
        if parameter.dim() >= 2:
            return int(parameter.shape[1])
    return None


class Aligned(TTAMethod):
    """The pooled moments of a method, as part of its state; stands before the method among the bases.

    Attributes:
        moments: the moments of the features seen; set in ``setup``.
    """

    moments: Moments

    def pool(self, batch: Moments) -> Moments:
        """Return the moments of the batch and of what is remembered, and remember both.

        Args:
            batch: moments of the batch, with gradient.
        """
        moments = self.moments.pooled(batch)
        self.moments = moments.remembered(self.params.memory)
        return moments

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method and the pooled moments."""
        return super().state_dict() | {"moments": self.moments.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.moments = Moments.from_state(state["moments"], self.context.device)


class AlignedLearner(Aligned, Learner):
    """A learner whose objective is the distance of its features from the source's; the head is frozen."""

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return everything but the head."""
        return all_but_head(self.model, self.name)

    @property
    def needs_features(self) -> bool:
        """Always, since they are what is aligned."""
        return True

    def look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features (P, D) and logits (P, L) of sampled pixels, with gradient.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.
        """
        logits, _, features = self.learning(images)
        assert features is not None  # noqa: S101 - the pass was made to return them
        count, weight = self.params.feature_pixels, self.pixel_weight
        return sampled(logits, features, count, self.generator, weight)
