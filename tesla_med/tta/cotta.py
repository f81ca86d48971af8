"""CoTTA: continual test-time adaptation (Wang et al., CVPR 2022).

For each batch of slices, with equations of that paper:

1. The teacher gives pseudo-labels y (Eq. 2 to 4): its prediction on the batch or, if the source model is not
   confident enough, the mean over augmented views. That is asked of the batch as a whole, as for images of
   one object, or of every pixel, as in the authors' code for segmentation.
2. The student takes one step down the cross-entropy to them, the mean of - sum_k y_k log p_k (Eq. 1).
3. The teacher moves as the moving average of the student (Eq. 2).
4. Each element of each weight of the student is restored to its source value with a small probability
   (Eq. 7 and 8).

All parameters learn. The teacher predicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med import losses
from tesla_med.augment import warp
from tesla_med.augment.static import RandAugment
from tesla_med.models.base import Network
from tesla_med.tta._shared.passes import NetworkPass
from tesla_med.tta._shared.teacher import Flip, average_over_views, make_teacher, update_teacher
from tesla_med.tta.base import METHODS, MethodParams, Scalars, TTAMethod


class CoTTAParams(MethodParams):
    """Parameters of CoTTA; defaults are its authors' for CIFAR-10-C where they have them.

    Their code for segmentation has ``learning_rate: 7.5e-6``, for a transformer, ``confidence_of: pixel`` and
    ``confidence_threshold: 0.69``.
    """

    learning_rate: float = Field(1e-3, ge=0, description="of Adam, for all parameters")
    teacher_momentum: float = Field(0.999, ge=0, le=1)
    restore: float = Field(
        0.01, ge=0, le=1, description="probability that an element of a weight goes back to the source's"
    )
    views: int = Field(32, ge=1, description="views per averaged pseudo-label, including the image itself")
    confidence_of: Literal["batch", "pixel"] = Field(
        "batch", description="whose confidence decides: the mean over the batch for all, or each pixel's own"
    )
    confidence_threshold: float = Field(
        0.92, ge=0, le=1, description="labels are averaged where the source's confidence is below"
    )

    op_set: str = Field("intensity", description="ops of the views")
    policy_size: int = Field(2, ge=1, description="operations in a view")
    static_magnitude: float = Field(
        0.5, ge=0, le=1, description="strength of the ops, distance from the identity as a share of the range"
    )
    weak_scale: float = Field(0.8, gt=0, le=1)
    weak_shift: float = Field(0.1, ge=0, le=1)
    weak_flip: Flip = Field("first", description="in-plane axis mirrored in half of the views")

    statistics_momentum: float = Field(0.1, gt=0, le=1)
    predict_statistics: Literal["running", "volume"] = Field(
        "volume", description="normalise a prediction by running statistics or by the case's own"
    )
    max_slices: int = Field(64, ge=1, description="'volume' statistics use at most this many slices")


@METHODS.register("cotta")
class CoTTA(TTAMethod):
    """Averaged pseudo-labels and stochastic restoration; see the module's docstring.

    Attributes:
        source: the frozen source model, which never changes.
        student: the network that learns.
        teacher: its moving average, which gives labels and predicts.
    """

    name = "cotta"
    summary = "learns from a moving-average teacher's averaged labels and restores weights at random"
    citation = "Wang et al., Continual Test-Time Domain Adaptation, CVPR 2022"
    binary_regions = True
    protocols = ("N-O", "N-M")
    Params = CoTTAParams

    def setup(self) -> None:
        """Keep the source, and make the teacher, the views and the optimiser."""
        p: CoTTAParams = self.params
        self.student = self.model.requires_grad_(True)
        self.source = make_teacher(self.student)
        self.teacher = make_teacher(self.student)
        generators = self.generator, self.noise_generator
        self.augmentation = RandAugment(
            p.op_set, p.policy_size, p.static_magnitude, *generators, self.context.device
        )
        fused = self.context.device.type == "cuda" or None
        self.optimizer = torch.optim.Adam(self.student.parameters(), lr=p.learning_rate, fused=fused)

    def make_passes(self) -> None:
        """Make every kind of pass; only clean passes move running statistics, and never the source's."""
        momentum, pool = self.params.statistics_momentum, self.graph_pool()
        self._anchor = NetworkPass(self.source, self.logits, momentum=None, pool=pool)
        self._clean = NetworkPass(self.teacher, self.logits, momentum=momentum, pool=pool)
        self._augmented = NetworkPass(self.teacher, self.logits, momentum=None, pool=pool)
        self._learning = NetworkPass(self.student, self.logits, momentum=momentum, gradient=True, pool=pool)

    def passes_per_update(self) -> float:
        """Count the source's pass, the views of averaged labels, and the student's."""
        views: int = self.params.views
        return 1 + views + 3

    # ------------------------------------------------------------ adapting

    def adapt(self, images: Tensor) -> Scalars:
        """Update the student and the teacher on (N, C, H, W) images in [0, 1]."""
        images = self.to_device(images)
        pseudo_labels, confidence = self._pseudo_labels(images)
        self.optimizer.zero_grad(set_to_none=True)
        logits = self._learning(images).logits
        loss = losses.label_cross_entropy(logits, pseudo_labels, self.pixel_weight)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        update_teacher(self.teacher, self.student, self.params.teacher_momentum)
        self._restore()
        self.steps += 1
        return {"loss/consistency": loss.detach(), "source_confidence": confidence}

    @torch.no_grad()
    def _pseudo_labels(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's labels (N, L, *spatial) and the source model's mean confidence (Eq. 4)."""
        p: CoTTAParams = self.params
        certain = self._anchor(images).logits.softmax(dim=1).amax(dim=1)
        confidence = losses.weighted_mean(certain, self.pixel_weight)
        labels = self._clean(images).logits.softmax(dim=1)
        sure = (certain if p.confidence_of == "pixel" else confidence) >= p.confidence_threshold
        if p.views > 1 and not bool(sure.all()):
            averaged = average_over_views(
                images,
                self._label_view,
                p.views,
                self.generator,
                first=labels,
                scale=p.weak_scale,
                shift=p.weak_shift,
                flip=p.weak_flip,
            )
            labels = torch.where(sure[:, None], labels, averaged) if p.confidence_of == "pixel" else averaged
        return labels, confidence

    def _label_view(self, images: Tensor) -> Tensor:
        """Return the teacher's probabilities on an augmented view of ``images``, warped back."""
        view = self.augmentation.apply_draw(images, self.augmentation.draw(tuple(images.shape)))
        return warp.from_view(self._augmented(view.images).logits.softmax(dim=1), view.theta)

    @torch.no_grad()
    def _restore(self) -> None:
        """Restore each element of the student's weights with probability ``restore`` (Eq. 7 and 8)."""
        if self.params.restore == 0:
            return
        for ours, source in zip(self.student.parameters(), self.source.parameters(), strict=True):
            draw = torch.rand(ours.shape, generator=self.noise_generator, device=ours.device)
            ours.copy_(torch.where(draw < self.params.restore, source, ours))

    # ------------------------------------------------------------ predicting

    @property
    def predictor(self) -> Network:
        """The teacher."""
        return self.teacher

    # ------------------------------------------------------------ state

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the student and the teacher; the source never changes."""
        return {"student": self.student, "teacher": self.teacher}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the optimiser of the student."""
        return {"student": self.optimizer}
