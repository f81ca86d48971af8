"""Feed images to a method as a protocol says, and note what it reports. Knows no references."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tesla_med.config.models import Protocol, Reset
from tesla_med.engine.memory import attempts
from tesla_med.engine.stages import stage
from tesla_med.engine.steadiness import Restarts, choose_share
from tesla_med.engine.supervision import Supervision
from tesla_med.prepare.fill import packed, unpacked
from tesla_med.prepare.stream import SiteImages
from tesla_med.tta._mechanics.ranks import all_agree, joined, shares
from tesla_med.tta.base import Scalars, TTAMethod, fetch
from tesla_med.types import PASSES, UPDATES_OF, Progress

OnStep = Callable[[int, dict[str, float]], None]


class Driver:
    """Drive one method through one site.

    Args:
        method: the method.
        protocol: O: each unit is adapted to when it comes; M: several passes over the site first.
        reset: ``case``: every unit starts from the source model, whatever the protocol.
        on_step: called with the number of each update, rising over the whole run, and its scalars.
        least: the smallest batch that can be learned from when memory is short.
        noun: what a batch is made of, for messages.
        largest: whether masks will keep their largest component only, for the choice of a share.

    Attributes:
        chosen: what was found when share and run were chosen for the last unit; empty if they were not.
        case_by_case: whether adaptation happens unit by unit.
        finite: whether every loss of the passes over the site was finite.
    """

    def __init__(
        self,
        method: TTAMethod,
        protocol: Protocol,
        reset: Reset,
        on_step: OnStep = lambda *_: None,
        *,
        least: int = 1,
        noun: str = "slice",
        largest: bool = False,
    ) -> None:
        self.method = method
        self.reset = reset
        self.on_step = on_step
        self.least, self.noun, self.largest = least, noun, largest
        self.chosen: dict[str, float] = {}
        self.case_by_case = protocol.endswith("O") or reset == "case" or not method.adapts
        self.finite = True
        self._told = 0
        self.supervision: Supervision | None = None
        self._tell: Callable[[int, int], None] = lambda *_: None
        self._done = self._updates = 0

    def state_dict(self) -> dict[str, Any]:
        """Return how many updates were told of, and whether all their losses were finite."""
        return {"told": self._told, "finite": self.finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._told = state["told"]
        self.finite = state["finite"]

    def begin(self, name: str, progress: Progress) -> None:
        """Tell of the updates of a unit, or of a pass over the site, from now on."""
        self._tell = partial(progress, f"{UPDATES_OF}{name}")
        self._tell(0, 0)

    def adapt_to_site(
        self,
        images: SiteImages,
        progress: Progress = lambda *_: None,
        *,
        start: int = 0,
        on_pass: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Pass over the images of the whole site as often as the method says.

        Args:
            images: of the site.
            progress: called before each pass.
            start: passes that are done already.
            on_pass: called with the number of passes done, after each.
        """
        params = self.method.params

        def cut() -> Iterator[Tensor]:
            ordered = params.draw == "ordered" and params.batch_slices is not None
            if images.joined and ordered and self.method.patch is None:
                yield from images.batches(self.method.at_most(params.batch_slices))
            else:
                for unit in images:
                    yield from self.method.batches(unit)

        def batches() -> Iterator[Tensor]:
            return (self._weighed(batch, images.channels) for batch in shares(cut()))

        for epoch in range(start, params.epochs if self.finite else start):
            progress(PASSES, epoch, params.epochs)
            self.begin(f"pass {epoch + 1}", progress)
            try:
                with stage("adapt"):
                    self.finite &= self._one_pass(epoch, batches)
            except RuntimeError:
                if joined() > 1 or not self._diverged():
                    raise
                self.finite = False
            if not self.finite:
                self.method.reset()
            on_pass(epoch + 1)
            if not self.finite:
                break
        self.method.pixel_weight = None
        progress(PASSES, params.epochs, params.epochs)

    def _one_pass(self, epoch: int, batches: Callable[[], Iterator[Tensor]]) -> bool:
        """Do one pass over the site, with less memory if it must; return whether losses were finite."""
        before = self.method.state_dict()

        def restore() -> None:
            self.method.load_state_dict(before)

        def work() -> bool:
            self.method.start_epoch(epoch, batches())
            self._done = 0
            return self._say(*self._fetched([self._adapt(batch) for batch in batches()]))

        if joined() > 1:  # all do the same, so none does anything again with less memory
            finite = all_agree(work())
        else:
            most, finite = self.method.params.batch_slices or 1, False
            for attempt in attempts((self.method,), restore, most, least=self.least, noun=self.noun):
                with attempt:
                    finite = work()
        self._updates = self._done  # of the next pass, too
        return finite

    def _adapt(self, batch: Tensor) -> Scalars:
        """Do one update, and tell of it; of a first pass over a site nobody knows how many there will be."""
        scalars = self.method.adapt(batch)
        if self.supervision is not None:
            scalars |= self.supervision.scalars()
        self._done += 1
        self._tell(self._done, max(self._done, self._updates))
        return scalars

    def adapt_and_predict(self, images: Tensor, fill: Tensor | None = None) -> Tensor | None:
        """Return probabilities (N, L, *spatial) of one unit, adapted to first where units are.

        None where a loss or a probability is not finite. Then, as after an exception, what the unit
        did to the method is undone by going back to the source model.
        """
        if not self.case_by_case:
            with stage("predict"):
                if self.finite:
                    self.chosen = choose_share(self.method, images, fill, largest=self.largest)
                probs = self.method.predict(images) if self.finite else None
            return probs if probs is not None and _finite(probs) else None
        try:
            with stage("adapt"):
                finite = self.adapt_to_case(images, fill)
            with stage("predict"):
                probs = self.method.predict(images) if finite else None
        except Exception as error:
            diverged = isinstance(error, RuntimeError) and self._diverged()
            self.method.reset()
            if not diverged:
                raise
            return None
        if probs is None or not _finite(probs):
            self.method.reset()
            return None
        return probs

    def adapt_to_case(self, images: Tensor, fill: Tensor | None = None) -> bool:
        """Adapt to the images (N, C, *spatial) of one unit; return whether every loss was finite.

        Args:
            images: of the unit.
            fill: (N, *spatial) bool, pixels that do not count; None for none.
        """
        if not self.method.adapts:
            return True
        if self.reset == "case":
            self.method.reset()
        self.chosen = choose_share(self.method, images, fill, largest=self.largest)
        whole = self.method.to_device(packed(images, fill))  # once, not batch by batch

        def batches() -> Iterator[Tensor]:
            return (self._weighed(batch, images.shape[1]) for batch in self.method.batches(whole))

        epochs = self.method.params.epochs
        self._done, self._updates = 0, epochs * self.method.restarts * self.method.updates(len(images))
        every: list[dict[str, float]] = []
        for run in (runs := Restarts(self.method, images, fill, largest=self.largest)):
            try:
                for epoch in range(epochs):
                    self.method.start_epoch(epoch, batches())
                    steps, finite = self._fetched([self._adapt(batch) for batch in batches()])
                    every += steps
                    run.finite &= finite
            except RuntimeError:
                if self.method.restarts == 1 or not self._diverged():
                    raise
                run.finite = False  # the other runs may be
        self._say(every)  # at the end: what memory does not suffice for is done again
        self.method.pixel_weight = None
        self.chosen |= runs.found
        return runs.finite

    def _weighed(self, batch: Tensor, channels: int | None) -> Tensor:
        """Return the images of a batch, and tell the method the weight of their pixels."""
        images, self.method.pixel_weight = unpacked(batch, channels)
        return images

    def _diverged(self) -> bool:
        """Whether a weight is not finite: why, for example, nothing can be drawn from a policy."""
        weights = (item for module in self.method.modules().values() for item in module.parameters())
        return not all(_finite(item) for item in weights)

    def _fetched(self, steps: Sequence[Scalars]) -> tuple[list[dict[str, float]], bool]:
        """Return the scalars of some updates, and whether all are finite."""
        if not steps or not steps[0]:
            return [], True
        fetched = fetch(steps)
        finite = all(math.isfinite(value) for scalars in fetched for value in scalars.values())
        fetched[-1] |= self.method.record()
        return fetched, finite

    def _say(self, steps: Sequence[dict[str, float]], finite: bool = True) -> bool:
        for scalars in steps:
            self.on_step(self._told, scalars)
            self._told += 1
        return finite


def _finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
