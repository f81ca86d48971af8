"""The learned adversarial policy: sub-policies, their probabilities and their magnitudes (Sec. 3.3).

A sub-policy consists of N ops of a set, in the order of the set. The policy holds one probability logit per
sub-policy, and one raw magnitude per op of each sub-policy, whose sigmoid is the magnitude. All random
numbers are drawn here, from explicit generators; applying a draw is pure.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from tesla_med.augment import warp
from tesla_med.augment.ops import OP_SETS, OPS, Op
from tesla_med.errors import ConfigError
from tesla_med.registry import unknown_name


@dataclass(frozen=True)
class Draw:
    """Everything random about one batch of views.

    Attributes:
        sub_policy: (n,) indices on the CPU.
        signs: maps the position of each signed op in the set to (n,) of +1 and -1.
        noise: maps the position of an op to standard normal draws for the images that use it, in batch order.
        planes: (n,) the plane in which each volume is warped; None: that of its slices.
    """

    sub_policy: Tensor
    signs: dict[int, Tensor]
    noise: dict[int, Tensor]
    planes: Tensor | None = None


@dataclass(frozen=True)
class View:
    """Augmented images (n, C, H, W) in [0, 1], and the thetas that made them.

    These are (n, 2, 3), or (n, 3, 4) where volumes (n, C, D, H, W) are warped in all of their planes.
    """

    images: Tensor
    theta: Tensor


class AdversarialPolicy(nn.Module):
    """A learned distribution over sub-policies, with their magnitudes.

    Args:
        op_set: a name in ``OP_SETS``.
        size: N, the number of ops in a sub-policy.
        generator: generator of indices and signs, on the CPU.
        noise_generator: generator of noise fields, on the device of the images.
        device: the device of the parameters.

    Attributes:
        all_planes: whether volumes are warped in a plane that is drawn, not always in that of their slices.

    Raises:
        ConfigError: the op set is unknown, or has fewer ops than asked for.
    """

    all_planes = False

    def __init__(
        self,
        op_set: str,
        size: int,
        generator: torch.Generator,
        noise_generator: torch.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        if op_set not in OP_SETS:
            raise ConfigError(unknown_name("op set", op_set, sorted(OP_SETS)))
        self.ops: tuple[Op, ...] = tuple(OPS.get(name) for name in OP_SETS[op_set])
        if not 1 <= size <= len(self.ops):
            raise ConfigError(f"policy_size must be 1 to {len(self.ops)} for op set {op_set!r}, got {size}")
        combinations = list(itertools.combinations(range(len(self.ops)), size))
        self.sub_policies = torch.tensor(combinations)  # (P, N) positions in the set, on the CPU
        self.logits = nn.Parameter(torch.zeros(len(combinations), device=device))
        self.raw_magnitudes = nn.Parameter(torch.zeros(len(combinations), size, device=device))
        self.generator = generator
        self.noise_generator = noise_generator
        self._on_host: tuple[int, Tensor, torch.cuda.Event] | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Return to equal probabilities, and to the magnitudes from which the ops start."""
        starts = torch.tensor([op.start for op in self.ops])
        with torch.no_grad():
            self.logits.zero_()
            self.raw_magnitudes.copy_(torch.logit(starts)[self.sub_policies])

    @property
    def probabilities(self) -> Tensor:
        """The probability of each sub-policy, (P,)."""
        return self.logits.softmax(dim=0)

    def name(self, index: int) -> str:
        """Return the names of the ops of a sub-policy, joined by ``+``."""
        return "+".join(self.ops[position].name for position in self.sub_policies[index].tolist())

    def draw(self, shape: tuple[int, ...], by: Literal["uniform", "probability"]) -> Draw:
        """Draw one sub-policy per image, and the signs and noise that its ops need.

        Args:
            shape: (n, C, H, W) of the images.
            by: ``uniform`` draws all sub-policies alike, ``probability`` as they were learned.
        """
        count = shape[0]
        if by == "uniform":
            chosen = torch.randint(len(self.sub_policies), (count,), generator=self.generator)
        else:
            weights = self._probabilities_on_host()
            chosen = torch.multinomial(weights, count, replacement=True, generator=self.generator)
        coins: dict[int, Tensor] = {}
        noise: dict[int, Tensor] = {}
        device = self.logits.device
        for position, op in enumerate(self.ops):
            if op.signed:
                coins[position] = torch.randint(2, (count,), generator=self.generator)
            users = int((self.sub_policies[chosen] == position).sum()) if op.noise is not None else 0
            if op.noise is not None and users:
                size = op.noise((users, *shape[1:]))
                noise[position] = torch.randn(size, generator=self.noise_generator, device=device)
        signs: dict[int, Tensor] = {}
        if coins:
            table = (2.0 * torch.stack(list(coins.values())) - 1.0).to(device, non_blocking=True)
            signs = dict(zip(coins, table, strict=True))
        planes = warp.drawn_planes(shape, self.generator) if self.all_planes else None
        return Draw(chosen, signs, noise, planes)

    def prefetch(self) -> None:
        """Start copying the probabilities to the host, so that the next draw need not wait for them.

        Otherwise a draw would wait for everything that the device has been given to do.
        """
        if self.logits.device.type == "cuda":
            probabilities = self.probabilities.detach()
            host = torch.empty(probabilities.shape, pin_memory=True)
            host.copy_(probabilities, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._on_host = (self.logits._version, host, copied)

    def _probabilities_on_host(self) -> Tensor:
        """Return the probabilities on the CPU: the prefetched ones, unless the logits have changed since."""
        if self._on_host is not None and self._on_host[0] == self.logits._version:
            self._on_host[2].synchronize()
            return self._on_host[1]
        return self.probabilities.detach().cpu()

    def apply_draw(self, images: Tensor, draw: Draw) -> View:
        """Make one view per image: the geometric ops as a single warp, then the intensity ops in order.

        The views are differentiable in the magnitudes.

        Args:
            images: (n, C, H, W) float32 in [0, 1].
            draw: what :meth:`draw` returned.
        """
        chosen, used = self._users(draw.sub_policy)
        magnitudes = torch.sigmoid(self.raw_magnitudes[chosen])
        theta = self._theta(images, magnitudes, draw, used)
        view = warp.to_view(images.clamp(0, 1), theta).clamp(0, 1)
        for position, (rows, slots) in used.items():
            op = self.ops[position]
            if op.kind == "intensity":
                strength = magnitudes[rows, slots]
                random = draw.signs[position][rows] if op.signed else draw.noise.get(position)
                changed = op.intensities(view[rows], strength, random)
                view = view.index_copy(0, rows, changed)
        return View(view, theta)

    def _theta(
        self, images: Tensor, magnitudes: Tensor, draw: Draw, used: dict[int, tuple[Tensor, Tensor]]
    ) -> Tensor:
        theta = warp.identity(images.shape[0], images.device)
        for position, (rows, slots) in used.items():
            op = self.ops[position]
            if op.kind == "geometric":
                sign = draw.signs[position][rows] if position in draw.signs else None
                step = op.theta(images[: len(rows)], magnitudes[rows, slots], sign)  # its size counts only
                theta = theta.index_copy(0, rows, warp.compose(theta[rows], step))
        return theta if draw.planes is None else warp.in_planes(theta, draw.planes)

    def _users(self, chosen: Tensor) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
        """Return the sub-policies on the device, and for each op in use its images and its slot in each.

        Everything goes to the device in a single table, so that nothing waits for it.
        """
        members = self.sub_policies[chosen]
        found = [torch.nonzero(members == position) for position in range(len(self.ops))]
        table = torch.cat([torch.stack([chosen, chosen], dim=1), *found])
        sizes = [len(chosen), *map(len, found)]
        parts = torch.split(table.to(self.logits.device, non_blocking=True), sizes)
        used = {
            position: (part[:, 0], part[:, 1])
            for position, part in enumerate(parts[1:])
            if len(found[position])
        }
        return parts[0][:, 0], used

    def surrogate(self, losses: Tensor, draw: Draw) -> Tensor:
        """Return a scalar whose gradient is the estimator of Eq. 12, averaged over the batch.

        The gradient flows through the images into the magnitudes, and as loss times grad log p into the
        logits. It is unbiased for the expected loss if the draw was by probability; if it was uniform, every
        sub-policy has the same weight.

        Args:
            losses: (n,) the policy objective of each image, differentiable in the magnitudes.
            draw: the draw that made the images.
        """
        log_p = self.logits.log_softmax(dim=0)[draw.sub_policy.to(self.logits.device, non_blocking=True)]
        return (losses + losses.detach() * log_p).mean()

    def summary(self) -> dict[str, float]:
        """Return the probability and the mean magnitude of each op, for the record."""
        probabilities = self.probabilities.detach().cpu()
        magnitudes = torch.sigmoid(self.raw_magnitudes.detach()).cpu()
        result: dict[str, float] = {}
        for position, op in enumerate(self.ops):
            member = self.sub_policies == position
            weight = member * probabilities[:, None]
            total = float(weight.sum())
            result[f"policy/probability/{op.name}"] = total
            result[f"policy/magnitude/{op.name}"] = float((weight * magnitudes).sum()) / max(total, 1e-12)
        return result
