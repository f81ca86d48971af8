"""TTAC: test-time anchored clustering (Su et al., NeurIPS 2022).

TTAC descends the divergence between Gaussians of the features at the head's input, on the target (n, T) and
at the source (m, S),

    loss_scale * 2 D * (class_weight * mean over classes of KL(class)  +  global_weight * KL(all features)),

where KL is the symmetrised Kullback-Leibler divergence of ``Anchors.divergence``, the mean of both directions
for each of D features, so that 2 D KL is the sum of both directions. The first term is anchored clustering,
the second global feature alignment. Every parameter except the head's learns, under the statistics of the
batch; moments are pooled over the batches seen.

The newest ``replay`` images are kept, and for every new batch there are up to ``iterations`` passes over
them in random batches. Labels are filtered by agreement between the visits of an image: each visit moves an
average of its probabilities, and a pixel belongs to its most likely class in this average if that has a
probability above ``confidence``, and if the newest probability of the class that is most likely now is no
more than 0.001 below the average before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.tta._shared.alignment import AlignedLearner, AlignmentParams, require_statistics
from tesla_med.tta._shared.features import sampled
from tesla_med.tta._shared.gaussians import Anchors, Moments
from tesla_med.tta._shared.learner import LearnerParams
from tesla_med.tta._shared.replay import Replay
from tesla_med.tta.base import METHODS, Scalars

FALL = 0.001
"""By how much the probability of a class may fall from visit to visit for its label to be trusted."""


class TTACParams(AlignmentParams, LearnerParams):
    """Parameters of TTAC; defaults are those of its authors' code for CIFAR-10-C where it has them.

    Their replay holds 4,096 images of 32 x 32, as many pixels as 64 slices of 256 x 256.
    """

    learning_rate: float = Field(1e-3, ge=0, description="of SGD, for all parameters but the head's")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD")
    loss_scale: float = Field(0.05, ge=0, description="of the sum of both terms")
    class_weight: float = Field(1.0, ge=0, description="of the mean divergence over classes")
    global_weight: float = Field(1.0, ge=0, description="of the divergence over all features")
    confidence: float = Field(
        0.9, ge=0, le=1, description="a pixel is assigned to its class only above this probability"
    )
    class_minimum: int = Field(16, ge=1, description="a class with fewer features than this is left out")
    replay: int = Field(
        64, ge=0, description="newest images that every batch learns from again; 0: one step on the batch"
    )
    iterations: int = Field(4, ge=1, description="passes over the replay for every batch, at most")
    label_share: float = Field(
        0.9, gt=0, le=1, description="share of a visit in an image's average of probabilities"
    )


@METHODS.register("ttac")
class TTAC(AlignedLearner):
    """Alignment of class-wise and global Gaussians of features; see the module's docstring.

    Attributes:
        anchors: the source Gaussians of the classes, and of all features as the last one.
        known: (L,) whether the source has enough features of a class to align with.
        replay: the newest images and the averages of their probabilities.
    """

    name = "ttac"
    summary = "aligns class-wise and global Gaussians of features with those of the source"
    citation = "Su et al., Revisiting Realistic Test-Time Training (anchored clustering), NeurIPS 2022"
    protocols = ("Y-O", "Y-M")
    Params = TTACParams

    def setup(self) -> None:
        """Keep the source Gaussians, and start target moments and replay from nothing."""
        p: TTACParams = self.params
        source = require_statistics(self.context, self.model, self.name)
        device = self.context.device
        mean = torch.cat([source.class_mean, source.mean[None]])
        covariance = torch.cat([source.class_covariance, source.covariance[None]])
        self.anchors = Anchors(mean, covariance, device)
        self.known = source.class_pixels.to(device) >= p.class_minimum
        self.moments = Moments.empty(len(mean), mean.shape[1], device)
        self.replay = Replay(p.replay, p.label_share)
        self._positions: Tensor | None = None
        super().setup()

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self.params.learning_rate, momentum=self.params.momentum)

    # ------------------------------------------------------------ adapting

    def adapt(self, images: Tensor) -> Scalars:
        """Take in (N, C, H, W) images in [0, 1], learn from the replay, and return the last terms."""
        p: TTACParams = self.params
        if p.replay == 0:
            return super().adapt(images)
        weight = self.pixel_weight
        images = self.to_device(images)
        self.replay.push(images, weight)
        scalars: Scalars = {}
        try:
            for _ in range(passes_over(len(self.replay), len(images), p.iterations)):
                for positions in self.replay.batches(len(images), self.generator):
                    scalars = self._revisit(positions)
        finally:
            self.pixel_weight, self._positions = weight, None
        return scalars

    def _revisit(self, positions: Tensor) -> Scalars:
        """Take a step on the images of the replay at these positions (n,)."""
        kept, weight = self.replay.images, self.replay.weight
        assert kept is not None  # noqa: S101 - a batch has just been pushed
        places = positions.to(kept.device)
        self._positions = positions
        self.pixel_weight = None if weight is None else weight[places]
        return super().adapt(kept[places])

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the weighted divergences.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.
        """
        p: TTACParams = self.params
        logits, _, found = self.learning(images)
        assert found is not None  # noqa: S101 - the pass was made to return them
        membership = self._membership(logits.detach())
        features, members = sampled(membership, found, p.feature_pixels, self.generator, self.pixel_weight)
        everything = torch.ones_like(members[:, :1])
        target = self.pool(Moments.of(features, torch.cat([members, everything], dim=1)))
        divergence = self.anchors.divergence(target)
        counted = (self.known & (target.weight[:-1].detach() >= p.class_minimum)).float()
        by_class = (divergence[:-1] * counted).sum() / counted.sum().clamp_min(1.0)
        both = p.class_weight * by_class + p.global_weight * divergence[-1]
        loss = p.loss_scale * 2.0 * features.shape[1] * both
        return loss, {"loss/class": by_class.detach(), "loss/global": divergence[-1].detach()}

    def _membership(self, logits: Tensor) -> Tensor:
        """Return (N, L, *spatial): 1 at the class of each pixel whose label is trusted, else 0."""
        probs = logits.softmax(dim=1)
        average = probs
        agrees = torch.ones_like(probs[:, :1], dtype=torch.bool)
        if self._positions is not None:
            before, average = self.replay.visit(self._positions, probs)
            now, winner = probs.max(dim=1, keepdim=True)
            agrees = now > before.gather(1, winner) - FALL
        probability, label = average.max(dim=1)
        trusted = agrees & (probability > self.params.confidence)[:, None]
        member: Tensor = functional.one_hot(label, logits.shape[1]).movedim(-1, 1).float() * trusted
        return member

    def learning_passes(self, slices: int) -> float:
        """Return the forward passes of the updates on a case, with those over the replay."""
        p: TTACParams = self.params
        if p.replay == 0:
            return super().learning_passes(slices)
        batch, updates = min(p.batch_slices or slices, slices), self.updates(slices)
        held = [min(batch * (done + 1), max(p.replay, batch)) for done in range(updates)]
        seen = sum(passes_over(count, batch, p.iterations) * count for count in held)
        return float(p.epochs * seen * self.passes_per_update())

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the common state, the pooled moments and the replay."""
        return super().state_dict() | {"replay": self.replay.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.replay.restore(state["replay"], self.context.device)


def passes_over(held: int, batch: int, most: int) -> int:
    """Return the passes over a replay of ``held`` images for a new batch: few while there are few images."""
    return min(most, held // batch + 1)
