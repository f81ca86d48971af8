"""The teacher: EMA of the student, and its soft pseudo-labels averaged over weak views."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from tesla_med.augment import warp

M = TypeVar("M", bound=nn.Module)
Flip = Literal["first", "last", "none"]


def make_teacher(student: M) -> M:
    """Return a copy of ``student`` whose parameters take no gradient."""
    teacher = copy.deepcopy(student)
    teacher.requires_grad_(False)
    return teacher.eval()


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move the teacher: t <- momentum t + (1 - momentum) s, floating-point buffers included.

    Args:
        teacher: moved in place.
        student: a module of the same structure.
        momentum: in [0, 1]; 0 copies the student.
    """
    targets: list[Tensor] = []
    values: list[Tensor] = []
    pairs = (
        (teacher.parameters(), student.parameters()),
        (teacher.buffers(), student.buffers()),
    )
    for ours, theirs in pairs:
        for target, value in zip(ours, theirs, strict=True):
            if target.is_floating_point():
                targets.append(target)
                values.append(value.detach())
    torch._foreach_lerp_(targets, values, 1.0 - momentum)


def weak_view_thetas(
    count: int,
    generator: torch.Generator,
    *,
    scale: float = 0.8,
    shift: float = 0.1,
    flip: Flip = "first",
) -> Tensor:
    """Draw one weak view an image: flip (p = 0.5), then a crop of fixed scale, shifted.

    Args:
        count: number of images.
        generator: CPU generator.
        scale: side of the crop as a share of the field.
        shift: largest displacement in grid units of [-1, 1], so 0.1 is 5 % of the field.
        flip: the in-plane axis that is mirrored: the first (H; left-right where slices are oriented
            RAS), the last (W, what image libraries call horizontal) or none.

    Returns:
        Thetas (count, 2, 3) on the CPU.
    """
    sign = 1.0 - 2.0 * torch.randint(2, (count,), generator=generator)
    rows = sign if flip == "first" else torch.ones(count)
    columns = sign if flip == "last" else torch.ones(count)
    moves = (2.0 * torch.rand(count, 2, generator=generator) - 1.0) * shift
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = scale * columns
    theta[:, 1, 1] = scale * rows
    theta[:, 0, 2] = moves[:, 0] * columns
    theta[:, 1, 2] = moves[:, 1] * rows
    return theta


@torch.no_grad()
def average_over_views(
    images: Tensor,
    predict: Callable[[Tensor], Tensor],
    views: int,
    generator: torch.Generator,
    *,
    first: Tensor | None = None,
    scale: float = 0.8,
    shift: float = 0.1,
    flip: Flip = "first",
) -> Tensor:
    """Return refined pseudo-labels (Eq. 5): the mean over weak views, warped back, renormalised.

    The first view is the image itself. Where a view did not look, its zeros make it count less.

    Args:
        images: (N, C, H, W) in [0, 1].
        predict: images in [0, 1] -> probabilities (N, L, H, W).
        views: how many, the unchanged image included.
        generator: CPU generator of the views.
        first: probabilities of the unchanged image if they are known already.
        scale: see :func:`weak_view_thetas`.
        shift: see :func:`weak_view_thetas`.
        flip: see :func:`weak_view_thetas`.

    Returns:
        (N, L, H, W) float32 distributions over L.
    """
    total = (predict(images) if first is None else first).float()
    if views <= 1:
        return warp.normalise(total)
    total = total.clone()
    for _ in range(views - 1):
        theta = weak_view_thetas(images.shape[0], generator, scale=scale, shift=shift, flip=flip)
        theta = theta.to(images.device, non_blocking=True)
        total += warp.from_view(predict(warp.to_view(images, theta)), theta)
    return warp.normalise(total)


class NeighbourQueue:
    """Class-balanced memory of refined features and pseudo-labels, and the mean over neighbours in it.

    One first-in-first-out queue a class, by the most likely class of the pseudo-label when it came in
    (Q in the paper's soft pseudo-label refinement). For tiles: one feature vector an image.

    Args:
        classes: L.
        size: of each class's queue, N_Q.
        neighbours: n; of all classes together, nearest by cosine similarity. The image itself counts as one.
    """

    def __init__(self, classes: int, size: int, neighbours: int) -> None:
        self.size = size
        self.neighbours = neighbours
        self._features: list[Tensor] = [torch.empty(0) for _ in range(classes)]
        self._labels: list[Tensor] = [torch.empty(0) for _ in range(classes)]

    def __len__(self) -> int:
        return sum(len(item) for item in self._labels)

    @torch.no_grad()
    def add(self, features: Tensor, pseudo_labels: Tensor) -> None:
        """Put (N, D) features and (N, L) pseudo-labels in, the oldest of a full class out."""
        unit = torch.nn.functional.normalize(features.detach().float(), dim=1)
        labels = pseudo_labels.detach().float()
        winners = labels.argmax(dim=1)
        for index in range(len(self._labels)):
            mine = winners == index
            if not bool(mine.any()):
                continue
            for store, new in ((self._features, unit[mine]), (self._labels, labels[mine])):
                old = store[index].to(new.device)
                joined = torch.cat([old, new]) if len(old) else new
                store[index] = joined[-self.size :].clone()

    @torch.no_grad()
    def refine(self, features: Tensor, pseudo_labels: Tensor) -> Tensor:
        """Return the mean pseudo-label of each image's nearest neighbours in the memory, (N, L).

        Args:
            features: (N, D) refined features.
            pseudo_labels: (N, L); taken as they are while the memory is empty.
        """
        stored = [item for item in self._features if len(item)]
        if not stored or self.neighbours < 1:
            return pseudo_labels
        memory = torch.cat(stored).to(features.device)
        labels = torch.cat([item for item in self._labels if len(item)]).to(features.device)
        unit = torch.nn.functional.normalize(features.float(), dim=1)
        count = min(self.neighbours, len(memory))
        nearest = (unit @ memory.T).topk(count, dim=1).indices
        result: Tensor = labels[nearest].mean(dim=1)
        return result

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Return copies of the memory."""
        return {
            "features": [item.clone() for item in self._features],
            "labels": [item.clone() for item in self._labels],
        }

    def load_state_dict(self, state: Mapping[str, list[Tensor]]) -> None:
        """Restore exactly what :meth:`state_dict` returned."""
        self._features = [item.clone() for item in state["features"]]
        self._labels = [item.clone() for item in state["labels"]]
