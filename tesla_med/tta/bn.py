"""BN: the normalisation statistics of the test images in place of the source's, with frozen weights.

For every batch norm, mean and variance become (Nado et al. 2020; Schneider et al. 2020)

    target_share * statistics of the test images  +  (1 - target_share) * statistics of the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from tesla_med.models.normalisation import (
    batch_statistics,
    blend_running_statistics,
    copied,
    evenly_spaced,
    running_statistics,
)
from tesla_med.tta._mechanics.parameters import require_norm_layers
from tesla_med.tta.base import METHODS, MethodParams, Scalars, TTAMethod


class BNParams(MethodParams):
    """Parameters of BN."""

    batch_slices: int | None = Field(None, ge=1)
    target_share: float = Field(
        1.0, ge=0, le=1, description="share of the test statistics; the rest is the source's"
    )
    max_slices: int = Field(
        64, ge=1, description="statistics come from at most this many evenly spaced slices"
    )


@METHODS.register("bn")
class BN(TTAMethod):
    """Replacement of the running statistics of every batch norm by those of the test images.

    In a single pass over a case, statistics come from all its slices in one forward pass, so that the inputs
    of every layer are normalised by the same slices. In several passes, they are the mean over batches, each
    weighted by its images.
    """

    name = "bn"
    summary = "replaces normalisation statistics by those of the test images, or mixes both"
    citation = "Nado et al. 2020, Evaluating prediction-time batch normalization; Schneider et al. 2020"
    protocols = ("N-O", "N-M")
    deterministic = True
    Params = BNParams

    def setup(self) -> None:
        """Keep the statistics of the source for mixing."""
        require_norm_layers(self.model, self.name)
        self._source = copied(running_statistics(self.model))
        self._target = copied(self._source)
        self._seen = 0

    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:
        """Start the mean over batches anew."""
        self._seen = 0

    @torch.no_grad()
    def adapt(self, images: Tensor) -> Scalars:
        """Include the statistics of ``images`` in the mean over the images of this pass."""
        batch = self.to_device(evenly_spaced(images, self.params.max_slices))
        with batch_statistics(self.model, momentum=1.0):
            self.logits(self.model, batch)
        self._seen += len(images)
        blend_running_statistics(self.model, self._target, len(images) / self._seen)
        self._target = copied(running_statistics(self.model))
        blend_running_statistics(self.model, self._source, self.params.target_share)
        self.steps += 1
        return {}

    def passes_per_update(self) -> float:
        """Count the pass for the statistics."""
        return 1

    def state_dict(self) -> dict[str, Any]:
        """Return the common state and the mean over batches so far."""
        return super().state_dict() | {"target": copied(self._target), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        device = self.context.device
        self._target = [(mean.to(device), variance.to(device)) for mean, variance in copied(state["target"])]
        self._seen = state["seen"]
