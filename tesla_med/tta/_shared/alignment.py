"""Alignment of features with the moments of the source: what the methods of the Y protocols share.

Features are the input of the network's head, one vector a pixel (or a tile). Their target moments are pooled
over the batches seen; only the newest batch carries a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med.config.models import Section
from tesla_med.errors import CheckpointError, ConfigError
from tesla_med.models.base import Network
from tesla_med.tta._shared.learner import Learner, all_but_head
from tesla_med.tta._shared.neighbours import head_features, in_frame_of, rows
from tesla_med.tta.base import MethodContext

if TYPE_CHECKING:
    from tesla_med.training.measure import SourceStatistics

RIDGE = 1.0 / 30.0
"""Share of the largest entry of a source covariance that is added to the diagonal of both."""

JITTER = 1e-6
"""Share of a covariance's trace on its diagonal, as eigenvalues that are 0 come out below it by rounding."""


class AlignmentParams(Section):
    """Parameters of every method that aligns features with the source's."""

    feature_pixels: int = Field(
        4096, ge=1, description="pixels of each slice whose features are used, drawn anew for each update"
    )
    memory: int = Field(
        262144,
        ge=0,
        description="features that the pooled target moments remember at most; 0: the batch alone",
    )


@dataclass
class Moments:
    """Weight, mean and covariance of K groups of D features.

    Attributes:
        weight: (K,) number of features behind them.
        mean: (K, D).
        covariance: (K, D, D), divided by the number of features.
    """

    weight: Tensor
    mean: Tensor
    covariance: Tensor

    @classmethod
    def empty(cls, groups: int, features: int, device: torch.device) -> Moments:
        """Return the moments of nothing: zeros."""
        sizes = ((groups,), (groups, features), (groups, features, features))
        return cls(*(torch.zeros(size, device=device) for size in sizes))

    @classmethod
    def of(cls, features: Tensor, membership: Tensor) -> Moments:
        """Return the moments of (P, D) features in K groups; those of an empty group are zeros.

        Args:
            features: (P, D).
            membership: (P, K) zeros and ones.
        """
        weight = membership.sum(dim=0)
        known = weight.clamp_min(1.0)[:, None]
        mean = membership.T @ features / known
        parts = []
        for index in range(membership.shape[1]):
            centred = (features - mean[index]) * membership[:, index : index + 1]
            parts.append(centred.T @ centred / known[index])
        return cls(weight, mean, torch.stack(parts))

    def pooled(self, batch: Moments) -> Moments:
        """Return the moments of both sets together (parallel variance formula, Chan et al. 1983)."""
        total = self.weight + batch.weight
        share = (batch.weight / total.clamp_min(1.0))[:, None]
        step = batch.mean - self.mean
        spread = step[:, :, None] * step[:, None, :]
        share_matrix = share[..., None]
        covariance = torch.lerp(self.covariance, batch.covariance, share_matrix)
        return Moments(
            total, self.mean + share * step, covariance + share_matrix * (1.0 - share_matrix) * spread
        )

    def remembered(self, memory: int) -> Moments:
        """Return a copy without gradient that counts as at most ``memory`` features."""
        return Moments(
            self.weight.detach().clamp_max(float(memory)),
            self.mean.detach().clone(),
            self.covariance.detach().clone(),
        )

    def state(self) -> dict[str, Tensor]:
        """Return copies by name."""
        return {name: value.clone() for name, value in vars(self).items()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], device: torch.device) -> Moments:
        """Return what :meth:`state` was taken of."""
        return cls(**{name: value.to(device, copy=True) for name, value in state.items()})


class Anchors:
    """Source Gaussians on the device, and the divergence of target moments from them.

    Args:
        mean: (K, D).
        covariance: (K, D, D).
        device: where to compute.
    """

    def __init__(self, mean: Tensor, covariance: Tensor, device: torch.device) -> None:
        self.mean, covariance = mean.to(device), covariance.to(device)
        largest = covariance.flatten(1).amax(dim=1).clamp_min(1e-6)
        self._identity = torch.eye(mean.shape[1], device=device)
        self._ridge = RIDGE * largest[:, None, None] * self._identity
        self.covariance = self._regular(covariance)
        self.precision = torch.cholesky_inverse(torch.linalg.cholesky(self.covariance))

    def divergence(self, target: Moments) -> Tensor:
        """Return (K,): the mean of both Kullback-Leibler divergences between the Gaussians, per feature.

        In the sum of both the determinants cancel; what is left are traces of the product of one's covariance
        and the other's inverse, and the squared distance of the means under both inverses. Divided by D, so
        that one weight suits networks of few and of many features.
        """
        covariance = self._regular(target.covariance)
        precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
        step = (target.mean - self.mean)[:, :, None]
        features = self.mean.shape[1]
        traces = (self.precision * covariance).sum(dim=(1, 2)) + (precision * self.covariance).sum(dim=(1, 2))
        apart = (step.mT @ (self.precision + precision) @ step)[:, 0, 0]
        result: Tensor = (traces - 2 * features + apart) / (4 * features)
        return result

    def _regular(self, covariance: Tensor) -> Tensor:
        trace = covariance.detach().diagonal(dim1=-2, dim2=-1).sum(dim=-1)
        known: Tensor = covariance + self._ridge + JITTER * trace[:, None, None] * self._identity
        return known


def require_statistics(context: MethodContext, model: Network, method: str) -> SourceStatistics:
    """Return the source statistics that the run was given.

    Raises:
        ConfigError: there are none.
        CheckpointError: they are of another number of features than the head takes.
    """
    statistics = context.statistics
    if statistics is None:
        raise ConfigError(
            f"method {method!r} aligns features with source statistics, and there are none: measure them "
            "with 'tesla-med statistics --weights W --sites S --volumes DIR', or give --statistics FILE"
        )
    taken = head_inputs(model)
    if taken is not None and taken != len(statistics.mean):
        raise CheckpointError(
            f"method {method!r}: the source statistics are of {len(statistics.mean)} features, and the head "
            f"of this network takes {taken}; measure them again with 'tesla-med statistics' for these weights"
        )
    return statistics


def head_inputs(model: Network) -> int | None:
    """Return how many features the head takes, None where it has no weights to tell by."""
    for parameter in model.head.parameters():
        if parameter.dim() >= 2:
            return int(parameter.shape[1])
    return None


def sampled(
    logits: Tensor, features: Tensor, pixels: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return features (P, D) and logits (P, L) of pixels drawn once for all slices; a tile is its one pixel.

    Args:
        logits: (N, L, *spatial).
        features: (N, D, *spatial), of the head's input.
        pixels: of a slice, at most.
        generator: on the CPU.
    """
    size = logits[0, 0].numel()
    drawn = torch.randperm(size, generator=generator)[:pixels].to(logits.device)
    return rows(in_frame_of(logits, features), drawn), rows(logits, drawn)


class AlignedLearner(Learner):
    """A learner whose features are drawn to the source's; subclasses set ``moments`` in :meth:`setup`.

    Attributes:
        moments: of the features seen.
    """

    moments: Moments

    def _adapted(self) -> list[nn.Parameter]:
        return all_but_head(self.model, self.name)

    @property
    def _wants_graphs(self) -> bool:
        return False  # a graph does not hand the features out

    def _look(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (P, D) and logits (P, L) of sampled pixels, with gradient."""
        with head_features(self.model) as found:
            logits, _ = self._learning(images)
        return sampled(logits, found[-1], self.params.feature_pixels, self.generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the common state and the pooled moments."""
        return super().state_dict() | {"moments": self.moments.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.moments = Moments.from_state(state["moments"], self.context.device)
