"""Put together what predicts the units of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tesla_med.engine.driver import Driver, OnStep
from tesla_med.engine.predictor import Predictor
from tesla_med.engine.prior import prior_of
from tesla_med.models.checkpoint import steadiness_of

if TYPE_CHECKING:
    from tesla_med.plan import Plan


def predictor_of(plan: Plan, on_step: OnStep) -> Predictor:
    """Return source and method of a run, the driver between them, the guard, and corrected cases if any.

    Raises:
        ConfigError: parameters of the method do not fit, or it does not learn and there are corrections.
        AdaptationError: the method cannot adapt this model.
    """
    source, task = plan.make_method("source"), plan.task
    method = source if plan.method == "source" else plan.make_method(plan.method)
    noun, of = "slice" if task.joins else task.item, plan.pipeline
    about: dict[str, Any] = {"least": task.smallest_batch, "noun": noun, "largest": of.keep_largest}
    driver = Driver(method, plan.protocol, plan.reset, on_step, **about)
    options: dict[str, Any] = {"scaling": of.scaling, "steadiness": steadiness_of(plan.card)}
    options |= {"largest": of.keep_largest, "recalibrate": of.recalibrate, "remember": not task.joins}
    options |= {"classes": len(of.classes), "prior": prior_of(plan.card)}
    predictor = Predictor(source, method, driver, of.guard, **options)
    if task.corrections:
        driver.supervision = task.supervision(plan.refs, predictor)
        if predictor.guard is not None:
            predictor.guard.start = plan.make_method("source")
            predictor.guard.start.model.load_state_dict(method.predictor.state_dict())
    return predictor
