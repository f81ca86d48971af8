"""SHOT: source hypothesis transfer (Liang et al., ICML 2020), for tiles and for pixels.

The head, the source's hypothesis, is frozen; the rest learns by information maximisation, the mean
entropy of the predictions minus the entropy of their class marginal (Sec. 3.2 there), and by cross-entropy
to pseudo-labels (Sec. 3.3): the class whose prototype is nearest, by cosine, to the features that enter the
head. With ``pseudo_label_weight: 0`` this is SHOT-IM.

Prototypes are made before every pass over the slices, from all of them: first means of the features
weighted by the probabilities, then means over the pixels that these are nearest to. Features of all pixels
of a site do not fit into memory, so ``prototype_pixels`` of each slice, drawn at random, stand for them.
Every pixel of a batch is then labelled by its present features, which costs as much as a second head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med import losses
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tta._shared.learner import Learner, LearnerParams, all_but_head
from tesla_med.tta._shared.neighbours import head_features, in_frame_of, rows
from tesla_med.tta.base import METHODS, Scalars


class SHOTParams(LearnerParams):
    """Parameters of SHOT; defaults are its authors' for pretrained layers where they have them."""

    learning_rate: float = Field(1e-3, ge=0, description="of SGD, for all parameters but the head's")
    momentum: float = Field(0.9, ge=0, lt=1, description="of SGD (Nesterov where above 0)")
    weight_decay: float = Field(1e-3, ge=0)
    marginal_weight: float = Field(1.0, ge=0, description="of the class marginal's negative entropy")
    pseudo_label_weight: float = Field(
        0.3, ge=0, description="of the cross-entropy to prototype pseudo-labels; 0: SHOT-IM"
    )
    prototype_pixels: int = Field(256, ge=1, description="pixels a slice that prototypes come from, at most")


@METHODS.register("shot")
class SHOT(Learner):
    """Information maximisation and prototype pseudo-labels, head frozen; see the module's docstring.

    Attributes:
        prototypes: (L, F) of the present pass, None before one and with SHOT-IM.
    """

    name = "shot"
    summary = "information maximisation and pseudo-labels by class prototypes, head frozen"
    citation = "Liang, Hu, Feng: Do We Really Need to Access the Source Data?, ICML 2020"
    protocols = ("N-O", "N-M")
    Params = SHOTParams

    def setup(self) -> None:
        """Prepare learning; there are no prototypes yet."""
        self.prototypes: Tensor | None = None
        super().setup()

    def _adapted(self) -> list[nn.Parameter]:
        return all_but_head(self.model, self.name)

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        p: SHOTParams = self.params
        return torch.optim.SGD(
            parameters,
            lr=p.learning_rate,
            momentum=p.momentum,
            weight_decay=p.weight_decay,
            nesterov=p.momentum > 0,
        )

    @property
    def _labels(self) -> bool:
        return bool(self.params.pseudo_label_weight > 0)

    @property
    def _wants_graphs(self) -> bool:
        return super()._wants_graphs and not self._labels  # a graph does not hand the features out

    # ------------------------------------------------------------ adapting

    @torch.no_grad()
    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:
        """Make the prototypes of this pass from the slices ahead; running statistics stay."""
        super().start_epoch(epoch, batches)
        if not self._labels:
            return
        samples = []
        for images in batches:
            with batch_statistics(self.model, momentum=None), head_features(self.model) as found:
                logits = self.logits(self.model, self.to_device(images))
            samples.append(self._sample(logits, in_frame_of(logits, found[-1])))
        if samples:
            features, probs = (torch.cat(column) for column in zip(*samples, strict=True))
            self.prototypes = class_prototypes(features, probs)

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return information maximisation plus ``pseudo_label_weight`` times the cross-entropy.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.
        """
        p: SHOTParams = self.params
        if self._labels:
            with head_features(self.model) as found:
                logits, _ = self._learning(images)
        else:
            logits, _ = self._learning(images)
        entropy, marginal = losses.entropy(logits), losses.class_marginal(logits)
        loss = entropy + p.marginal_weight * marginal
        scalars: Scalars = {"loss/entropy": entropy.detach(), "loss/class_marginal": marginal.detach()}
        if self._labels:
            features = in_frame_of(logits, found[-1].detach())
            trained = functional.cross_entropy(logits, self._pseudo_labels(logits.detach(), features))
            loss = loss + p.pseudo_label_weight * trained
            scalars["loss/pseudo_labels"] = trained.detach()
        return loss, scalars

    def _pseudo_labels(self, logits: Tensor, features: Tensor) -> Tensor:
        """Return the class (N, *spatial) of the nearest prototype; outside a pass, those of the batch."""
        prototypes = self.prototypes
        if prototypes is None:
            prototypes = class_prototypes(*self._sample(logits, features))
        return nearest_prototype(features, prototypes)

    def _sample(self, logits: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (P, F) and probabilities (P, L) of pixels drawn once for all slices."""
        size = logits[0, 0].numel()
        drawn = torch.randperm(size, generator=self.generator)[: self.params.prototype_pixels]
        positions = drawn.to(logits.device)
        return rows(features, positions), rows(logits, positions).softmax(dim=1)

    def passes(self, slices: int) -> float:
        """Return forward passes, a backward counted as two, with those for the prototypes."""
        ahead = self.params.epochs * self._slices_seen(slices) if self._labels else 0
        return super().passes(slices) + ahead

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the common state and the prototypes."""
        prototypes = None if self.prototypes is None else self.prototypes.clone()
        return super().state_dict() | {"prototypes": prototypes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        prototypes = state["prototypes"]
        self.prototypes = None if prototypes is None else prototypes.to(self.context.device, copy=True)


def class_prototypes(features: Tensor, probs: Tensor) -> Tensor:
    """Return a prototype a class, of length 1: both rounds of Sec. 3.3.

    Args:
        features: (P, F) float32.
        probs: (P, L) of the same pixels.

    Returns:
        (L, F); zeros for a class that is nearest to no pixel, which then labels none.
    """
    weighted = functional.normalize(probs.T @ features, dim=1)
    labels = nearest_prototype(features, weighted)
    held = functional.one_hot(labels, probs.shape[1]).to(features)
    return functional.normalize(held.T @ features, dim=1)


def nearest_prototype(features: Tensor, prototypes: Tensor) -> Tensor:
    """Return the class (N, *spatial) whose prototype is nearest by cosine.

    The length of a feature does not change which one that is, so features stay as they are.

    Args:
        features: (N, F, *spatial).
        prototypes: (L, F) of length 1 or 0; those of length 0 are never the nearest.
    """
    count, spatial = len(features), features.shape[2:]
    flat = features.flatten(2) if spatial else features[..., None]
    similarity = torch.bmm(prototypes.expand(count, -1, -1), flat)  # einsum would copy the features
    similarity.masked_fill_(~prototypes.any(dim=1)[:, None], -torch.inf)
    return similarity.argmax(dim=1).view(count, *spatial)
