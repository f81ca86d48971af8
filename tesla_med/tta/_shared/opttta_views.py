"""Operations, views and norm statistics of OptTTA (Tomar et al., MIDL 2022).

An operation of style has two learned numbers a channel, a *bias* and a *range*: the bias moves the style of
every view alike, and the range says how far views spread about it. Drawing is separate from applying.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from kornia.filters import gaussian_blur2d
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.augment import warp
from tesla_med.augment.policy import View
from tesla_med.models.base import norm_layers

STYLES = ("brightness", "contrast", "gamma")
"""Operations with a bias and a range for each channel."""
OPERATIONS = (*STYLES, "blur", "identity", "crop", "flip_turn")
"""Names in the order in which a sub-policy applies them; the last two form a single warp."""

START_RANGE = 0.001
START_SIGMA = 1.0
START_CROP = 0.1
GAMMA_RANGE = 0.01
"""What the range of gamma is multiplied by."""
KERNEL = 7
"""Side of the Gaussian kernel in pixels."""
LARGEST_CROP = 0.9
"""Share of a side that a crop takes away at most, so that every crop can be undone."""
POOLING = 4
"""Side of the windows over which the nuclear norm takes the largest probability."""
DARK = 0.2
"""Slices with a mean below, once clipped to ``QUANTILES`` and scaled to [0, 1], are not learned from."""
QUANTILES = (0.1, 0.9)
_POSITIVE = 1e-6
_RANK = 1e-12
"""Squared singular values below this share of the largest count as none."""
_MOST_VALUES = 2**20


class SubPolicy(nn.Module):
    """A set of operations with what is learned of each; flip, turn and identity have nothing to learn.

    Args:
        members: names of the operations, in the order of ``OPERATIONS``.
        channels: channels of the images.

    Attributes:
        bias: (channels,) of each member of style, from 0.
        range: (channels,) of each member of style, from 0.001; its size counts.
        sigma: standard deviation of the blur in pixels, from 1; its size counts.
        crop: (2,) share of the field that a crop takes away along W and along H, from 0.1; its size counts.
    """

    def __init__(self, members: Sequence[str], channels: int) -> None:
        super().__init__()
        self.members = tuple(members)
        styles = [name for name in STYLES if name in self.members]
        self.bias = nn.ParameterDict({name: torch.zeros(channels) for name in styles})
        self.range = nn.ParameterDict({name: torch.full((channels,), START_RANGE) for name in styles})
        if "blur" in self.members:
            self.sigma = nn.Parameter(torch.tensor(START_SIGMA))
        if "crop" in self.members:
            self.crop = nn.Parameter(torch.full((2,), START_CROP))

    def summary(self) -> dict[str, float]:
        """Return what has been learned, the mean over channels and axes, by name."""
        found = {f"bias/{name}": value.mean() for name, value in self.bias.items()}
        found |= {f"range/{name}": value.abs().mean() for name, value in self.range.items()}
        if "blur" in self.members:
            found["sigma"] = self.sigma.abs()
        if "crop" in self.members:
            found["crop"] = self.crop.abs().mean()
        return {name: float(value.detach()) for name, value in found.items()}


LEARNED = (*(f"{kind}/{name}" for kind in ("bias", "range") for name in STYLES), "sigma", "crop")
"""Names of everything that a sub-policy can learn, as :meth:`SubPolicy.summary` gives them."""


@dataclass(frozen=True)
class Draw:
    """Everything random about one batch of views, on the device of the images.

    Attributes:
        styles: (n, 3) in [-1, 1], where a view lies in the range of each operation of style.
        shifts: (n, 2) in [-1, 1], where a crop lies, along W and along H.
        flips: (n, 2) of +1 and -1, along W and along H.
        turns: (n,) of 1 where the view is turned by 90 degrees, else 0.
    """

    styles: Tensor
    shifts: Tensor
    flips: Tensor
    turns: Tensor


def draw_views(count: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Draw:
    """Draw one view per image for ``count`` images, from a generator on the CPU."""
    width = len(STYLES)
    table = torch.rand(count, width + 5, generator=generator).to(device, non_blocking=True)
    styles, shifts, flips, turns = torch.split(table, [width, 2, 2, 1], dim=1)
    mirrored = 1.0 - 2.0 * (flips < 0.5).float()
    return Draw(2.0 * styles - 1.0, 2.0 * shifts - 1.0, mirrored, (turns[:, 0] < 0.5).float())


def apply_draw(images: Tensor, policy: SubPolicy, draw: Draw) -> View:
    """Make one view per image by the operations of a sub-policy, differentiable in what it learns.

    With u drawn from [-1, 1] for each image, and a bias b and a range r for each channel:

    * brightness: x + b + abs(r) u;
    * contrast: x (1 + b + abs(r) u);
    * gamma: x to the power of 1 + b + 0.01 abs(r) u, where x counts as 1e-6 below that;
    * blur: a 7 x 7 Gaussian with a learned standard deviation, the same for all images, edges reflected;
    * crop: a field with sides of 1 - abs(d), moved by 0.5 d u, with d and u for each axis;
    * flip_turn: either axis mirrored and a turn by 90 degrees, each in half of the views. A field that is
      not square is not turned.

    Args:
        images: (n, C, *spatial) in [0, 1].
        policy: the sub-policy.
        draw: what :func:`draw_views` returned.

    Returns:
        Views that may leave [0, 1], and the warps that made them.
    """
    view = images
    for position, name in enumerate(STYLES):
        if name in policy.members:
            spread = policy.range[name].abs() * (GAMMA_RANGE if name == "gamma" else 1.0)
            change = policy.bias[name] + spread * draw.styles[:, position, None]
            view = _styled(name, view, change.view(*change.shape, *[1] * (view.dim() - 2)))
    if "blur" in policy.members:
        view = _blurred(view, policy.sigma)
    theta = warp.identity(len(images), images.device)
    if "crop" in policy.members:
        theta = warp.compose(theta, _crop(policy.crop, draw.shifts))
    if "flip_turn" in policy.members:
        square = images.shape[-1] == images.shape[-2]
        theta = warp.compose(theta, _flip_turn(draw.flips, draw.turns if square else 0.0 * draw.turns))
    moved = not {"crop", "flip_turn"}.isdisjoint(policy.members)
    return View(warp.to_view(view, theta) if moved else view, theta)


def _styled(name: str, images: Tensor, change: Tensor) -> Tensor:
    if name == "brightness":
        return images + change
    if name == "contrast":
        return images * (1.0 + change)
    return images.clamp_min(_POSITIVE) ** (1.0 + change)  # below 0 there is no power


def _blurred(images: Tensor, sigma: Tensor) -> Tensor:
    slices = warp.as_slices(images) if images.dim() > 4 else images
    same = sigma.abs().clamp_min(0.01).expand(len(slices), 2)
    blurred: Tensor = gaussian_blur2d(slices, (KERNEL, KERNEL), same, border_type="reflect")
    return warp.as_volumes(blurred, images.shape[2:-2]) if images.dim() > 4 else blurred


def _crop(share: Tensor, shifts: Tensor) -> Tensor:
    """Return the thetas (n, 2, 3) of crops, which lie inside the field."""
    taken = share.abs().clamp_max(LARGEST_CROP)
    moves = 0.5 * taken * shifts
    sides = (1.0 - taken).expand_as(moves)
    zero = torch.zeros_like(moves[:, 0])
    rows = [sides[:, 0], zero, moves[:, 0], zero, sides[:, 1], moves[:, 1]]
    return torch.stack(rows, dim=1).view(-1, 2, 3)


def _flip_turn(flips: Tensor, turns: Tensor) -> Tensor:
    """Return the thetas (n, 2, 3) of flips, followed by a turn by 90 degrees where ``turns`` is 1."""
    zero, straight = torch.zeros_like(turns), 1.0 - turns
    flip = torch.stack([flips[:, 0], zero, zero, zero, flips[:, 1], zero], dim=1).view(-1, 2, 3)
    turn = torch.stack([straight, -turns, zero, turns, straight, zero], dim=1).view(-1, 2, 3)
    return warp.compose(flip, turn)


# ------------------------------------------------------------ what the objective looks at


def nuclear_norm(probs: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return the mean over slices of the nuclear norm of a slice's pixels x classes matrix.

    The sum of the singular values is large where predictions are certain, which makes the matrix large, and
    diverse, which raises its rank. The pixels are the largest probabilities of windows of 4 x 4.

    Args:
        probs: (N, L, *spatial).
        weight: (N, *spatial) in [0, 1], by which pixels are multiplied; None for all ones.

    Returns:
        Scalar >= 0.
    """
    counted = probs if weight is None else probs * weight[:, None].to(probs)
    slices = warp.as_slices(counted) if counted.dim() > 4 else counted
    window = [min(POOLING, side) for side in slices.shape[2:]]
    pooled = functional.max_pool2d(slices, window)
    matrices = pooled.flatten(2).float()
    norms: Tensor = (_polar(matrices.detach()) * matrices).sum(dim=(1, 2))
    return norms.mean()


