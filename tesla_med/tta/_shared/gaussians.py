"""Gaussians of features: moments that are pooled over batches, and their divergence from the source's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

RIDGE = 1.0 / 30.0
"""Share of the largest entry of a source covariance that is added to the diagonals of source and target."""

JITTER = 1e-6
"""Share of a covariance's trace that is added to its diagonal: rounding can make eigenvalues negative."""


@dataclass
class Moments:
    """Weight, mean and covariance of K groups of D features.

    Attributes:
        weight: (K,), the number of features in each group.
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
    def of(cls, features: Tensor, membership: Tensor | None = None) -> Moments:
        """Return the moments of features in K groups; those of an empty group are zeros.

        Args:
            features: (P, D).
            membership: (P, K) zeros and ones; None for a single group of all features.
        """
        if membership is None:
            membership = torch.ones(len(features), 1, device=features.device)
        weight = membership.sum(dim=0)
        known = weight.clamp_min(1.0)[:, None]
        mean = membership.T @ features / known
        parts = []
        for index in range(membership.shape[1]):
            centred = (features - mean[index]) * membership[:, index : index + 1]
            parts.append(centred.T @ centred / known[index])
        return cls(weight, mean, torch.stack(parts))

    def pooled(self, batch: Moments) -> Moments:
        """Return the moments of both sets of features together (Chan et al. 1983, parallel variance)."""
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
        """Return a copy without gradient that counts as no more than ``memory`` features."""
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
        """Return the moments that :meth:`state` was called on."""
        return cls(**{name: value.to(device, copy=True) for name, value in state.items()})


class Anchors:
    """Source Gaussians on the device, and the divergence of target moments from them.

    Args:
        mean: (K, D).
        covariance: (K, D, D).
        device: the device on which to compute.
    """

    def __init__(self, mean: Tensor, covariance: Tensor, device: torch.device) -> None:
        self.mean, covariance = mean.to(device), covariance.to(device)
        largest = covariance.flatten(1).amax(dim=1).clamp_min(1e-6)
        self._identity = torch.eye(mean.shape[1], device=device)
        self._ridge = RIDGE * largest[:, None, None] * self._identity
        self.covariance = self._regular(covariance)
        self.precision = torch.cholesky_inverse(torch.linalg.cholesky(self.covariance))

    def divergence(self, target: Moments) -> Tensor:
        """Return (K,): the mean of both Kullback-Leibler divergences between the Gaussians, divided by D.

        With source N(m, S) and target N(n, T) this is

            (tr(S^-1 T) + tr(T^-1 S) - 2 D + (n - m)' (S^-1 + T^-1) (n - m)) / (4 D),

        because the determinants cancel in the sum. The division by D makes one weight suit networks of few
        and of many features.
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
