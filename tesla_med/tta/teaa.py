"""TeAA: TeSLA's learned augmentation as a plug-in to other objectives (Tomar et al. 2023, Sec. 4.3).

The plug-in adds to the objective of another method what TeSLA learns from augmented views,

    objective of the method  +  distillation_weight * mean of KL(y || p on an adversarial view)    (Eq. 4),

where the pseudo-labels y come from a teacher, the moving average of the student, and a policy learns to make
views hard for that teacher (Eq. 8 to 13). Everything else stays the method's: which parameters learn, by
which optimiser, what moves running statistics, and which network predicts.

To plug it into another method, give that method an ``objective(images) -> (loss, scalars)`` which its
``adapt`` descends, and add a parameter model and a class below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tesla_med.models.base import Network
from tesla_med.tta._shared.augmented import AugmentationParams, AugmentedMethod
from tesla_med.tta._shared.passes import NetworkPass
from tesla_med.tta._shared.teacher import make_teacher, update_teacher
from tesla_med.tta.adacontrast import AdaContrast, AdaContrastParams
from tesla_med.tta.base import METHODS, Scalars
from tesla_med.tta.shot import SHOT, SHOTParams
from tesla_med.tta.tent import Tent, TentParams

PLUGGED = "Tomar et al., TeSLA: Test-Time Self-Learning With Automatic Adversarial Augmentation, 2023"


class TeAA(AugmentedMethod):
    """The plug-in; it stands before the method that it is added to among the bases of a class.

    A method that already has a moving average of its student, as ``teacher``, lends it; otherwise the plug-in
    makes one. The teacher and the views are normalised by the statistics of their batch, and move none.
    """

    def setup(self) -> None:
        """Let the method prepare, then make the policy, its optimiser and, if there is none, a teacher."""
        super().setup()
        lent: Network | None = getattr(self, "teacher", None)
        self._own_teacher = lent is None
        self.teacher = make_teacher(self.model) if lent is None else lent
        self.policy = self._make_policy()
        self.policy_optimizer = self._make_policy_optimizer()

    def make_passes(self) -> None:
        """Make the method's passes, and those of the teacher and the distillation."""
        super().make_passes()
        teacher, student, pool = self.teacher, self.model, self.graph_pool()
        tapped, look = self._tap, self.logits
        self._clean = NetworkPass(teacher, look, momentum=None, tap=tapped, pool=pool)
        self._weak = NetworkPass(teacher, look, momentum=None, pool=pool)
        self._attacked = NetworkPass(teacher, look, momentum=None, tap=tapped, gradient=True, pool=pool)
        # Never a graph: a capture would put running statistics back in place while the method's own forward
        # pass through the same network still waits for its backward pass.
        self._distilling = NetworkPass(student, self.logits, momentum=None, gradient=True)

    def adapt(self, images: Tensor) -> Scalars:
        """Do the update of the method on (N, C, H, W) images in [0, 1], and let the teacher follow."""
        method: Any = super()
        scalars: Scalars = method.adapt(images)
        if self._own_teacher:
            update_teacher(self.teacher, self.model, self.params.teacher_momentum)
        return scalars

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Take a policy step, and return the method's loss plus ``distillation_weight`` times Eq. 4.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.

        Returns:
            The scalar that the student descends, and its terms.
        """
        pseudo_labels, reference, _ = self._averaged(images)
        policy_loss = self._update_policy(images, reference)
        method: Any = super()
        loss, scalars = method.objective(images)
        added: Scalars = {} if policy_loss is None else {"loss/policy": policy_loss}
        weight = self.params.distillation_weight
        if weight > 0:
            distilled = self._distil(images, pseudo_labels)
            loss = loss + weight * distilled
            added["loss/distillation"] = distilled.detach()
        return loss, scalars | added

    def passes_per_update(self) -> float:
        """Count those of the method, the weak views, the policy step and the distillation."""
        views: int = self.params.weak_views + len(self.params.corrected_views)
        return super().passes_per_update() + views + self._policy_passes() + 3

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the method's modules, the policy, and the teacher if it is the plug-in's own."""
        own = {"teacher": self.teacher} if self._own_teacher else {}
        return {**super().modules(), **own, "policy": self.policy}


class TentTeAAParams(TentParams, AugmentationParams):
    """Parameters of Tent and of the plug-in."""


@METHODS.register("tent+teaa")
class TentTeAA(TeAA, Tent):
    """Tent with learned augmentation."""

    name = "tent+teaa"
    summary = "Tent with distillation from a moving average on learned adversarial views"
    citation = f"{Tent.citation}; {PLUGGED}"
    deterministic = False
    Params = TentTeAAParams


class SHOTTeAAParams(SHOTParams, AugmentationParams):
    """Parameters of SHOT and of the plug-in."""


@METHODS.register("shot+teaa")
class SHOTTeAA(TeAA, SHOT):
    """SHOT with learned augmentation."""

    name = "shot+teaa"
    summary = "SHOT with distillation from a moving average on learned adversarial views"
    citation = f"{SHOT.citation}; {PLUGGED}"
    Params = SHOTTeAAParams


class AdaContrastTeAAParams(AdaContrastParams, AugmentationParams):
    """Parameters of AdaContrast and of the plug-in; what both have is one, with AdaContrast's default."""


@METHODS.register("adacontrast+teaa")
class AdaContrastTeAA(TeAA, AdaContrast):
    """AdaContrast with learned augmentation; its momentum encoder is the teacher."""

    name = "adacontrast+teaa"
    summary = "AdaContrast with distillation from its momentum encoder on learned adversarial views"
    citation = f"{AdaContrast.citation}; {PLUGGED}"
    Params = AdaContrastTeAAParams
