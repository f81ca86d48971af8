"""TeAA: TeSLA's learned augmentation as a plug-in to other objectives (Tomar et al. 2023, Sec. 4.3).

To the objective of another method it adds what TeSLA learns from augmented views: a teacher that is
the moving average of the student, a policy that learns to make views hard for it (Eq. 8 to 13), and
distillation of its pseudo-labels on such views (Eq. 4). The rest stays the other method's: which
parameters learn, by which optimiser, what moves running statistics, and which network predicts.

To plug it into one more method, give that an ``objective(images) -> (loss, scalars)`` which its
``adapt`` descends, and add a parameter model and a class below.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from tesla_med.models.base import Network
from tesla_med.tta._shared.augmented import AugmentationParams, AugmentedMethod
from tesla_med.tta._shared.passes import GraphPool, NetworkPass
from tesla_med.tta._shared.teacher import make_teacher, update_teacher
from tesla_med.tta.adacontrast import AdaContrast, AdaContrastParams
from tesla_med.tta.base import METHODS, Scalars
from tesla_med.tta.shot import SHOT, SHOTParams
from tesla_med.tta.tent import Tent, TentParams

PLUGGED = "Tomar et al., TeSLA: Test-Time Self-Learning With Automatic Adversarial Augmentation, 2023"


class TeAA(AugmentedMethod):
    """The plug-in; stands before the method that it is added to among the bases of a class.

    A method that has a moving average of its student already, as ``teacher``, lends it; else one is
    made. The teacher and the views are normalised by the statistics of their batch, and move none.
    """

    def setup(self) -> None:
        """Let the method prepare, then make the policy, its optimiser and a teacher where there is none."""
        super().setup()
        lent: Network | None = getattr(self, "teacher", None)
        self._own_teacher = lent is None
        self.teacher = make_teacher(self.model) if lent is None else lent
        self.policy = self._make_policy()
        self.policy_optimizer = self._make_policy_optimizer()
        self._make_passes()

    def _make_passes(self) -> None:
        """Make the passes of teacher and distillation."""
        pool = GraphPool(self.context.cuda_graphs and self.limit is None)
        teacher, student = self.teacher, self.model
        self._clean = NetworkPass(teacher, self.logits, momentum=None, tap=True, pool=pool)
        self._weak = NetworkPass(teacher, self.logits, momentum=None, pool=pool)
        self._attacked = NetworkPass(teacher, self.logits, momentum=None, tap=True, gradient=True, pool=pool)
        # Never a graph: its capture would put running statistics back in place while the method's own
        # forward through the same network still waits for its backward.
        self._distilling = NetworkPass(student, self.logits, momentum=None, gradient=True)

    def adapt(self, images: Tensor) -> Scalars:
        """Do the method's update on (N, C, H, W) images in [0, 1]; the teacher follows."""
        method: Any = super()
        scalars: Scalars = method.adapt(images)
        if self._own_teacher:
            update_teacher(self.teacher, self.model, self.params.teacher_momentum)
        return scalars

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Take a policy step; return the method's loss plus ``distillation_weight`` times Eq. 4.

        Args:
            images: (N, C, H, W) float32 in [0, 1] on the device.

        Returns:
            The scalar that the student descends, and its terms.
        """
        pseudo_labels, reference = self._averaged_labels(images)
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

    def passes(self, slices: int) -> float:
        """Return the method's, and for each update the weak views, the policy and the distillation."""
        method: Any = super()
        added = self.params.weak_views + self._policy_passes() + 3
        return float(method.passes(slices) + self.params.epochs * self._slices_seen(slices) * added)

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the method's, the policy, and the teacher where it is the plug-in's."""
        own = {"teacher": self.teacher} if self._own_teacher else {}
        return {**super().modules(), **own, "policy": self.policy}

    def optimizers(self) -> Mapping[str, Any]:
        """Return the method's, and the policy's where it learns."""
        policy = {} if self.policy_optimizer is None else {"policy": self.policy_optimizer}
        return {**super().optimizers(), **policy}

    def state_dict(self) -> dict[str, Any]:
        """Return the method's state with that of policy and teacher, and the pass number."""
        return super().state_dict() | {"epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.epoch = state["epoch"]


class TentTeAAParams(TentParams, AugmentationParams):
    """Parameters of Tent and of the plug-in."""


@METHODS.register("tent+teaa")
class TentTeAA(TeAA, Tent):
    """Tent with learned augmentation."""

    name = "tent+teaa"
    summary = "Tent with learned adversarial augmentation, distilled from a moving average"
    citation = f"{Tent.citation}; {PLUGGED}"
    deterministic = False
    Params = TentTeAAParams


class SHOTTeAAParams(SHOTParams, AugmentationParams):
    """Parameters of SHOT and of the plug-in."""


@METHODS.register("shot+teaa")
class SHOTTeAA(TeAA, SHOT):
    """SHOT with learned augmentation."""

    name = "shot+teaa"
    summary = "SHOT with learned adversarial augmentation, distilled from a moving average"
    citation = f"{SHOT.citation}; {PLUGGED}"
    Params = SHOTTeAAParams


class AdaContrastTeAAParams(AdaContrastParams, AugmentationParams):
    """Parameters of AdaContrast and of the plug-in; what both name is one, with AdaContrast's default."""


@METHODS.register("adacontrast+teaa")
class AdaContrastTeAA(TeAA, AdaContrast):
    """AdaContrast with learned augmentation; its momentum encoder is the teacher."""

    name = "adacontrast+teaa"
    summary = "AdaContrast with learned adversarial augmentation, distilled from its momentum encoder"
    citation = f"{AdaContrast.citation}; {PLUGGED}"
    Params = AdaContrastTeAAParams
