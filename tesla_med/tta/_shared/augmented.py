"""Learning from augmented views: what TeSLA and the plug-in of its augmentation share.

A teacher, which is the moving average of a student, gives pseudo-labels averaged over weak views (Eq. 5). A
policy makes views of the images, and learns to make hard ones by steps against the teacher (Eq. 8 to 13). The
student is drawn to the pseudo-labels on those views (Eq. 4). Equations are those of Tomar et al., TeSLA,
CVPR 2023. What else the student learns, and which network predicts, is up to the method.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from tesla_med import losses
from tesla_med.augment import warp
from tesla_med.augment.corrected import Correction, corrected
from tesla_med.augment.policy import AdversarialPolicy, View
from tesla_med.augment.static import Augmentation, AutoAugment, RandAugment, StaticPolicy
from tesla_med.config.models import Section
from tesla_med.models.base import Network
from tesla_med.tta._mechanics.ranks import share_gradients
from tesla_med.tta._shared.passes import NetworkPass
from tesla_med.tta._shared.teacher import Flip, average_over_views
from tesla_med.tta.base import TTAMethod

LEAST_ENTROPY = 1e-6
"""Below it views are equally certain."""


class AugmentationParams(Section):
    """Parameters of the views, of the policy that makes them, and of the teacher."""

    teacher_momentum: float = Field(0.996, ge=0, le=1)
    distillation_weight: float = Field(1.0, ge=0, description="lambda_2")

    weak_views: int = Field(5, ge=1, description="views per pseudo-label, including the image itself")
    weak_views_first_epoch: int | None = Field(None, ge=1)
    weak_scale: float = Field(0.8, gt=0, le=1)
    weak_shift: float = Field(0.1, ge=0, le=1)
    weak_flip: Flip = Field(
        "first",
        description="in-plane axis mirrored: first is left-right in RAS; release: last; both: for tiles",
    )

    corrected_views: tuple[Correction, ...] = Field(
        (),
        description="further views of a pseudo-label: slices without noise (smooth), without their receive "
        "field (field), or both (field_smooth); the surer the teacher is of one, the more it counts",
    )
    corrected_certainty: float = Field(
        4.0,
        ge=0,
        description="a corrected view, and the mean of the weak ones, counts by the inverse of its mean "
        "entropy to this power; 0: all alike",
    )

    augment: Literal["learned", "randaugment", "autoaugment", "none"] = Field(
        "learned", description="where views for the student come from; none: the clean images"
    )
    static_magnitude: float = Field(
        0.3, ge=0, le=1, description="with randaugment, distance from the identity as a share of the range"
    )
    op_set: str = Field("intensity", description="ops of the learned policy and of randaugment")
    policy_size: int = Field(3, ge=1, description="ops in a sub-policy, N")
    warp_planes: Literal["slices", "all"] = Field(
        "slices", description="planes in which views of three-dimensional images are warped"
    )
    policy_learning_rate: float = Field(1e-3, ge=0, description="of the selection logits")
    magnitude_learning_rate: float = Field(1e-2, ge=0)
    policy_sampling: Literal["uniform", "probability"] = Field(
        "uniform", description="how sub-policies are drawn while the policy is optimised"
    )
    severity_weight: float = Field(1.0, ge=0, description="lambda_1")
    severity_of: Literal["network", "encoder"] = Field(
        "network",
        description="batch norms of Eq. 9: network, squares averaged over channels, as in the release; "
        "encoder, squares summed over channels, as in the paper",
    )
    reset_policy_each_epoch: bool = False


class Averaged(NamedTuple):
    """What the teacher says about a batch.

    Attributes:
        labels: pseudo-labels (N, L, *spatial), averaged over weak views (Eq. 5).
        activations: the mean activations (N, C) of each norm layer on the clean images.
        features: (N, F) of tiles, averaged over weak views (Eq. 5); None if the passes do not return them.
    """

    labels: Tensor
    activations: list[Tensor]
    features: Tensor | None


def by_certainty(views: Tensor, power: float) -> Tensor:
    """Return the mean over views, which count by the inverse of their mean entropy to a power.

    Args:
        views: (V, N, L, *spatial) distributions over L.
        power: 0 for the plain mean.

    Returns:
        (N, L, *spatial); each image has weights of its own.
    """
    entropy = torch.stack(
        [losses.normalised_entropy(view).reshape(len(view), -1).mean(dim=1) for view in views]
    )
    weights = torch.softmax(-power * entropy.clamp_min(LEAST_ENTROPY).log(), dim=0)
    return (weights.reshape(*weights.shape, *[1] * (views.dim() - 2)) * views).sum(dim=0)


class AugmentedMethod(TTAMethod):
    """A method with a teacher and a policy; its parameters include :class:`AugmentationParams`.

    Subclasses make ``teacher``, ``policy`` and ``policy_optimizer`` in :meth:`setup`, and the passes in
    :meth:`make_passes`: the teacher on clean images, on weak views and on attacked views, and the student on
    attacked views.

    Attributes:
        teacher: the network that gives pseudo-labels.
        policy: what makes views.
        policy_optimizer: the optimiser of the policy; None if the policy is static.
        epoch: number of the pass over the slices, from 0.
    """

    teacher: Network
    policy: AdversarialPolicy | StaticPolicy
    policy_optimizer: torch.optim.Optimizer | None
    epoch: int = 0
    _clean: NetworkPass
    _weak: NetworkPass
    _attacked: NetworkPass
    _distilling: NetworkPass

    def _make_policy(self) -> AdversarialPolicy | StaticPolicy:
        policy = self._policy()
        policy.all_planes = self.params.warp_planes == "all"
        return policy

    def _policy(self) -> AdversarialPolicy | StaticPolicy:
        p, generators = self.params, (self.generator, self.noise_generator)
        device = self.context.device
        if p.augment == "learned":
            return AdversarialPolicy(p.op_set, p.policy_size, *generators, device)
        if p.augment == "randaugment":
            return RandAugment(p.op_set, p.policy_size, p.static_magnitude, *generators, device)
        if p.augment == "autoaugment":
            return AutoAugment(*generators, device)
        return StaticPolicy((), *generators, device)

    def _make_policy_optimizer(self) -> torch.optim.Adam | None:
        if not isinstance(self.policy, AdversarialPolicy):
            return None
        groups = [
            {"params": [self.policy.logits], "lr": self.params.policy_learning_rate},
            {"params": [self.policy.raw_magnitudes], "lr": self.params.magnitude_learning_rate},
        ]
        return torch.optim.Adam(groups, fused=self.context.device.type == "cuda" or None)

    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:
        """Restart the policy if the parameters ask for it."""
        super().start_epoch(epoch, batches)
        self.epoch = epoch
        if epoch > 0 and self.params.reset_policy_each_epoch and isinstance(self.policy, AdversarialPolicy):
            self.policy.reset_parameters()  # the moments of its optimiser stay, as in the release

    # ------------------------------------------------------------ pseudo-labels

    @torch.no_grad()
    def _averaged(self, images: Tensor) -> Averaged:
        """Return the teacher's pseudo-labels, averaged over weak views (Eq. 5), and what it saw.

        With ``corrected_views`` they are the mean of that average and of these views, by certainty.
        """
        p = self.params
        first_epoch = self.epoch == 0 and p.weak_views_first_epoch is not None
        views = p.weak_views_first_epoch if first_epoch else p.weak_views
        clean = self._clean(images)
        seen = [] if clean.features is None else [clean.features]

        def look(view: Tensor) -> Tensor:
            weak = self._weak(view)
            if weak.features is not None:
                seen.append(weak.features)
            return weak.logits.softmax(dim=1)

        labels = average_over_views(
            images,
            look,
            int(views or 1),
            self.generator,
            first=clean.logits.softmax(dim=1),
            scale=p.weak_scale,
            shift=p.weak_shift,
            flip=p.weak_flip,
        )
        if p.corrected_views:
            seen_in = [labels, *(look(corrected(images, each)) for each in p.corrected_views)]
            labels = by_certainty(torch.stack(seen_in), p.corrected_certainty)
        return Averaged(labels, clean.activations, torch.stack(seen).mean(dim=0) if seen else None)

    # ------------------------------------------------------------ policy

    def _update_policy(self, images: Tensor, reference: list[Tensor]) -> Tensor | None:
        """Take one policy step on views of ``images`` (Eq. 8 to 13); the teacher stays as it is.

        Args:
            images: (N, C, H, W) in [0, 1] on the device.
            reference: the teacher's activations on the clean images.

        Returns:
            The mean policy objective; None if there is nothing to learn.
        """
        if self.policy_optimizer is None or not isinstance(self.policy, AdversarialPolicy):
            return None
        draw = self.policy.draw(tuple(images.shape), by=self.params.policy_sampling)
        view = self.policy.apply_draw(images, draw)
        attacked = self._attacked(view.images)
        seen = warp.from_view(attacked.logits.softmax(dim=1), view.theta)
        certainty = losses.negative_entropy(seen, self.pixel_weight)
        summed = self.params.severity_of == "encoder"
        strength = severity(attacked.activations, reference, summed=summed)
        objective = certainty + self.params.severity_weight * strength
        self.policy_optimizer.zero_grad(set_to_none=True)
        self.policy.surrogate(objective, draw).backward()  # type: ignore[no-untyped-call]
        share_gradients((self.policy.logits, self.policy.raw_magnitudes))
        self.policy_optimizer.step()
        self.policy.prefetch()
        mean: Tensor = objective.detach().mean()
        return mean

    @property
    def _tap(self) -> bool | Literal["encoder"]:
        """What the passes of the teacher return for the severity of views."""
        return "encoder" if self.params.severity_of == "encoder" else True

    def _policy_passes(self) -> int:
        """Return the forward passes of a policy step per slice, none if the policy is static."""
        return 2 if self.params.augment == "learned" else 0

    # ------------------------------------------------------------ distillation

    def _distil(self, images: Tensor, pseudo_labels: Tensor) -> Tensor:
        """Return Eq. 4 on views of ``images``: the student against the pseudo-labels in their frame."""
        view = self._adversarial_view(images)
        targets = warp.normalise(warp.to_view(pseudo_labels, view.theta))
        logits = self._distilling(view.images).logits
        weight = self._pixel_weight(targets, self.weight_in(view.theta))
        return losses.distillation(logits, targets, weight)

    @torch.no_grad()
    def _adversarial_view(self, images: Tensor) -> View:
        augmentation: Augmentation = self.policy
        return augmentation.apply_draw(images, augmentation.draw(tuple(images.shape), by="probability"))

    def _pixel_weight(self, pseudo_labels: Tensor, measured: Tensor | None) -> Tensor | None:
        """Return the weight (N, *spatial) of each pixel in the student's losses; None if all are equal.

        Args:
            pseudo_labels: (N, L, *spatial), in the frame of the loss.
            measured: (N, *spatial) in the same frame, 0 where there is fill; None where there is none.
        """
        return measured

    # ------------------------------------------------------------ record and state

    def record(self) -> dict[str, float]:
        """Return the policy's probability and magnitude by op; nothing if the policy is static."""
        return super().record() | self.policy.summary()

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the method's optimisers, and the policy's if the policy learns."""
        policy = {} if self.policy_optimizer is None else {"policy": self.policy_optimizer}
        return {**super().optimizers(), **policy}

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the method, and the number of the pass."""
        return super().state_dict() | {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.epoch = state["epoch"]


def severity(seen: list[Tensor], reference: list[Tensor], *, summed: bool = False) -> Tensor:
    """Return r of Eq. 9 per image: the squared difference of mean activations, the mean over layers.

    Args:
        seen: (n, C_l) of each layer l on the augmented view.
        reference: the same on the clean view.
        summed: sum over the channels of a layer, which is the norm of the paper; otherwise their mean is
            taken, as in the release, so that wide layers weigh no more than others.

    Returns:
        (n,) values >= 0; a zero without axes, which goes with values on any device, if the model has no
        batch norm.
    """
    if not seen:
        return torch.zeros(())
    channels = torch.tensor([layer.shape[1] for layer in seen])
    share = torch.ones_like(channels) if summed else channels
    weights = (1.0 / (share * len(seen))).repeat_interleave(channels)
    squares = (torch.cat(seen, dim=1) - torch.cat(reference, dim=1).detach()) ** 2
    return (squares * weights.to(squares.device, non_blocking=True)).sum(dim=1)
