"""AdaContrast: contrastive test-time adaptation (Chen et al., CVPR 2022), for tiles and for pixels.

For each batch of images, everything happens in the frame of one weak view (a flip and a crop) per image.
The student takes one step down

    self-training  +  contrast_weight * contrast  +  diversity_weight * diversity.

1. Pseudo-labels: the student's features on the weak view look up their nearest neighbours in a memory of the
   momentum encoder's features, and the mean of the neighbours' probabilities decides the class (Sec. 3.2).
2. Self-training is the cross-entropy of the student on a strong view to these labels.
3. Contrast is InfoNCE between the student's features on that view and the momentum encoder's on another
   strong view; keys of earlier batches are negatives, except those of the same pseudo-label (Eq. 4 and 5).
4. Diversity is the negative entropy of the mean prediction on the strong view.

Features are those that enter the head. In a slice, pixels take the part that images have in the original. A
grid of pixels of stride ``refine_stride``, whose offset is drawn anew for every update, is refined and
learned from. No refined label is thus interpolated, and every pixel has its turn. Of the grid,
``pixels_per_slice`` pixels go into the memory and the contrast. All parameters learn. The student predicts.

Where the whole target is at hand (protocol M), ``fill_memory`` lets the momentum encoder, which is the source
model then, look at all of it before the first pass, so that the first labels have neighbours everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med import losses
from tesla_med.augment import warp
from tesla_med.augment.static import RandAugment
from tesla_med.models.base import Network
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tta._shared.features import head_features, in_frame_of, rows
from tesla_med.tta._shared.neighbours import Memory, info_nce, neighbour_mean
from tesla_med.tta._shared.teacher import Flip, make_teacher, update_teacher, weak_view_thetas
from tesla_med.tta.base import METHODS, MethodParams, Scalars, TTAMethod

_WHOLE = 0.999
"""Weight of a pixel of a view above which it shows no fill."""


class AdaContrastParams(MethodParams):
    """Parameters of AdaContrast; defaults are its authors' where they have them."""

    learning_rate: float = Field(2e-4, ge=0, description="of SGD, for all parameters")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD (Nesterov where above 0)")
    weight_decay: float = Field(1e-4, ge=0)
    teacher_momentum: float = Field(0.999, ge=0, le=1, description="of the momentum encoder")
    queue_size: int = Field(16384, ge=1, description="features in the memory, and keys in the contrast")
    fill_memory: bool = Field(
        False, description="fill the memory from all slices ahead before the first pass, as offline"
    )
    neighbours: int = Field(
        10, ge=1, description="number of neighbours whose probabilities a pseudo-label averages"
    )
    temperature: float = Field(0.07, gt=0, description="of the contrast")
    contrast_weight: float = Field(1.0, ge=0)
    diversity_weight: float = Field(1.0, ge=0)
    refine_stride: int = Field(8, ge=1, description="spacing of the pixels that are refined and learned from")
    pixels_per_slice: int = Field(64, ge=1, description="of these, pixels for memory and contrast")

    op_set: str = Field("intensity", description="ops of strong views; of pixels, its intensity ops")
    policy_size: int = Field(3, ge=1, description="operations in a strong view")
    static_magnitude: float = Field(
        0.5, ge=0, le=1, description="strength of the ops, distance from the identity as a share of the range"
    )
    weak_scale: float = Field(0.8, gt=0, le=1)
    weak_shift: float = Field(0.1, ge=0, le=1)
    weak_flip: Flip = Field("first", description="in-plane axis mirrored in half of the weak views")

    statistics_momentum: float = Field(0.1, gt=0, le=1)
    predict_statistics: Literal["running", "volume"] = Field(
        "volume", description="normalise a prediction by running statistics or by the case's own"
    )
    max_slices: int = Field(64, ge=1, description="'volume' statistics use at most this many slices")


