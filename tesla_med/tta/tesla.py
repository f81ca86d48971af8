"""TeSLA: self-learning with automatic adversarial augmentation (Tomar et al., CVPR 2023).

For each batch of slices:

1. The teacher gives pseudo-labels y, averaged over weak views (Eq. 5) and, for tiles if asked for, over
   nearest neighbours in a memory of earlier tiles (Eq. 6).
2. The policy takes one step against the teacher on views drawn from it (Eq. 8 to 13).
3. The student, with predictions p on the clean images and q on adversarial views, takes one step down

       mean of  - sum_k p_k log y_k  +  marginal_weight * sum_k m_k log m_k    (Eq. 3, m is the mean of p)
       + distillation_weight * mean of KL(y || q)                              (Eq. 4).

4. The teacher moves as the moving average of the student.

Everything but the head learns. The teacher predicts. The pages in docs/method say where the paper and the
release differ, and what is done here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med import losses
from tesla_med.config.models import Protocol
from tesla_med.errors import AdaptationError
from tesla_med.models.base import Network, norm_layers
from tesla_med.models.normalisation import (
    Statistics,
    blend_running_statistics,
    copied,
    running_statistics,
)
from tesla_med.tta._mechanics.parameters import choose, clip_each, relative_size
from tesla_med.tta._mechanics.ranks import share_gradients
from tesla_med.tta._shared.augmented import AugmentationParams, AugmentedMethod
from tesla_med.tta._shared.neighbours import Refinement
from tesla_med.tta._shared.passes import NetworkPass, Output
from tesla_med.tta._shared.teacher import (
    make_teacher,
    require_slices,
    update_teacher,
    view_mean,
    with_neighbours,
)
from tesla_med.tta.base import METHODS, MethodParams, Scalars

SHARES_MOMENTUM = 0.1
"""Share of a batch in the running class shares of ``marginal_target: teacher``."""


class TeSLAParams(AugmentationParams, MethodParams):
    """Parameters of TeSLA; defaults are those that the paper gives for MRI, if any."""

    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = Field(2e-4, ge=0)
    relative_rate: bool = Field(
        False,
        description="multiply the learning rate of each weight tensor by the size of its weights over that "
        "of a newly made layer, so that a step changes every network by a like share",
    )
    weight_decay: float = Field(
        5e-4, ge=0, description="decoupled with adamw, added to the gradient with adam and sgd"
    )
    sgd_momentum: float = Field(0.9, ge=0, lt=1, description="of sgd")
    clip_norm: float | None = Field(1.0, gt=0, description="of each parameter's own gradient")
    self_learning: Literal["flipped", "plain"] = Field(
        "flipped", description="cross-entropy to the pseudo-labels: flipped as in Eq. 3, or plain"
    )
    marginal_weight: float = Field(1.0, ge=0, description="of the class-marginal term of Eq. 3")
    marginal_target: Literal["uniform", "teacher", "source"] = Field(
        "uniform",
        description="class shares towards which the marginal is pulled: equal ones, the teacher's running "
        "ones, or those that the source model gives a batch under the batch's own normalisation statistics",
    )
    adapt: Literal["all", "encoder", "norms"] = Field(
        "all",
        description="what the student learns, the head never: all, the encoder, scale and shift of norms",
    )
    freeze_norm_affine: bool = False
    reliability: float = Field(
        0.0, ge=0, description="a pixel counts (1 - normalised entropy of its pseudo-label) to this power"
    )

    neighbours: int = Field(
        1, ge=1, description="n: tiles whose pseudo-labels are averaged, the tile itself included; 1: off"
    )
    queue_size: int = Field(1, ge=1, description="N_Q: tiles of each class that neighbours come from")

    predict_views: int = Field(1, ge=1, description="weak views that a prediction averages")

    moving_passes: Literal["clean", "all"] = Field(
        "clean", description="which passes move running statistics; the release: all"
    )
    statistics_momentum: float = Field(0.1, gt=0, le=1)
    statistics_warm_up: bool = Field(
        False,
        description="the t-th update moves running statistics by 1/t until that falls to "
        "statistics_momentum, so that they are means over the images seen, without the source's",
    )
    teacher_clean_moves: int = Field(
        1, ge=1, description="times a clean batch moves the teacher's statistics; the release: 2"
    )
    refresh_statistics: bool = Field(
        False, description="let one pass over the slices move running statistics before the first update"
    )
    predict_statistics: Literal["running", "volume"] = Field(
        "running", description="normalise a prediction by running statistics or by the case's own"
    )
    max_slices: int = Field(64, ge=1, description="'volume' statistics use at most this many slices")
    statistics_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the images' own normalisation statistics in updates, and in predictions by "
        "those of a volume; the rest is the source's",
    )
    neighbour_share: float = Field(
        0.0,
        ge=0,
        le=0.33,
        description="weight of each neighbouring slice in the predicted probabilities of a slice",
    )


@METHODS.register("tesla")
class TeSLA(AugmentedMethod):
    """Self-learning with a teacher and a learned adversarial policy; see the module's docstring.

    Attributes:
        student: the network that learns.
        teacher: its moving average, which gives pseudo-labels and predicts.
        source: a frozen copy of the source model, if ``marginal_target`` asks for it.
        memory: features and pseudo-labels of earlier tiles, which refine those of later ones.
        class_shares: the running class shares of ``marginal_target: teacher``.
    """

    name = "tesla"
    summary = "learns from a moving-average teacher on clean images and on learned adversarial views"
    citation = "Tomar et al., TeSLA: Test-Time Self-Learning With Automatic Adversarial Augmentation, 2023"
    protocols: ClassVar[tuple[Protocol, ...]] = ("N-O", "N-M")
    binary_regions = True
    needs_features: ClassVar[bool] = False
    """Whether :meth:`added_loss` looks at the student's features."""
    Params = TeSLAParams

    @classmethod
    def joins(cls, params: Any) -> bool:
        """Whether nothing is kept, or mixed in, that a process knows of its own share alone."""
        plain = params.statistics_share == 1.0 and params.marginal_target == "uniform"
        return cls is TeSLA and plain and params.neighbours == 1 and params.reliability == 0

    def setup(self) -> None:
        """Freeze the head, and make the teacher, the policy and both optimisers."""
        p: TeSLAParams = self.params
        self.student = self.model
        self._choose_parameters()
        self._check_neighbours()
        self.memory = Refinement(p.neighbours, p.queue_size)
        self.teacher = make_teacher(self.student)
        self.source_statistics = copied(running_statistics(self.student))
        self.policy = self._make_policy()
        self.optimizer = self._make_optimizer()
        self.policy_optimizer = self._make_policy_optimizer()
        self.source = copy.deepcopy(self.student) if p.marginal_target == "source" else None
        self.class_shares: Tensor | None = None

    def _choose_parameters(self) -> None:
        choose(self.student, self.params.adapt, self.name)
        self.student.head.requires_grad_(False)
        if self.params.freeze_norm_affine:
            for layer in norm_layers(self.student):
                for parameter in layer.parameters():
                    parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.student.parameters()):
            raise AdaptationError(f"method {self.name!r} found 0 parameters to adapt: the model is all head")

    def _check_neighbours(self) -> None:
        require_slices(self.student, self.name, self.params.neighbour_share)
        if self.params.neighbours > 1 and self.student.task != "classification":
            raise AdaptationError(
                f"method {self.name!r}: neighbours is {self.params.neighbours}, but they are sought among "
                f"tiles, and this model segments pixels; set methods.{self.name}.neighbours to 1, which is "
                "off, as in the paper's MRI recipes"
            )

    def _make_optimizer(self) -> torch.optim.Optimizer:
        p: TeSLAParams = self.params
        trainable = [item for item in self.student.parameters() if item.requires_grad]
        fused = self.context.device.type == "cuda" or None
        rate, decay = p.learning_rate, p.weight_decay
        groups: list[Any] = trainable
        if p.relative_rate:
            groups = [{"params": [item], "lr": rate * relative_size(item)} for item in trainable]
        if p.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=rate, weight_decay=decay, momentum=p.sgd_momentum)
        kind = torch.optim.Adam if p.optimizer == "adam" else torch.optim.AdamW
        return kind(groups, lr=rate, weight_decay=decay, fused=fused)

    def make_passes(self) -> None:
        """Make every kind of pass of an update: who is asked, what it moves, what it returns."""
        p: TeSLAParams = self.params
        momentum = p.statistics_momentum
        augmented = momentum if p.moving_passes == "all" else None
        repeated = 1.0 - (1.0 - momentum) ** p.teacher_clean_moves
        self._pool = self.graph_pool()
        self._pool.waiting = p.statistics_warm_up  # until the momentum no longer changes
        share, rest = self._mixture
        make = partial(NetworkPass, logits=self.logits, pool=self._pool, rest=rest, share=share)
        teacher, student, refines = self.teacher, self.student, p.neighbours > 1
        self._clean = make(teacher, momentum=repeated, tap=self._tap, features=refines)
        self._weak = make(teacher, momentum=augmented, features=refines)
        self._attacked = make(teacher, momentum=augmented, tap=self._tap, gradient=True)
        self._learning = make(student, momentum=momentum, features=self.needs_features, gradient=True)
        self._distilling = make(student, momentum=augmented, gradient=True)
        self._anchor = None if self.source is None else make(self.source, momentum=None)

    # ------------------------------------------------------------ adapting

    def adapt(self, images: Tensor) -> Scalars:
        """Update the policy, the student and the teacher on (N, C, H, W) images in [0, 1]."""
        images = self.to_device(images)
        if self.params.statistics_warm_up:
            self._set_momentum(max(1.0 / (self.steps + 1), self.params.statistics_momentum))
        pseudo_labels, reference = self._pseudo_labels(images)
        policy_loss = self._update_policy(images, reference)
        scalars = self._update_student(images, pseudo_labels)
        update_teacher(self.teacher, self.student, self.params.teacher_momentum)
        self.steps += 1
        return scalars if policy_loss is None else scalars | {"loss/policy": policy_loss}

    def _pseudo_labels(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return refined pseudo-labels (Eq. 5 and 6), and the clean activations for the severity term."""
        labels, reference, features = self._averaged(images)
        return labels if features is None else self.memory.refined(features, labels), reference

    def _update_student(self, images: Tensor, pseudo_labels: Tensor) -> Scalars:
        """Take one student step: Eq. 3 on the clean images, Eq. 4 on adversarial views."""
        p: TeSLAParams = self.params
        self.optimizer.zero_grad(set_to_none=True)
        scalars = self._learn(images, pseudo_labels)
        distilled = torch.zeros((), device=images.device)
        if p.distillation_weight > 0:
            distilled = self._distil(images, pseudo_labels)
            (p.distillation_weight * distilled).backward()  # type: ignore[no-untyped-call]
        share_gradients(self.student.parameters())
        if p.clip_norm is not None:
            clip_each(self.student, p.clip_norm)
        self.optimizer.step()
        return scalars | {"loss/distillation": distilled.detach()}

    def _learn(self, images: Tensor, pseudo_labels: Tensor) -> Scalars:
        """Add the gradient of the self-learning loss on the clean images (Eq. 3), and return its terms.

        The autograd graph ends here, because no pass can be captured while one of the same parameters lives.
        """
        p: TeSLAParams = self.params
        prior = self._prior(images, pseudo_labels)
        output = self._learning(images)
        added, record = self.added_loss(output)
        weight = self._pixel_weight(pseudo_labels, self.pixel_weight)
        plain = p.self_learning == "plain"
        term = losses.cross_entropy if plain else losses.flipped_cross_entropy
        self_learned = term(output.logits, pseudo_labels, weight)
        marginal = losses.class_marginal(output.logits, prior, self.pixel_weight, apart=self.student.apart)
        loss = self_learned + p.marginal_weight * marginal
        (loss if added is None else loss + added).backward()  # type: ignore[no-untyped-call]
        return {
            "loss/cross_entropy" if plain else "loss/flipped_cross_entropy": self_learned.detach(),
            "loss/class_marginal": marginal.detach(),
            **record,
        }

    def added_loss(self, output: Output) -> tuple[Tensor | None, Scalars]:
        """Return what a variant adds to the student's loss on clean images, and its record.

        Args:
            output: of the student on the clean images, with gradient.
        """
        return None, {}

    @torch.no_grad()
    def _prior(self, images: Tensor, pseudo_labels: Tensor) -> Tensor | None:
        """Return the class shares (L,) to which the marginal is drawn; None for the paper's equal ones."""
        if self.params.marginal_target == "uniform":
            return None
        shares_of = partial(losses.class_shares, pixel_weight=self.pixel_weight, apart=self.student.apart)
        if self._anchor is not None:
            return shares_of(self._anchor(images).logits.softmax(dim=1))
        shares = shares_of(pseudo_labels)
        before = self.class_shares
        self.class_shares = (
            shares if before is None else torch.lerp(before.to(shares), shares, SHARES_MOMENTUM)
        )
        return self.class_shares

    def _pixel_weight(self, pseudo_labels: Tensor, measured: Tensor | None) -> Tensor | None:
        if self.params.reliability == 0:
            return measured
        certainty = 1.0 - losses.normalised_entropy(pseudo_labels)
        weight: Tensor = certainty**self.params.reliability
        return weight if measured is None else weight * measured

    # ------------------------------------------------------------ running statistics

    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:
        """Refresh running statistics before the first pass, and restart the policy, if asked to."""
        super().start_epoch(epoch, batches)
        if epoch == 0 and self.params.refresh_statistics:
            self._refresh(batches)

    @torch.no_grad()
    def _refresh(self, batches: Iterable[Tensor]) -> None:
        """Let the batches move the running statistics, which are the same for student and teacher."""
        move = NetworkPass(self.student, self.logits, momentum=self.params.statistics_momentum)
        for images in batches:
            move(self.to_device(images))
        blend_running_statistics(self.teacher, running_statistics(self.student), 0.0)

    def _set_momentum(self, momentum: float) -> None:
        """Let clean passes move running statistics by this share of a batch from now on."""
        self._clean.momentum = 1.0 - (1.0 - momentum) ** self.params.teacher_clean_moves
        self._learning.momentum = momentum
        self._pool.waiting = momentum > self.params.statistics_momentum

    # ------------------------------------------------------------ predicting

    @property
    def predictor(self) -> Network:
        """The teacher."""
        return self.teacher

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Return the teacher's probabilities (N, L, *spatial), the mean over ``predict_views`` weak views.

        The views are the same at every call. ``neighbour_share`` then mixes neighbouring slices.
        """
        with self.deployed(images) as teacher:
            result = view_mean(self, teacher, images)
            if self.params.neighbour_share > 0:
                result = with_neighbours(result, self.params.neighbour_share)
        return result

    @property
    def _mixture(self) -> tuple[float, Statistics | None]:
        share: float = self.params.statistics_share
        mixed = share < 1.0 and bool(self.source_statistics)
        return (share, self.source_statistics) if mixed else (1.0, None)

    def deployed_params(self, images: Tensor | None = None) -> dict[str, Any]:
        """Return the parameters of ``source`` that repeat the masks: of views and neighbours, too, if any."""
        p: TeSLAParams = self.params
        names = ["predict_views", "weak_scale", "weak_shift", "weak_flip"] if p.predict_views > 1 else []
        names += ["neighbour_share"] if p.neighbour_share > 0 else []
        return super().deployed_params(images) | {name: getattr(p, name) for name in names}

    def passes_per_update(self) -> float:
        """Count the weak views, the policy step, both passes of the student, and the source's if any."""
        views: int = self.params.weak_views + len(self.params.corrected_views)
        return views + self._policy_passes() + 6 + (self.source is not None)

    def predicting_passes(self, slices: int) -> float:
        """Return the forward passes of a prediction, with every view."""
        more_views: int = self.params.predict_views - 1
        return super().predicting_passes(slices) + slices * more_views

    # ------------------------------------------------------------ state

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the student, the teacher and the policy."""
        return {"student": self.student, "teacher": self.teacher, "policy": self.policy}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the student's optimiser, and the policy's if the policy learns."""
        return {"student": self.optimizer, **super().optimizers()}

    def state_dict(self) -> dict[str, Any]:
        """Return the common state, the running class shares and the memory."""
        shares = None if self.class_shares is None else self.class_shares.clone()
        return super().state_dict() | {"class_shares": shares, "memory": self.memory.copied()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        shares = state["class_shares"]
        self.class_shares = None if shares is None else shares.clone()
        self.memory.restore(state["memory"], self.context.device)
