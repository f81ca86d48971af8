"""One unit: what the source model says, what adaptation says, and which of it is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from torch import Tensor

from tesla_med.config.models import GuardConfig, ScalingChoice
from tesla_med.engine.driver import Driver
from tesla_med.engine.few import too_few
from tesla_med.engine.guard import Guard
from tesla_med.engine.memory import Attempt, attempts, placed
from tesla_med.engine.outcome import Outcome
from tesla_med.engine.prior import OrganPrior
from tesla_med.engine.recalibration import GAMMAS, recalibrated
from tesla_med.engine.scaling import Chooser
from tesla_med.engine.stages import stage
from tesla_med.engine.steadiness import choose_share
from tesla_med.models.base import Network, predicted_class
from tesla_med.tta.base import TTAMethod
from tesla_med.types import Unit, Verdict

NOT_FINITE = "adaptation gave values that are not finite; source result kept"


class Predictor:
    """Predict unit after unit with a method, and judge what came out.

    Args:
        source: the ``source`` method.
        method: the method that adapts, or ``source`` itself.
        driver: feeds it.
        config: of the guard.
        recalibrate: choose a temperature for the adapted probabilities without labels.
        scaling: how the scaling of each unit is chosen; None: it is that of the training.
        largest: whether masks keep their largest component only.
        steadiness: of the source model on its own training, for the guard.
        prior: where the organ lay in the training, for the guard; None: nobody knows.
        classes: whose probabilities are predicted.
        remember: where units follow each other in one stream, start with what memory sufficed for last time.
    """

    def __init__(
        self,
        source: TTAMethod,
        method: TTAMethod,
        driver: Driver,
        config: GuardConfig,
        *,
        recalibrate: bool = False,
        remember: bool = False,
        scaling: ScalingChoice | None = None,
        largest: bool = False,
        steadiness: tuple[float, float] = (1.0, 1.0),
        prior: OrganPrior | None = None,
        classes: int = 2,
    ) -> None:
        self.source, self.classes = source, classes
        self._choose = Chooser(scaling, source) if scaling is not None and scaling.candidates else None
        self.remember = remember
        self._limit: int | None = None
        self._sufficed: Attempt | None = None
        self.recalibrate, self.largest = recalibrate, largest
        self.method = method
        self.driver = driver
        self.guard: Guard | None = None
        if config.enabled and method.adapts:
            self.guard = Guard(config, source, method, largest=largest, steadiness=steadiness, prior=prior)

    def scaled(self, unit: Unit) -> Unit:
        """Return the unit in the scaling that is chosen for it."""
        with stage("scaling"):
            return unit if self._choose is None else self._choose(unit)

    def passes(self, slices: int) -> float:
        """Return the single-slice forward passes for ``slices`` slices, without those of updates."""
        networks = (self.source, self.method) if self.method.adapts else (self.source,)
        judges = [item.passes(slices) for item in (self._choose, self.guard) if item is not None]
        predicting = sum(network.predicting_passes(slices) for network in networks)
        return predicting + sum(judges) + self.recalibrate * len(GAMMAS) * slices

    def __call__(self, images: Tensor, fill: Tensor | None = None) -> Outcome:
        """Adapt to the slices (N, C, H, W) of one case where cases are adapted to, and predict it.

        Nothing is learned or judged from pixels of ``fill``, (N, H, W). Where adaptation collapsed or failed,
        the case leaves no trace in the method.
        """
        return self._judged(placed(images, self.classes, self.method.context.device), fill).on_host()

    def of(self, unit: Unit, *, adapt: bool = True) -> Outcome | None:
        """Predict a unit, None without images; not to ``adapt`` is to leave the method out of it."""
        if unit.images is None:
            return None
        return self(unit.images, unit.fill) if adapt else self._unadapted(unit.images)

    def _unadapted(self, images: Tensor) -> Outcome:
        most = min(len(images), self.source.context.predict_batch)
        for attempt in attempts((self.source,), lambda: None, most, first=self._limit):
            with attempt:
                source = self.source.predict(images)
                return Outcome(source, source, Verdict(0.0, attempt.note))
        raise AssertionError("the last attempt raises")  # for the type checker

    def _judged(self, images: Tensor, fill: Tensor | None) -> Outcome:
        if not self.method.adapts:
            return self._attempts(images, fill, lambda: None)
        if why := too_few(self.driver, len(images)):
            outcome = self._unadapted(images)
            return replace(outcome, verdict=replace(outcome.verdict, reason=why))
        carries_on = self.driver.case_by_case and self.driver.reset != "case"
        before = self.method.state_dict() if carries_on else None
        generators = self.method.generator.get_state(), self.method.noise_generator.get_state()

        def restore() -> None:
            if before is not None:
                self.method.load_state_dict(before)
            self.method.generator.set_state(generators[0])
            self.method.noise_generator.set_state(generators[1])

        try:
            outcome = self._attempts(images, fill, restore)
        except Exception:
            restore()
            raise
        if outcome.verdict.collapsed:
            restore()
        return outcome

    def _attempts(self, images: Tensor, fill: Tensor | None, restore: Callable[[], None]) -> Outcome:
        """Return the first attempt for which memory suffices; its reason says what was done about it."""
        driver, count = self.driver, images.shape[0]
        most = min(max(self.method.params.batch_slices or count, self.method.context.predict_batch), count)
        tries = attempts(
            (self.source, self.method),
            restore,
            most,
            least=min(driver.least, count) if self.method.adapts else 1,
            noun=driver.noun,
            first=self._limit,
        )
        for attempt in tries:
            with attempt:
                outcome = self._recalibrated(self._attempt(images, fill), images, fill)
                self._limit = attempt.limit if self.remember else None
                self._sufficed = attempt
                reason = "; ".join(text for text in (outcome.verdict.reason, attempt.note) if text)
                return replace(outcome, verdict=replace(outcome.verdict, reason=reason))
        raise AssertionError("the last attempt raises")  # for the type checker

    def _attempt(self, images: Tensor, fill: Tensor | None) -> Outcome:
        images = images.cpu() if self.source.stitch_on_cpu else images
        if not self.method.adapts:
            with stage("predict"):
                chosen = choose_share(self.source, images, fill, largest=self.largest)
                source = self.source.predict(images)
            return Outcome(source, source, Verdict(0.0, "", signals=chosen))
        with stage("predict"):
            source = self.source.predict(images)
        probs = self.driver.adapt_and_predict(images, fill)
        if probs is None:
            return Outcome(source, source, Verdict(0.0, NOT_FINITE, collapsed=True, diverged=True))
        if self.guard is None:
            return Outcome(source, probs, Verdict(1.0, "", signals=dict(self.driver.chosen)))
        with stage("guard"):
            verdict = self.guard.judge(images, source, probs, fill)
            verdict = replace(verdict, signals=verdict.signals | self.driver.chosen)
            if verdict.used == "source":
                probs = source
            elif verdict.used == "partial":
                probs = self.guard.probabilities(images, verdict)
        return Outcome(source, probs, verdict)

    def _recalibrated(self, outcome: Outcome, images: Tensor, fill: Tensor | None) -> Outcome:
        """Return the outcome with the temperature that fits it, where one is asked for."""
        if not self.recalibrate or outcome.verdict.used == "source":
            return outcome
        with self._deployed(images, outcome.verdict) as network:
            styled = [predicted_class(self.method.probabilities(network, images**gamma)) for gamma in GAMMAS]
        return recalibrated(outcome, styled, fill)

    @contextmanager
    def deployed(self, images: Tensor | None, verdict: Verdict | None = None) -> Iterator[Network]:
        """Give the network that made the masks, as it is to be saved, within the memory that sufficed.

        Images (N, C, H, W) and verdict are those of the last case, where the weights are for it alone.
        """
        sufficed = nullcontext() if images is None or self._sufficed is None else self._sufficed.again()
        with sufficed, self._deployed(images, verdict) as network:
            yield network

    def _deployed(self, images: Tensor | None, verdict: Verdict | None) -> AbstractContextManager[Network]:
        if self.guard is None or images is None or verdict is None or verdict.used != "partial":
            return self.method.deployed(images)
        return self.guard.deployed(images, verdict)