def _polar(matrices: Tensor) -> Tensor:
    """Return U V' of every (L, M) matrix U S V', which is the gradient of its nuclear norm.

    Taken from the L x L matrix of its rows' products: L is a few classes, and a decomposition of the whole
    matrix takes longer on a GPU than the network. Directions without a singular value are left out.
    """
    rows = matrices.double()
    squares, basis = torch.linalg.eigh(rows @ rows.mT)
    known = squares > _RANK * squares[:, -1:]
    inverse = torch.where(known, squares.clamp_min(torch.finfo(squares.dtype).tiny).rsqrt(), 0.0)
    found: Tensor = ((basis * inverse[:, None]) @ basis.mT) @ rows
    return found.to(matrices)


@contextmanager
def norm_distance(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect at every batch norm how far its inputs are from the statistics that it remembers.

    Each layer gives a scalar: the squared difference of the means plus that of the variances, over batch and
    space, averaged over channels. The model must be in eval mode, and gradients must be enabled: without them
    the U-Net folds biases away, so that the inputs of its norms are not what they normalise.
    """
    distances: list[Tensor] = []

    def keep(layer: Any, inputs: tuple[Any, ...]) -> None:
        features = inputs[0].float()
        axes = [axis for axis in range(features.dim()) if axis != 1]
        variance, mean = torch.var_mean(features, dim=axes, correction=0)
        distance = (mean - layer.running_mean).square() + (variance - layer.running_var).square()
        distances.append(distance.mean())

    layers = [layer for layer in norm_layers(model) if layer.running_mean is not None]
    handles = [layer.register_forward_pre_hook(keep) for layer in layers]
    try:
        yield distances
    finally:
        for handle in handles:
            handle.remove()


def bright_slices(images: Tensor) -> Tensor:
    """Return the indices (n,) of the slices that are learned from; of all where every slice is dark.

    A slice is bright if its mean, after its values are clipped to their 10 and 90 % quantiles and scaled to
    [0, 1], is above 0.2: the background does not take nearly all of it.

    Args:
        images: (N, C, *spatial).
    """
    means = []
    for image in images:
        values = image.flatten()
        some = values[:: 1 + values.numel() // _MOST_VALUES]
        low, high = torch.quantile(some, torch.tensor(QUANTILES).to(some))
        means.append((some.clamp(low, high) - low).mean() / (high - low).clamp_min(_POSITIVE))
    bright = (torch.stack(means) > DARK).nonzero()[:, 0].cpu()
    return bright if len(bright) else torch.arange(len(images))
