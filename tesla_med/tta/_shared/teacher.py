"""The teacher: the moving average of a student, and pseudo-labels averaged over weak views.

Equations are those of Tomar et al., TeSLA, CVPR 2023.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from tesla_med.augment import warp
from tesla_med.errors import AdaptationError
from tesla_med.models.base import Network
from tesla_med.tta._mechanics.execution import Execution

M = TypeVar("M", bound=nn.Module)
Flip = Literal["first", "last", "both", "none"]


def make_teacher(student: M) -> M:
    """Return a copy of ``student`` whose parameters take no gradient."""
    teacher = copy.deepcopy(student)
    teacher.requires_grad_(False)
    return teacher.eval()


@torch.no_grad()
def update_teacher(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move the teacher to momentum * teacher + (1 - momentum) * student, floating-point buffers included.

    Args:
        teacher: the module that is moved in place.
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
    """Draw one weak view per image: a flip with probability 0.5, then a shifted crop of fixed scale.

    Args:
        count: number of images.
        generator: generator on the CPU.
        scale: side of the crop as a share of the field.
        shift: largest displacement in grid units of [-1, 1], so that 0.1 is 5 % of the field.
        flip: the in-plane axis that is mirrored: the first (H, which is left-right if slices are oriented
            RAS), the last (W, what image libraries call horizontal), both independently (tiles have no
            upright orientation), or none.

    Returns:
        Thetas (count, 2, 3) on the CPU.
    """
    sign = 1.0 - 2.0 * torch.randint(2, (count,), generator=generator)
    rows = sign if flip in ("first", "both") else torch.ones(count)
    columns = sign if flip == "last" else torch.ones(count)
    if flip == "both":
        columns = 1.0 - 2.0 * torch.randint(2, (count,), generator=generator)
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
    generator: torch.Generator | None = None,
    *,
    first: Tensor | None = None,
    scale: float = 0.8,
    shift: float = 0.1,
    flip: Flip = "first",
) -> Tensor:
    """Return refined pseudo-labels (Eq. 5): the mean over weak views, warped back and renormalised.

    The first view is the image itself. A view counts less where it did not look, because it is zero there.

    Args:
        images: (N, C, H, W) in [0, 1].
        predict: maps images in [0, 1] to probabilities (N, L, *spatial).
        views: number of views, the unchanged image included.
        generator: generator of the views, on the CPU; None gives the same views at every call.
        first: probabilities of the unchanged image, if they are known already.
        scale: see :func:`weak_view_thetas`.
        shift: see :func:`weak_view_thetas`.
        flip: see :func:`weak_view_thetas`.

    Returns:
        (N, L, *spatial) float32 distributions over L.
    """
    total = (predict(images) if first is None else first).float()
    if views <= 1:
        return warp.normalise(total)
    total = total.clone()
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    for _ in range(views - 1):
        theta = weak_view_thetas(images.shape[0], generator, scale=scale, shift=shift, flip=flip)
        theta = theta.to(images.device, non_blocking=True)
        total += warp.from_view(predict(warp.to_view(images, theta)), theta)
    return warp.normalise(total)


def view_mean(method: Execution, model: Network, images: Tensor) -> Tensor:
    """Return the mean probabilities of a prediction over ``predict_views`` weak views (Eq. 5).

    The views are the same at every call.

    Args:
        method: runs the network; its parameters describe the views.
        model: the network that predicts.
        images: (N, C, H, W) in [0, 1].

    Returns:
        (N, L, *spatial) float32 distributions over L.
    """
    p: Any = method.params
    return average_over_views(
        images,
        lambda view: method.probabilities(model, view),
        p.predict_views,
        scale=p.weak_scale,
        shift=p.weak_shift,
        flip=p.weak_flip,
    )


def require_slices(model: Network, name: str, share: float) -> None:
    """Refuse to mix neighbours where they are not slices of one volume.

    Args:
        model: the network that predicts.
        name: of the method.
        share: its ``neighbour_share``; 0 is off.

    Raises:
        AdaptationError: the model classifies tiles, of which one has nothing to do with the next.
    """
    if share > 0 and model.task != "segmentation":
        raise AdaptationError(
            f"method {name!r}: neighbour_share is {share:g}, but it mixes neighbouring slices of a volume, "
            f"and this model classifies tiles; set methods.{name}.neighbour_share to 0, which is off"
        )


def with_neighbours(probs: Tensor, share: float) -> Tensor:
    """Return probabilities with ``share`` of each neighbouring slice mixed in.

    Args:
        probs: (N, L, H, W) of the slices of a case; the first and the last are their own neighbours.
        share: of each neighbour, at most a third.
    """
    before = torch.cat([probs[:1], probs[:-1]])
    after = torch.cat([probs[1:], probs[-1:]])
    return (1.0 - 2.0 * share) * probs + share * (before + after)
