"""Augmentation that is not learned: RandAugment, AutoAugment, and none at all.

These are the alternatives of the paper's ablation (Tomar et al. 2023, Sec. 4.3). Each offers what the
learned policy offers, a draw that is separate from its application and a view with its theta, but has
nothing to learn.

A *strength* in [0, 1] is the distance from the identity of an op: 0 changes nothing, and 1 is the far end of
its range. Ops that go both ways take either with equal odds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tesla_med.augment import warp
from tesla_med.augment.ops import OP_SETS, OPS, Op
from tesla_med.augment.policy import View
from tesla_med.errors import ConfigError
from tesla_med.registry import unknown_name

UNUSED = -1
"""The op position of a slot that does nothing."""

LEVELS = 9
"""The highest level of AutoAugment's magnitudes, which count from 0."""

SubPolicy = tuple[tuple[str, float, int], ...]

IMAGENET: tuple[SubPolicy, ...] = (
    (("Posterize", 0.4, 8), ("Rotate", 0.6, 9)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 5)),
    (("Equalize", 0.8, 8), ("Equalize", 0.6, 3)),
    (("Posterize", 0.6, 7), ("Posterize", 0.6, 6)),
    (("Equalize", 0.4, 7), ("Solarize", 0.2, 4)),
    (("Equalize", 0.4, 4), ("Rotate", 0.8, 8)),
    (("Solarize", 0.6, 3), ("Equalize", 0.6, 7)),
    (("Posterize", 0.8, 5), ("Equalize", 1.0, 2)),
    (("Rotate", 0.2, 3), ("Solarize", 0.6, 8)),
    (("Equalize", 0.6, 8), ("Posterize", 0.4, 6)),
    (("Rotate", 0.8, 8), ("Color", 0.4, 0)),
    (("Rotate", 0.4, 9), ("Equalize", 0.6, 2)),
    (("Equalize", 0.0, 7), ("Equalize", 0.8, 8)),
    (("Invert", 0.6, 4), ("Equalize", 1.0, 8)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Rotate", 0.8, 8), ("Color", 1.0, 2)),
    (("Color", 0.8, 8), ("Solarize", 0.8, 7)),
    (("Sharpness", 0.4, 7), ("Invert", 0.6, 8)),
    (("ShearX", 0.6, 5), ("Equalize", 1.0, 9)),
    (("Color", 0.4, 0), ("Equalize", 0.6, 3)),
    (("Equalize", 0.4, 7), ("Solarize", 0.2, 4)),
    (("Solarize", 0.6, 5), ("AutoContrast", 0.6, 5)),
    (("Invert", 0.6, 4), ("Equalize", 1.0, 8)),
    (("Color", 0.6, 4), ("Contrast", 1.0, 8)),
    (("Equalize", 0.8, 8), ("Equalize", 0.6, 3)),
)
"""Op, probability and level (0 to 9) of both ops of each sub-policy (Cubuk et al. 2019, found on ImageNet).

All of these ops are in ``OPS``. Some sub-policies occur twice, as published, and are drawn twice as often.
"""


class Augmentation(Protocol):
    """Anything that makes views, learned or not: a draw, and its application without randomness."""

    def draw(self, shape: tuple[int, ...], by: Literal["uniform", "probability"]) -> Any:
        """Return everything random about one batch of views of (n, C, H, W) images."""

    def apply_draw(self, images: Tensor, draw: Any) -> View:
        """Return the views of (n, C, H, W) images in [0, 1]."""

    def summary(self) -> dict[str, float]:
        """Return slow-moving scalars for the record."""


@dataclass(frozen=True)
class StaticDraw:
    """Everything random about one batch of views, in (n, S) tables in the order of application.

    Attributes:
        ops: positions among the policy's ops, on the CPU; ``UNUSED`` for a slot that does nothing.
        strengths: numbers in [0, 1], on the CPU.
        signs: +1 or -1, on the CPU.
        noise: maps slot and position to standard normal draws for the images that use the op there, in batch
            order.
        planes: (n,) the plane in which each volume is warped; None: that of its slices.
    """

    ops: Tensor
    strengths: Tensor
    signs: Tensor
    noise: dict[tuple[int, int], Tensor]
    planes: Tensor | None = None


