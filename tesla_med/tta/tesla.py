"""TeSLA: self-learning with automatic adversarial augmentation (Tomar et al., CVPR 2023).

One update, on a batch of slices:

1. the teacher's pseudo-labels, averaged over weak views (Eq. 5), and of tiles, where asked for, over
   nearest neighbours in a memory of earlier tiles (Eq. 6);
2. the policy, by one step against the teacher on views drawn from it (Eq. 8 to 13);
3. the student, on the clean images (flipped cross-entropy and class marginal, Eq. 3) and on
   adversarial views (distillation, Eq. 4);
4. the teacher, as the moving average of the student.

The teacher predicts. docs/method says where paper and release part and what is done here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med import losses
from tesla_med.config.models import Protocol
from tesla_med.errors import AdaptationError
from tesla_med.models.base import Network, norm_layers
from tesla_med.models.normalisation import blend_running_statistics, running_statistics
from tesla_med.tta._shared.augmented import AugmentationParams, AugmentedMethod
from tesla_med.tta._shared.augmented import severity as severity
from tesla_med.tta._shared.neighbours import Memory, neighbour_mean
from tesla_med.tta._shared.passes import GraphPool, NetworkPass
from tesla_med.tta._shared.teacher import make_teacher, update_teacher
from tesla_med.tta.base import METHODS, MethodParams, Scalars

SHARES_MOMENTUM = 0.1
"""Share of a batch in the running class shares of ``marginal_target: teacher``."""


class TeSLAParams(AugmentationParams, MethodParams):
    """Parameters of TeSLA; defaults are the paper's for MRI where it gives them."""

    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    learning_rate: float = Field(2e-4, ge=0)
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
        description="class shares that the marginal is drawn to: equal ones, the teacher's running ones, "
        "or those that the source model gives a batch under the batch's own normalisation statistics",
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
    max_slices: int = Field(64, ge=1, description="slices that 'volume' statistics come from at most")
    neighbour_share: float = Field(
        0.0, ge=0, le=0.33, description="of each neighbouring slice in a slice's predicted probabilities"
    )


