"""SHOT: source hypothesis transfer (Liang et al., ICML 2020), for tiles and for pixels.

The head, which is the source's hypothesis, stays frozen, and everything else learns. For each batch, SHOT
takes one step down

    mean of  - sum_k p_k log p_k   +   sum_k m_k log m_k   +   beta * mean of  - log p_y.

The first two terms are information maximisation (Sec. 3.2): the entropy of the predictions p and the negative
entropy of their mean m, the class marginal. ``marginal_target: source`` makes the second KL(m || q) with the
class shares q that the source model gives the batch, for classes that do not take equal shares (as Bateson et
al. 2021, arXiv:2108.03152, do with a class-ratio prior). The third is the cross-entropy to pseudo-labels y
(Sec. 3.3): the class whose prototype is nearest, by cosine, to the features that enter the head.
``pseudo_label_weight: 0``, which is beta, turns this into SHOT-IM.

Prototypes are made before every pass over the slices, from all of them: first as means of the features
weighted by the probabilities, then as means over the pixels that are nearest to the first ones. The features
of all pixels of a site do not fit into memory, so ``prototype_pixels`` of each slice, drawn at random, stand
for them. Every pixel of a batch is then labelled by its present features, at the cost of a second head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med import losses
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tta._mechanics.parameters import all_but_head
from tesla_med.tta._shared.features import head_features, in_frame_of, sampled
from tesla_med.tta._shared.learner import Learner, LearnerParams
from tesla_med.tta._shared.passes import NetworkPass
from tesla_med.tta.base import METHODS, Scalars


class SHOTParams(LearnerParams):
    """Parameters of SHOT; defaults are its authors' for pretrained layers where they have them."""

    learning_rate: float = Field(1e-3, ge=0, description="of SGD, for all parameters but the head's")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD (Nesterov where above 0)")
    weight_decay: float = Field(1e-3, ge=0)
    marginal_weight: float = Field(1.0, ge=0, description="of the class marginal's negative entropy")
    marginal_target: Literal["uniform", "source"] = Field(
        "uniform",
        description="class shares towards which the marginal is pulled: equal ones, as its authors do, or "
        "those that the source model gives a batch under the batch's own normalisation statistics",
    )
    pseudo_label_weight: float = Field(
        0.3, ge=0, description="of the cross-entropy to prototype pseudo-labels; 0: SHOT-IM"
    )
    prototype_pixels: int = Field(256, ge=1, description="prototypes use at most this many pixels per slice")


@METHODS.register("shot")
class SHOT(Learner):
    """Information maximisation and prototype pseudo-labels, head frozen; see the module's docstring.

    Attributes:
        prototypes: (L, F) of the present pass over the slices; None before the first and with SHOT-IM.
        source: a frozen copy of the source model, if ``marginal_target`` asks for it.
    """

    name = "shot"
    summary = "maximises information and learns from pseudo-labels by class prototypes, with a frozen head"
    citation = "Liang, Hu, Feng: Do We Really Need to Access the Source Data?, ICML 2020"
    protocols = ("N-O", "N-M")
    Params = SHOTParams

    def setup(self) -> None:
        """Prepare learning, without prototypes."""
        self.prototypes: Tensor | None = None
        asked = self.params.marginal_target == "source"
        self.source = copy.deepcopy(self.model).requires_grad_(False) if asked else None
        super().setup()

    def make_passes(self) -> None:
        """Make the pass that learns, and that of the source model, which moves no statistics."""
        super().make_passes()
        source, pool = self.source, self.graph_pool()
        self._anchor = None if source is None else NetworkPass(source, self.logits, momentum=None, pool=pool)

    def updated_parameters(self) -> list[nn.Parameter]:
        """Return everything but the head."""
        return all_but_head(self.model, self.name)

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with Nesterov momentum."""
        p: SHOTParams = self.params
        return torch.optim.SGD(
            parameters,
            lr=p.learning_rate,
            momentum=p.momentum,
            weight_decay=p.weight_decay,
            nesterov=p.momentum > 0,
        )

    @property
    def needs_features(self) -> bool:
        """Whether there are pseudo-labels, which SHOT-IM does without."""
        return bool(self.params.pseudo_label_weight > 0)

    def passes_per_update(self) -> float:
        """Count also the pass from which prototypes are made, and the source's if there is one."""
        return super().passes_per_update() + self.needs_features + (self.source is not None)

    # ------------------------------------------------------------ objective

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return information maximisation plus ``pseudo_label_weight`` times the cross-entropy.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.
        """
        p: SHOTParams = self.params
        prior = self._prior(images)
        logits, _, features = self.learning(images)
        weight = self.pixel_weight
        entropy, marginal = losses.entropy(logits, weight), losses.class_marginal(logits, prior, weight)
        loss = entropy + p.marginal_weight * marginal
        scalars: Scalars = {"loss/entropy": entropy.detach(), "loss/class_marginal": marginal.detach()}
        if features is not None:
            labels = self._pseudo_labels(logits.detach(), features.detach())
            trained = losses.label_cross_entropy(logits, labels, weight)
            loss = loss + p.pseudo_label_weight * trained
            scalars["loss/pseudo_labels"] = trained.detach()
        return loss, scalars

    def _prior(self, images: Tensor) -> Tensor | None:
        """Return the class shares (L,) to which the marginal is drawn; None for equal ones."""
        if self._anchor is None:
            return None
        return losses.class_shares(self._anchor(images).logits.softmax(dim=1), self.pixel_weight)

    def _pseudo_labels(self, logits: Tensor, features: Tensor) -> Tensor:
        """Return the class (N, *spatial) of the nearest prototype; outside a pass, of the batch's own."""
        prototypes = self.prototypes
        if prototypes is None:
            prototypes = class_prototypes(*self._sample(logits, features))
        return nearest_prototype(in_frame_of(logits, features), prototypes)

    # ------------------------------------------------------------ prototypes

    @torch.no_grad()
    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:
        """Make the prototypes of this pass from the slices ahead; running statistics stay as they are."""
        super().start_epoch(epoch, batches)
        if not self.needs_features:
            return
        samples = []
        for images in batches:
            with batch_statistics(self.model, momentum=None), head_features(self.model) as found:
                logits = self.logits(self.model, self.to_device(images))
            samples.append(self._sample(logits, found[-1]))
        if samples:
            features, probs = (torch.cat(column) for column in zip(*samples, strict=True))
            self.prototypes = class_prototypes(features, probs)

    def _sample(self, logits: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (P, F) and probabilities (P, L) of pixels drawn once for all slices."""
        count, weight = self.params.prototype_pixels, self.pixel_weight
        found, drawn = sampled(logits, features, count, self.generator, weight)
        return found, drawn.softmax(dim=1)

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
    """Return one prototype per class, of length 1, after both rounds of Sec. 3.3.

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

    The length of a feature does not change which prototype that is, so features are not normalised.

    Args:
        features: (N, F, *spatial).
        prototypes: (L, F) of length 1 or 0; those of length 0 are never the nearest.
    """
    count, spatial = len(features), features.shape[2:]
    flat = features.flatten(2) if spatial else features[..., None]
    similarity = torch.bmm(prototypes.expand(count, -1, -1), flat)  # einsum would copy the features
    similarity.masked_fill_(~prototypes.any(dim=1)[:, None], -torch.inf)
    return similarity.argmax(dim=1).view(count, *spatial)