class StaticPolicy(nn.Module):
    """What all policies that learn nothing share; on its own it is the identity.

    Args:
        ops: names in ``OPS``.
        generator: generator of ops, strengths and signs, on the CPU.
        noise_generator: generator of noise fields, on ``device``.
        device: the device of the images.

    Attributes:
        all_planes: whether volumes are warped in a plane that is drawn, not always in that of their slices.
    """

    all_planes = False

    def __init__(
        self,
        ops: tuple[str, ...],
        generator: torch.Generator,
        noise_generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.ops: tuple[Op, ...] = tuple(OPS.get(name) for name in ops)
        self.generator = generator
        self.noise_generator = noise_generator
        self.device = device

    def choose(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw the positions (count, S) of ops, ``UNUSED`` for none, and their strengths (count, S)."""
        return torch.empty(count, 0, dtype=torch.long), torch.empty(count, 0)

    def draw(self, shape: tuple[int, ...], by: Literal["uniform", "probability"] = "uniform") -> StaticDraw:
        """Draw ops, strengths, signs and noise for every image.

        Args:
            shape: (n, C, H, W) of the images.
            by: has no effect, because there is a single distribution.
        """
        chosen, strengths = self.choose(shape[0])
        signs = 2.0 * torch.randint(2, tuple(chosen.shape), generator=self.generator) - 1.0
        noise: dict[tuple[int, int], Tensor] = {}
        for slot, position, rows in self._uses(chosen):
            needed = self.ops[position].noise
            if needed is not None:
                size = needed((len(rows), *shape[1:]))
                noise[slot, position] = torch.randn(size, generator=self.noise_generator, device=self.device)
        planes = warp.drawn_planes(shape, self.generator) if self.all_planes else None
        return StaticDraw(chosen, strengths, signs, noise, planes)

    @torch.no_grad()
    def apply_draw(self, images: Tensor, draw: StaticDraw) -> View:
        """Make one view per image: the geometric ops as a single warp, then the intensity ops in order.

        Args:
            images: (n, C, H, W) float32 in [0, 1].
            draw: what :meth:`draw` returned.
        """
        uses = self._uses(draw.ops)
        theta = warp.identity(images.shape[0], images.device)
        view = images.clamp(0, 1)
        for slot, position, rows in (use for use in uses if self.ops[use[1]].kind == "geometric"):
            magnitude, sign = self._setting(draw, slot, position, rows)
            where = rows.to(images.device, non_blocking=True)
            step = self.ops[position].theta(images[: len(rows)], magnitude, sign)  # its size counts only
            theta = theta.index_copy(0, where, warp.compose(theta[where], step))
        if draw.planes is not None:
            theta = warp.in_planes(theta, draw.planes)
        if any(self.ops[position].kind == "geometric" for _, position, _ in uses):
            view = warp.to_view(view, theta).clamp(0, 1)
        for slot, position, rows in (use for use in uses if self.ops[use[1]].kind == "intensity"):
            magnitude, sign = self._setting(draw, slot, position, rows)
            where = rows.to(images.device, non_blocking=True)
            random = sign if self.ops[position].signed else draw.noise.get((slot, position))
            view = view.index_copy(0, where, self.ops[position].intensities(view[where], magnitude, random))
        return View(view, theta)

    def _uses(self, chosen: Tensor) -> list[tuple[int, int, Tensor]]:
        """Return the slot, the op position and the images that use it there, slot by slot."""
        return [
            (slot, position, torch.nonzero(column == position)[:, 0])
            for slot, column in enumerate(chosen.unbind(dim=1))
            for position in sorted(set(column.tolist()) - {UNUSED})
        ]

    def _setting(self, draw: StaticDraw, slot: int, position: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the magnitudes and signs of some images in one slot, on the device."""
        strengths, signs = draw.strengths[rows, slot], draw.signs[rows, slot]
        table = torch.stack([magnitude_of(self.ops[position], strengths, signs), signs])
        magnitude, sign = table.to(self.device, non_blocking=True)
        return magnitude, sign

    def summary(self) -> dict[str, float]:
        """Return nothing, because a static policy does not move."""
        return {}


class RandAugment(StaticPolicy):
    """A policy of ``size`` ops per image, drawn uniformly with replacement from a set, all at one strength.

    Cubuk et al. 2020, RandAugment: Practical automated data augmentation with a reduced search space.

    Args:
        op_set: a name in ``OP_SETS``.
        size: N, the number of ops per image.
        strength: M as a share of its scale, in [0, 1].
        generator: see :class:`StaticPolicy`.
        noise_generator: see :class:`StaticPolicy`.
        device: see :class:`StaticPolicy`.

    Raises:
        ConfigError: the op set is unknown, or has fewer ops than asked for.
    """

    def __init__(
        self,
        op_set: str,
        size: int,
        strength: float,
        generator: torch.Generator,
        noise_generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        if op_set not in OP_SETS:
            raise ConfigError(unknown_name("op set", op_set, sorted(OP_SETS)))
        names = OP_SETS[op_set]
        if not 1 <= size <= len(names):
            raise ConfigError(f"policy_size must be 1 to {len(names)} for op set {op_set!r}, got {size}")
        super().__init__(names, generator, noise_generator, device)
        self.size = size
        self.strength = strength

    def choose(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw ``size`` ops per image."""
        chosen = torch.randint(len(self.ops), (count, self.size), generator=self.generator)
        return chosen, torch.full((count, self.size), self.strength)


class AutoAugment(StaticPolicy):
    """A policy of one of the sub-policies ``IMAGENET`` per image, with each op applied by its probability.

    Cubuk et al. 2019, AutoAugment: Learning augmentation strategies from data.

    Args:
        generator: see :class:`StaticPolicy`.
        noise_generator: see :class:`StaticPolicy`.
        device: see :class:`StaticPolicy`.
    """

    def __init__(
        self,
        generator: torch.Generator,
        noise_generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        names = sorted({name for sub_policy in IMAGENET for name, _, _ in sub_policy})
        super().__init__(tuple(names), generator, noise_generator, device)
        self._members = torch.tensor([[names.index(name) for name, _, _ in pair] for pair in IMAGENET])
        self._probabilities = torch.tensor([[p for _, p, _ in pair] for pair in IMAGENET])
        self._strengths = torch.tensor([[level / LEVELS for _, _, level in pair] for pair in IMAGENET])

    def choose(self, count: int) -> tuple[Tensor, Tensor]:
        """Draw one sub-policy per image, and which of its ops are applied."""
        index = torch.randint(len(IMAGENET), (count,), generator=self.generator)
        members = self._members[index]
        applied = torch.rand(tuple(members.shape), generator=self.generator) < self._probabilities[index]
        return members.where(applied, torch.tensor(UNUSED)), self._strengths[index]


def magnitude_of(op: Op, strength: Tensor, sign: Tensor) -> Tensor:
    """Return the magnitude in [0, 1] that lies the share ``strength`` of the way from the identity of an op.

    From an identity in the middle of the range the way is that of ``sign``, unless the op takes the sign
    itself. Posterize, which has no identity, keeps fewer bits the stronger it is.

    Args:
        op: the op whose range it is.
        strength: (n,) in [0, 1].
        sign: (n,) of +1 and -1.
    """
    identity = 1.0 if op.identity is None else op.identity
    if identity in (0.0, 1.0):
        return (identity - strength).abs()
    side = torch.ones_like(sign) if op.signed else sign
    reach = torch.where(side > 0, 1.0 - identity, identity)
    return identity + side * strength * reach
