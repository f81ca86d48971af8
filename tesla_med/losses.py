"""The losses of TeSLA: pure functions on (N, L, *spatial), shared by pixels and tiles; regions as classes.

Class axis dim 1. Everything is accumulated in float32 whatever the autocast; logarithms of the
network's own output are taken as log-softmax, so that logits of +-200 stay finite. Equation numbers
are those of Tomar et al., TeSLA, CVPR 2023.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

EPSILON = 1e-6
"""Smallest pseudo-label probability whose logarithm is taken; smaller ones count as this."""
CERTAIN = 30.0
"""A logit beside others of 0 whose class is certain in float32."""


def flipped_cross_entropy(
    logits: Tensor, pseudo_labels: Tensor, pixel_weight: Tensor | None = None
) -> Tensor:
    """Return the flipped cross-entropy, the first term of Eq. 3: mean of -sum_k f_s log y.

    The student's probabilities weight the teacher's logarithms, so the loss equals the student's
    conditional entropy plus KL(student || teacher) (Eq. 1).

    Args:
        logits: (N, L, *spatial) of the student.
        pseudo_labels: (N, L, *spatial) distributions over L; no gradient flows into them.
        pixel_weight: (N, *spatial) weights >= 0, or None for all ones.

    Returns:
        Scalar >= 0.
    """
    probs = functional.softmax(logits.float(), dim=1)
    log_targets = pseudo_labels.detach().float().clamp_min(EPSILON).log()
    return weighted_mean(-(probs * log_targets).sum(dim=1), pixel_weight)


def cross_entropy(logits: Tensor, pseudo_labels: Tensor, pixel_weight: Tensor | None = None) -> Tensor:
    """Return the plain cross-entropy to soft pseudo-labels: mean of -sum_k y log f_s.

    What the flipped one is compared with in the paper's ablation of losses.

    Args:
        logits: (N, L, *spatial) of the student.
        pseudo_labels: (N, L, *spatial) distributions over L; no gradient flows into them.
        pixel_weight: (N, *spatial) weights >= 0, or None for all ones.

    Returns:
        Scalar >= 0.
    """
    log_probs = functional.log_softmax(logits.float(), dim=1)
    return weighted_mean(-(pseudo_labels.detach().float() * log_probs).sum(dim=1), pixel_weight)


def label_cross_entropy(logits: Tensor, labels: Tensor, pixel_weight: Tensor | None = None) -> Tensor:
    """Return the cross-entropy as PyTorch defines it, with weights of pixels.

    Args:
        logits: (N, L, *spatial).
        labels: (N, *spatial) class indices, or (N, L, *spatial) distributions over L.
        pixel_weight: (N, *spatial) weights >= 0, or None for all ones.

    Returns:
        Scalar >= 0.
    """
    if pixel_weight is None:
        return functional.cross_entropy(logits, labels)
    return weighted_mean(functional.cross_entropy(logits, labels, reduction="none"), pixel_weight)


def entropy(logits: Tensor, pixel_weight: Tensor | None = None) -> Tensor:
    """Return the conditional entropy: mean of -sum_k f_s log f_s over batch and pixels.

    What Tent minimises, and the first term of SHOT's information maximisation.

    Args:
        logits: (N, L, *spatial).
        pixel_weight: (N, *spatial) weights >= 0, or None for all ones.

    Returns:
        Scalar in [0, log L].
    """
    log_probs = functional.log_softmax(logits.float(), dim=1)
    return weighted_mean(-(log_probs.exp() * log_probs).sum(dim=1), pixel_weight)


def class_marginal(
    logits: Tensor, prior: Tensor | None = None, pixel_weight: Tensor | None = None, *, apart: bool = False
) -> Tensor:
    """Return the class-marginal term, the second of Eq. 3: sum_k m_k log m_k, or KL(m || prior).

    m is the mean of the student's probabilities over batch and pixels. Without a prior the term is
    the negative entropy of m, smallest (-log L) where all classes take the same share.

    Args:
        logits: (N, L, *spatial).
        prior: (L,) expected class shares, or None for the paper's term.
        pixel_weight: (N, *spatial) weights >= 0, or None for all ones.
        apart: the first spatial axis is that of overlapping regions, each with a marginal of its own, so that
            shares are (L, R); the term is the mean over regions.

    Returns:
        Scalar in [-log L, 0] without a prior, >= 0 with one.
    """
    probs = functional.softmax(logits.float(), dim=1)
    marginal = class_shares(probs, pixel_weight, apart=apart)
    term = torch.special.xlogy(marginal, marginal.clamp_min(torch.finfo(marginal.dtype).tiny))  # 0 log 0 = 0
    if prior is not None:
        term = term - marginal * prior.to(marginal).clamp_min(EPSILON).log()
    total: Tensor = term.sum(dim=0).mean()
    return total


def class_shares(probs: Tensor, pixel_weight: Tensor | None = None, *, apart: bool = False) -> Tensor:
    """Return the mean (L,) of (N, L, *spatial) probabilities over batch and space, or (L, R) of each region.

    Args:
        probs: (N, L, *spatial).
        pixel_weight: (N, *spatial) weights >= 0, or None for all ones.
        apart: the first spatial axis is that of regions.
    """
    axes = [0, *range(3 if apart else 2, probs.dim())]
    if pixel_weight is None:
        return probs.mean(dim=axes)
    weight = pixel_weight.to(probs)
    total = weight[:, None].expand_as(probs[:, :1]).sum(dim=axes).clamp_min(EPSILON)
    return (probs * weight[:, None]).sum(dim=axes) / total


def distillation(logits: Tensor, pseudo_labels: Tensor, pixel_weight: Tensor | None = None) -> Tensor:
    """Return the distillation loss on an augmented view, Eq. 4: mean of KL(y || f_s).

    Args:
        logits: (N, L, *spatial) of the student on the augmented images.
        pseudo_labels: (N, L, *spatial) distributions in the augmented frame; no gradient flows in.
        pixel_weight: (N, *spatial) weights >= 0, or None for all ones.

    Returns:
        Scalar >= 0.
    """
    log_probs = functional.log_softmax(logits.float(), dim=1)
    targets = pseudo_labels.detach().float()
    divergence = (torch.special.xlogy(targets, targets) - targets * log_probs).sum(dim=1)
    return weighted_mean(divergence, pixel_weight)


def supervised(logits: Tensor, labels: Tensor, left_out: Tensor) -> Tensor:
    """Return cross-entropy plus 1 - soft Dice of the foreground over the whole batch, as MONAI computes them.

    Args:
        logits: (N, L, *spatial).
        labels: (N, *spatial) int64 class indices.
        left_out: (N, *spatial) bool, pixels that count as background that was found, without a gradient.

    Returns:
        A scalar, 0 or above.
    """
    from monai.losses import DiceCELoss

    found = torch.zeros_like(logits)
    found[:, 0] = CERTAIN
    seen = torch.where(left_out[:, None], found, logits.float())
    loss = DiceCELoss(softmax=True, to_onehot_y=True, include_background=False, batch=True)
    value: Tensor = loss(seen, labels.masked_fill(left_out, 0)[:, None])
    return value


def negative_entropy(probs: Tensor, pixel_weight: Tensor | None = None) -> Tensor:
    """Return sum_k p log p averaged over space, one value an image: the first term of Eq. 8.

    Args:
        probs: (N, L, *spatial) in [0, 1]; where a warp brought in zeros the sum may be below 1.
        pixel_weight: (N, *spatial) weights >= 0, or None for all ones.

    Returns:
        (N,) values in [-log L, 0].
    """
    safe = probs.float().clamp_min(0)
    per_pixel = torch.xlogy(safe, safe.clamp_min(EPSILON)).sum(dim=1)
    if per_pixel.dim() == 1:
        return per_pixel
    if pixel_weight is None:
        return per_pixel.flatten(1).mean(dim=1)
    weight = pixel_weight.to(per_pixel)
    return (per_pixel * weight).flatten(1).sum(dim=1) / weight.flatten(1).sum(dim=1).clamp_min(EPSILON)


def normalised_entropy(probs: Tensor) -> Tensor:
    """Return the entropy of each pixel divided by log L, in [0, 1]: (N, L, *spatial) -> (N, *spatial)."""
    safe = probs.float().clamp(0, 1)
    entropy = -torch.xlogy(safe, safe.clamp_min(EPSILON)).sum(dim=1)
    return (entropy / math.log(probs.shape[1])).clamp(0, 1)


def weighted_mean(values: Tensor, weight: Tensor | None) -> Tensor:
    """Return the mean of (N, *spatial) values under weights of the same shape; 0 where these are all 0."""
    if weight is None:
        return values.mean()
    weight = weight.to(values)
    return (values * weight).sum() / weight.sum().clamp_min(EPSILON)


# ------------------------------------------------------------ outputs of overlapping regions


def exclusive(outputs: Tensor) -> Tensor:
    """Return log-probabilities (N, 1 + R, *spatial) of classes from the outputs of R overlapping regions.

    nnU-Net paints region after region where its sigmoid is above a half, so that a voxel has the class of the
    last region that it is in. With regions taken as independent, the probability of that class is the
    region's times that of being in no later one; background is in none. They add up to 1, and
    :func:`overlapping` takes them back.

    Args:
        outputs: (N, R, *spatial), logits of the regions in the order in which they are painted.
    """
    inside, outside = functional.logsigmoid(outputs), functional.logsigmoid(-outputs)
    later = outside.flip(1).cumsum(1).flip(1)  # in none from here on
    after = torch.cat([later[:, 1:], torch.zeros_like(later[:, :1])], dim=1)
    return torch.cat([later[:, :1], inside + after], dim=1)


def overlapping(logs: Tensor) -> Tensor:
    """Return the outputs (N, R, *spatial) of regions from the log-probabilities (N, 1 + R, *spatial)."""
    before = torch.logcumsumexp(logs, dim=1)[:, :-1]  # of all classes that are painted earlier
    return logs[:, 1:] - before


def binary(outputs: Tensor) -> Tensor:
    """Return logits (N, 2, R, *spatial) of being outside and inside each of R overlapping regions.

    Regions lie along an axis of their own, so that what sums over classes, the softmax first of all, asks of
    every region by itself whether a voxel is in it.

    Args:
        outputs: (N, R, *spatial), logits of the regions.
    """
    return torch.stack([-0.5 * outputs, 0.5 * outputs], dim=1)