@METHODS.register("tesla")
class TeSLA(AugmentedMethod):
    """Student, EMA teacher, learned adversarial policy; see the module's docstring."""

    name = "tesla"
    summary = "self-learning with a teacher and learned adversarial augmentation"
    citation = "Tomar et al., TeSLA: Test-Time Self-Learning With Automatic Adversarial Augmentation, 2023"
    protocols: ClassVar[tuple[Protocol, ...]] = ("N-O", "N-M")
    aligns: ClassVar[bool] = False
    """Whether the student's features have a loss of their own."""
    Params = TeSLAParams

    def setup(self) -> None:
        """Freeze the head, make the teacher, the policy and both optimisers."""
        p: TeSLAParams = self.params
        self.student = self.model
        self._choose_parameters()
        self._check_neighbours()
        self.memory = Memory(p.queue_size, balanced=True)  # features and pseudo-labels
        self.teacher = make_teacher(self.student)
        self.policy = self._make_policy()
        self.optimizer = self._make_optimizer()
        self.policy_optimizer = self._make_policy_optimizer()
        self.source = copy.deepcopy(self.student) if p.marginal_target == "source" else None
        self._make_passes()
        self.class_shares: Tensor | None = None

    def _make_optimizer(self) -> torch.optim.Optimizer:
        p: TeSLAParams = self.params
        trainable = [item for item in self.student.parameters() if item.requires_grad]
        fused = self.context.device.type == "cuda" or None
        rate, decay = p.learning_rate, p.weight_decay
        if p.optimizer == "sgd":
            return torch.optim.SGD(trainable, lr=rate, weight_decay=decay, momentum=p.sgd_momentum)
        kind = torch.optim.Adam if p.optimizer == "adam" else torch.optim.AdamW
        return kind(trainable, lr=rate, weight_decay=decay, fused=fused)

    @property
    def _refines(self) -> bool:
        return bool(self.params.neighbours > 1)

    def _check_neighbours(self) -> None:
        if self._refines and self.student.task != "classification":
            raise AdaptationError(
                f"method 'tesla': neighbours is {self.params.neighbours}, but they are sought among tiles, "
                "and this model segments pixels; set methods.tesla.neighbours to 1, which is off, as in the "
                "paper's MRI recipes"
            )

    def _make_passes(self) -> None:
        """Make every kind of pass of an update: who is asked, what it moves, what it returns."""
        p: TeSLAParams = self.params
        augmented = p.statistics_momentum if p.moving_passes == "all" else None
        repeated = 1.0 - (1.0 - p.statistics_momentum) ** p.teacher_clean_moves
        pool = GraphPool(self.context.cuda_graphs and self.limit is None)
        pool.waiting = p.statistics_warm_up  # till the momentum stays as it is
        self._pool = pool
        teacher, student, refines = self.teacher, self.student, self._refines
        self._clean = NetworkPass(
            teacher, self.logits, momentum=repeated, tap=True, features=refines, pool=pool
        )
        self._weak = NetworkPass(teacher, self.logits, momentum=augmented, features=refines, pool=pool)
        self._attacked = NetworkPass(
            teacher, self.logits, momentum=augmented, tap=True, gradient=True, pool=pool
        )
        self._learning = NetworkPass(
            student,
            self.logits,
            momentum=p.statistics_momentum,
            features=self.aligns,
            gradient=True,
            pool=pool,
        )
        self._distilling = NetworkPass(student, self.logits, momentum=augmented, gradient=True, pool=pool)
        self._anchor = (
            None if self.source is None else NetworkPass(self.source, self.logits, momentum=None, pool=pool)
        )

    def _choose_parameters(self) -> None:
        self.student.requires_grad_(True)
        self.student.head.requires_grad_(False)
        if self.params.freeze_norm_affine:
            for layer in norm_layers(self.student):
                for parameter in layer.parameters():
                    parameter.requires_grad_(False)
        if not any(parameter.requires_grad for parameter in self.student.parameters()):
            raise AdaptationError(f"method {self.name!r} found 0 parameters to adapt: the model is all head")

    # ------------------------------------------------------------ adapting

    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:
        """Refresh running statistics before the first pass, restart the policy where asked to."""
        super().start_epoch(epoch, batches)
        if epoch == 0 and self.params.refresh_statistics:
            self._refresh(batches)

    @torch.no_grad()
    def _refresh(self, batches: Iterable[Tensor]) -> None:
        """Let the batches move the running statistics, the same for student and teacher."""
        move = NetworkPass(self.student, self.logits, momentum=self.params.statistics_momentum)
        for images in batches:
            move(self.to_device(images))
        blend_running_statistics(self.teacher, running_statistics(self.student), 0.0)

    def adapt(self, images: Tensor) -> Scalars:
        """Do one update of policy, student and teacher on (N, C, H, W) images in [0, 1]."""
        images = self.to_device(images)
        if self.params.statistics_warm_up:
            self._set_momentum(max(1.0 / (self.steps + 1), self.params.statistics_momentum))
        pseudo_labels, reference = self._pseudo_labels(images)
        policy_loss = self._update_policy(images, reference)
        scalars = self._update_student(images, pseudo_labels)
        update_teacher(self.teacher, self.student, self.params.teacher_momentum)
        self.steps += 1
        return scalars if policy_loss is None else scalars | {"loss/policy": policy_loss}

    def _set_momentum(self, momentum: float) -> None:
        """Let clean passes move running statistics by this share of a batch from now on."""
        self._clean.momentum = 1.0 - (1.0 - momentum) ** self.params.teacher_clean_moves
        self._learning.momentum = momentum
        self._pool.waiting = momentum > self.params.statistics_momentum

    def _pseudo_labels(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return refined pseudo-labels (Eq. 5, 6), and the clean activations for the severity term."""
        labels, reference, features = self._averaged(images)
        return labels if features is None else self._refined(features, labels), reference

    @torch.no_grad()
    def _refined(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the mean pseudo-label of the nearest neighbours (Eq. 6), (N, L).

        The memory takes the batch in first, so that a tile that stays in it is its own first neighbour.

        Args:
            features: (N, F) averaged over weak views.
            labels: (N, L) likewise.
        """
        queries = functional.normalize(features, dim=1)
        self.memory.push(queries, labels)
        keys, probs = self.memory.columns
        return neighbour_mean(queries, keys, probs, self.params.neighbours)

    @torch.no_grad()
    def _prior(self, images: Tensor, pseudo_labels: Tensor) -> Tensor | None:
        """Return the class shares that the marginal is drawn to, None for the paper's uniform ones."""
        if self.params.marginal_target == "uniform":
            return None
        if self._anchor is not None:
            return class_shares(self._anchor(images)[0].softmax(dim=1))
        shares = class_shares(pseudo_labels)
        before = self.class_shares
        self.class_shares = (
            shares if before is None else torch.lerp(before.to(shares), shares, SHARES_MOMENTUM)
        )
        return self.class_shares

    def _pixel_weight(self, pseudo_labels: Tensor) -> Tensor | None:
        if self.params.reliability == 0:
            return None
        certainty = 1.0 - losses.normalised_entropy(pseudo_labels)
        weight: Tensor = certainty**self.params.reliability
        return weight

    def _update_student(self, images: Tensor, pseudo_labels: Tensor) -> Scalars:
        """Take one student step: Eq. 3 on the clean images, Eq. 4 on adversarial views."""
        p: TeSLAParams = self.params
        self.optimizer.zero_grad(set_to_none=True)
        scalars = self._learn(images, pseudo_labels)
        distilled = torch.zeros((), device=images.device)
        if p.distillation_weight > 0:
            distilled = self._distil(images, pseudo_labels)
            (p.distillation_weight * distilled).backward()  # type: ignore[no-untyped-call]
        if p.clip_norm is not None:
            clip_each(self.student, p.clip_norm)
        self.optimizer.step()
        return scalars | {"loss/distillation": distilled.detach()}

    def _learn(self, images: Tensor, pseudo_labels: Tensor) -> Scalars:
        """Add the gradient of the self-learning loss on the clean images (Eq. 3), and return its terms.

        The graph ends here: a pass cannot be captured while one of the same parameters is alive.
        """
        p: TeSLAParams = self.params
        prior = self._prior(images, pseudo_labels)
        logits, added, record = self._clean_terms(images)
        weight = self._pixel_weight(pseudo_labels)
        plain = p.self_learning == "plain"
        term = losses.cross_entropy if plain else losses.flipped_cross_entropy
        self_learned = term(logits, pseudo_labels, weight)
        marginal = losses.class_marginal(logits, prior)
        loss = self_learned + p.marginal_weight * marginal
        (loss if added is None else loss + added).backward()  # type: ignore[no-untyped-call]
        return {
            "loss/cross_entropy" if plain else "loss/flipped_cross_entropy": self_learned.detach(),
            "loss/class_marginal": marginal.detach(),
            **record,
        }

    def _clean_terms(self, images: Tensor) -> tuple[Tensor, Tensor | None, Scalars]:
        """Return the student's logits on clean images, what is added to its loss there, and its record."""
        logits, _ = self._learning(images)
        return logits, None, {}

    # ------------------------------------------------------------ predicting

    @property
    def predictor(self) -> Network:
        """The teacher."""
        return self.teacher

    @contextmanager
    def deployed(self, images: Tensor | None = None) -> Iterator[Network]:
        """Give the teacher, with the statistics of ``images`` where predictions use a case's own."""
        if images is None or self.params.predict_statistics == "running":
            yield self.teacher
            return
        with self.own_statistics(self.teacher, images, self.params.max_slices):
            yield self.teacher

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Return the teacher's probabilities (N, L, H, W), the mean over ``predict_views`` views.

        With ``predict_statistics: volume`` the case's slices are normalised by their own statistics;
        the teacher's running ones are put back afterwards. Views are the same at every call.
        """
        with self.deployed(images) as teacher:
            result = self.view_mean(teacher, images)
            if self.params.neighbour_share > 0:
                result = with_neighbours(result, self.params.neighbour_share)
        return result

    def deployed_params(self, images: Tensor | None = None) -> dict[str, Any]:
        """Return the parameters of ``source`` that repeat the masks: statistics, and views if several."""
        p: TeSLAParams = self.params
        views = ("predict_views", "weak_scale", "weak_shift", "weak_flip") if p.predict_views > 1 else ()
        return super().deployed_params(images) | {name: getattr(p, name) for name in views}

    def passes(self, slices: int) -> float:
        """Return forward passes, a backward counted as two: views, policy, and two on the student."""
        p: TeSLAParams = self.params
        seen = self._slices_seen(slices)
        own_statistics = slices if p.predict_statistics == "volume" else 0
        anchor = p.marginal_target == "source"
        return (
            p.epochs * seen * (p.weak_views + self._policy_passes() + 6 + anchor)
            + own_statistics
            + slices * p.predict_views
        )

    # ------------------------------------------------------------ state

    def modules(self) -> Mapping[str, nn.Module]:
        """Return student, teacher and policy."""
        return {"student": self.student, "teacher": self.teacher, "policy": self.policy}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the student's optimiser, and the policy's where it learns."""
        policy = {} if self.policy_optimizer is None else {"policy": self.policy_optimizer}
        return {"student": self.optimizer} | policy

    def state_dict(self) -> dict[str, Any]:
        """Return the common state, the pass number, the running class shares and the memory."""
        shares = None if self.class_shares is None else self.class_shares.clone()
        own = {"epoch": self.epoch, "class_shares": shares, "memory": self.memory.copied()}
        return super().state_dict() | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.epoch = state["epoch"]
        shares = state["class_shares"]
        self.class_shares = None if shares is None else shares.clone()
        self.memory.restore(state["memory"], self.context.device)


def with_neighbours(probs: Tensor, share: float) -> Tensor:
    """Return (N, L, H, W) with ``share`` of each neighbouring slice mixed in; an end is its own neighbour."""
    before = torch.cat([probs[:1], probs[:-1]])
    after = torch.cat([probs[1:], probs[-1:]])
    return (1.0 - 2.0 * share) * probs + share * (before + after)


def class_shares(probs: Tensor) -> Tensor:
    """Return the mean (L,) over batch and space of (N, L, *spatial) probabilities."""
    return probs.mean(dim=(0, *range(2, probs.dim())))


@torch.no_grad()
def clip_each(model: nn.Module, limit: float) -> None:
    """Scale each parameter's gradient down to a norm of ``limit``, every parameter on its own."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (limit / (norms + 1e-6)).clamp_max(1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))