@METHODS.register("adacontrast")
class AdaContrast(TTAMethod):
    """Contrastive learning with refined pseudo-labels; see the module's docstring.

    Attributes:
        student: the network that learns and predicts.
        teacher: its moving average, the momentum encoder.
        features: memory of the momentum encoder's features and probabilities.
        keys: memory of the contrast's features and pseudo-labels.
    """

    name = "adacontrast"
    summary = "learns by contrast and from pseudo-labels refined by nearest neighbours"
    citation = "Chen et al., Contrastive Test-Time Adaptation, CVPR 2022"
    protocols = ("N-O", "N-M")
    Params = AdaContrastParams

    def setup(self) -> None:
        """Make the momentum encoder, the strong views, both memories and the optimiser."""
        p: AdaContrastParams = self.params
        self.student = self.model.requires_grad_(True)
        self.teacher = make_teacher(self.student)
        generators = self.generator, self.noise_generator
        self.augmentation = RandAugment(
            p.op_set, p.policy_size, p.static_magnitude, *generators, self.context.device
        )
        if self.student.task == "segmentation":  # all views of a pixel show it in the same place
            kept = tuple(op for op in self.augmentation.ops if op.kind == "intensity")
            self.augmentation.ops = kept
        self.features = Memory(p.queue_size)
        self.keys = Memory(p.queue_size)
        self.optimizer = torch.optim.SGD(
            self.student.parameters(),
            lr=p.learning_rate,
            momentum=p.momentum,
            weight_decay=p.weight_decay,
            nesterov=p.momentum > 0,
        )

    # ------------------------------------------------------------ adapting

    @torch.no_grad()
    def start_epoch(self, epoch: int, batches: Iterable[Tensor]) -> None:
        """Fill the memory from the slices ahead, if asked to; running statistics stay as they are.

        More pixels than the memory takes are drawn from at random.
        """
        super().start_epoch(epoch, batches)
        if epoch > 0 or not self.params.fill_memory:
            return
        found = []
        for images in batches:
            logits, features = self._look(self.teacher, self.to_device(images), None)
            grid = self._grid(tuple(logits.shape[2:]))
            order = torch.randperm(len(grid), generator=self.generator)[: self.params.pixels_per_slice]
            places = grid[order].to(logits.device)
            weight = None if self.pixel_weight is None else self.to_device(self.pixel_weight)
            kept = self._kept(weight, places)
            keys = functional.normalize(rows(features, places), dim=1)
            found.append((keys[kept], rows(logits, places).softmax(dim=1)[kept]))
        if found:
            keys, probs = (torch.cat(column) for column in zip(*found, strict=True))
            drawn = torch.randperm(len(keys), generator=self.generator).to(keys.device)
            self.features.push(keys[drawn], probs[drawn])

    def adapt(self, images: Tensor) -> Scalars:
        """Update the student, the momentum encoder and the memories on (N, C, H, W) images in [0, 1]."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, scalars = self.objective(self.to_device(images))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        update_teacher(self.teacher, self.student, self.params.teacher_momentum)
        self.steps += 1
        return scalars

    def objective(self, images: Tensor) -> tuple[Tensor, Scalars]:
        """Return the loss on (N, C, H, W) images in [0, 1] and its terms; both memories take in the batch."""
        p: AdaContrastParams = self.params
        weak, weight = self._weak_view(images)
        grid, chosen, pseudo_labels = self._pseudo_labels(weak, weight)
        counted = None if weight is None else rows(weight[:, None], grid)[:, 0]
        kept = self._kept(weight, grid[chosen])
        key_labels = pseudo_labels[:, chosen].flatten()[kept]
        keys = self._keys(weak, grid[chosen])[kept]
        logits, features = self._look(self.student, self._strong_view(weak), None)
        trained = losses.label_cross_entropy(rows(logits, grid), pseudo_labels.flatten(), counted)
        queries = functional.normalize(rows(features, grid[chosen])[kept], dim=1)
        contrast = info_nce(queries, keys, key_labels, self.keys.columns, p.temperature)
        diversity = losses.class_marginal(logits, pixel_weight=weight)
        loss = trained + p.contrast_weight * contrast + p.diversity_weight * diversity
        self.keys.push(keys, key_labels)
        return loss, {
            "loss/self_training": trained.detach(),
            "loss/contrast": contrast.detach(),
            "loss/diversity": diversity.detach(),
        }

    def _weak_view(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return one weak view of each image, and the weight (N, *spatial) of its pixels or None."""
        p: AdaContrastParams = self.params
        theta = weak_view_thetas(
            len(images), self.generator, scale=p.weak_scale, shift=p.weak_shift, flip=p.weak_flip
        )
        theta = theta.to(images.device, non_blocking=True)
        return warp.to_view(images, theta).clamp(0, 1), self.weight_in(theta)

    @staticmethod
    def _kept(weight: Tensor | None, positions: Tensor) -> Any:
        """Return the index of the rows of these positions that are all measured, for every image."""
        return slice(None) if weight is None else rows(weight[:, None], positions)[:, 0] > _WHOLE

    def _strong_view(self, weak: Tensor) -> Tensor:
        return self.augmentation.apply_draw(weak, self.augmentation.draw(tuple(weak.shape))).images

    def _look(self, network: Network, images: Tensor, momentum: float | None) -> tuple[Tensor, Tensor]:
        """Return the logits (N, L, *spatial) and what entered the head, (N, F, *spatial), both float32.

        Args:
            network: the network, which normalises by the statistics of the batch.
            images: (N, C, H, W) in [0, 1].
            momentum: share of the batch in the running statistics; None leaves them alone.
        """
        with batch_statistics(network, momentum=momentum), head_features(network) as found:
            logits = self.logits(network, images)
        return logits, in_frame_of(logits, found[-1])

    @torch.no_grad()
    def _pseudo_labels(self, weak: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the grid (P,), the places in it that are for the contrast (p,), and the labels (N, P)."""
        p: AdaContrastParams = self.params
        logits, features = self._look(self.student, weak, p.statistics_momentum)
        slow_logits, slow = self._look(self.teacher, weak, p.statistics_momentum)
        grid = self._grid(tuple(logits.shape[2:])).to(weak.device)
        order = torch.randperm(len(grid), generator=self.generator)[: p.pixels_per_slice]
        chosen = order.to(weak.device)
        remembered = functional.normalize(rows(slow, grid[chosen]), dim=1)
        kept = self._kept(weight, grid[chosen])
        self.features.push(remembered[kept], rows(slow_logits, grid[chosen]).softmax(dim=1)[kept])
        memory, probs = self.features.columns
        queries = functional.normalize(rows(features, grid), dim=1)
        refined = neighbour_mean(queries, memory, probs, p.neighbours)
        return grid, chosen, refined.argmax(dim=1).view(len(weak), -1)

    def _grid(self, size: tuple[int, ...]) -> Tensor:
        """Return the flat positions (P,) of a grid with a random offset; for a tile, its single position."""
        if not size:
            return torch.zeros(1, dtype=torch.long)
        stride = [min(self.params.refine_stride, length) for length in size]
        start = [int(torch.randint(step, (1,), generator=self.generator)) for step in stride]
        flat = torch.zeros((), dtype=torch.long)
        for first, length, step in zip(start, size, stride, strict=True):
            flat = flat[..., None] * length + torch.arange(first, length, step)
        return flat.flatten()

    @torch.no_grad()
    def _keys(self, weak: Tensor, positions: Tensor) -> Tensor:
        """Return the momentum encoder's features (n, F) on another strong view, of length 1."""
        _, features = self._look(self.teacher, self._strong_view(weak), None)
        return functional.normalize(rows(features, positions), dim=1)

    def learning_passes(self, slices: int) -> float:
        """Return the forward passes of the updates, and of filling the memory."""
        filling = self.slices_seen(slices) if self.params.fill_memory else 0
        return super().learning_passes(slices) + filling

    def passes_per_update(self) -> float:
        """Count both networks on the weak view, the keys, and the student on the strong view."""
        return 6

    # ------------------------------------------------------------ state

    def modules(self) -> Mapping[str, nn.Module]:
        """Return the student and the momentum encoder."""
        return {"student": self.student, "teacher": self.teacher}

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Return the optimiser of the student."""
        return {"student": self.optimizer}

    def state_dict(self) -> dict[str, Any]:
        """Return the common state and both memories."""
        memories = {"features": self.features.copied(), "keys": self.keys.copied()}
        return super().state_dict() | memories

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self.features.restore(state["features"], self.context.device)
        self.keys.restore(state["keys"], self.context.device)
