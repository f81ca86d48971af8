"""A supervised term on corrected cases, beside the unsupervised loss of whatever method learns.

A method never sees labels. Just before an optimiser of its takes a step, the gradient of the supervised loss
on a few labelled slices is added to the gradient that the method has computed, so that the step goes down

    objective of the method  +  weight * (cross-entropy + soft Dice on labelled slices).

The slices are drawn by the method's own generator. What a step depends on is therefore part of the method's
state: a reset is exact, and a run that is resumed draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tesla_med import losses
from tesla_med.augment.families import MILD
from tesla_med.augment.randomise import randomise
from tesla_med.config.models import CorrectionsConfig
from tesla_med.errors import ConfigError
from tesla_med.models.base import Network
from tesla_med.tta.base import Scalars, TTAMethod

VARIED = replace(MILD, noise=(0.0, 0.0))
"""How labelled slices are varied; noise would come from a generator that is no part of a method's state."""
FILL = -1
"""Marks fill among labels."""
WITH_FOREGROUND = 2 / 3
"""Share of the slices drawn that hold foreground, on average."""


@dataclass(frozen=True)
class Labelled:
    """The slices of one corrected case, on the model's grid.

    Attributes:
        images: (N, C, *spatial) float32 in [0, 1].
        labels: (N, *spatial) int64 class indices.
        fill: (N, *spatial) bool, pixels that hold no measurement; None for nowhere.
    """

    images: Tensor
    labels: Tensor
    fill: Tensor | None = None


class Supervision:
    """The labelled slices of a run, which take part in every update of its method.

    Args:
        method: that learns; its optimisers are watched from now on.
        labelled: slices of each corrected case, one entry or more.
        config: weight of the term, and slices for each update.

    Attributes:
        labelled: the slices of each corrected case.

    Raises:
        ConfigError: the method does not learn.
    """

    def __init__(self, method: TTAMethod, labelled: Sequence[Labelled], config: CorrectionsConfig) -> None:
        self.method, self.config = method, config
        self._losses: list[Tensor] = []
        self.labelled = tuple(labelled)
        passes = {item: method.labelled_pass(name) for name, item in method.optimizers().items()}
        learning = {item: found for item, found in passes.items() if found is not None}
        if not learning:
            raise ConfigError(
                f"--corrections: method {method.name!r} does not learn, so labelled slices cannot take part; "
                "leave the option out, or choose a method that learns, such as tesla"
            )
        for optimizer, labelled_pass in learning.items():
            optimizer.register_step_pre_hook(partial(self._add, labelled_pass))
        self._teach(list(learning), min(config.first_updates, config.first_updates_per_case * len(labelled)))

    def _teach(self, optimizers: Sequence[torch.optim.Optimizer], updates: int) -> None:
        """Take supervised steps, and let the method start from where they lead whenever it starts afresh.

        What follows the network that learns, such as a teacher, starts where it does; the optimisers and
        generators start as if nothing had been.
        """
        if not updates:
            return
        method, before = self.method, self.method.state_dict()
        for _ in range(updates):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
                optimizer.step()  # of the gradient that :meth:`_add` adds
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        for network in filter(None, map(method.updated_network, method.optimizers())):
            for other in method.modules().values():
                if isinstance(other, Network) and other is not network:
                    other.load_state_dict(network.state_dict())
        kept = {key: before[key] for key in ("optimizers", "generators")}
        method.load_state_dict(method.state_dict() | kept)
        method.start_here()
        self._losses.clear()

    def scalars(self) -> Scalars:
        """Return the mean supervised loss of the steps since the last call, for the record."""
        found, self._losses = self._losses, []
        return {"loss/corrections": torch.stack(found).mean()} if found else {}

    def _add(self, labelled_pass: Callable[[Tensor], Tensor], *_: Any) -> None:
        """Add the weighted gradient of the supervised loss to what an optimiser is about to descend."""
        images, labels, fill = self._drawn()
        with torch.enable_grad():
            loss = losses.supervised(labelled_pass(images), labels, fill)
            (self.config.weight * loss).backward()  # type: ignore[no-untyped-call]
        self._losses.append(loss.detach())

    def _drawn(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return images, labels and fill of a mini-batch of slices of one case, on the device.

        Of one, because predictions are normalised by the statistics of one case, too; every case is as likely
        as any other. Slices are varied as patients and sessions on one scanner differ, so that the few there
        are do not become all that is known.
        """
        method, generator = self.method, self.method.generator
        case = self.labelled[int(torch.randint(len(self.labelled), (1,), generator=generator))]
        holding, picked = case.labels.flatten(1).any(dim=1), []
        for _ in range(method.at_most(self.config.batch_slices)):
            wants, place = torch.rand(2, generator=generator).tolist()
            pool = (holding if wants < WITH_FOREGROUND else ~holding).nonzero().flatten()
            pool = pool if len(pool) else torch.arange(len(holding))
            picked.append(int(pool[min(int(place * len(pool)), len(pool) - 1)]))
        labels = case.labels[picked]
        if case.fill is not None:  # it moves with the image
            labels = labels.masked_fill(case.fill[picked], FILL)
        images, marked = method.to_device(case.images[picked]), method.to_device(labels)
        images, marked = randomise(images, marked, VARIED, generator)
        return images, marked.clamp_min(0), marked == FILL
