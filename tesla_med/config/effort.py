"""How much is spent on adapting to a case: fewer or more updates than in the recipe, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tesla_med.config.files import apply_overrides
from tesla_med.config.models import PipelineConfig
from tesla_med.errors import ConfigError

Effort = Literal["low", "normal", "high"]
EFFORTS: tuple[Effort, ...] = ("low", "normal", "high")
UPDATES = {"low": 1 / 3, "high": 2.0}
"""Updates per case, or passes over a site, as a share of those of the recipe."""
SPENT = {"updates_per_case", "epochs", "weak_views"}
"""Parameters of methods that say how much is spent."""
LOW_VIEWS = 2
"""Weak views of a pseudo-label at most, with low effort."""


def with_effort(
    pipeline: PipelineConfig, method: str, effort: Effort | None, texts: Sequence[str] = ()
) -> PipelineConfig:
    """Return a pipeline whose recipes of a method spend more or less than it says.

    ``low`` makes a third of the updates (of the passes, under N-M and Y-M) with at most two weak views, in
    the precision and layout that are the fastest where it computes; ``high`` makes twice as many updates.
    The momentum of the teacher follows, so that it goes as far in all: momentum ** (1 / share).

    Args:
        pipeline: with the recipes.
        method: whose recipes are changed, under every protocol.
        effort: None and ``normal`` change nothing.
        texts: ``key=value`` overrides that the user gave; what they set stays.

    Raises:
        ConfigError: nothing in the method's recipes says how much is spent.
    """
    if effort is None or effort == "normal":
        return pipeline
    named = {text.partition("=")[0].strip() for text in texts}
    asked = apply_overrides({}, list(texts))
    protocols, known = dict(pipeline.protocols), False
    for protocol in ("N-O", "N-M", "Y-O", "Y-M"):
        recipe = pipeline.method_params(method, protocol)
        given = {*_of(asked, "methods", method), *_of(asked, "protocols", protocol, method)}
        own = _changes(recipe, effort, given)
        known |= bool(SPENT & recipe.keys())
        recipes = dict(protocols.get(protocol, {}))
        protocols[protocol] = recipes | {method: {**recipes.get(method, {}), **own}} if own else recipes
    if not known:
        raise ConfigError(
            f"--effort {effort}: method {method!r} of pipeline {pipeline.name!r} has no number of updates, "
            "passes or views to change; leave --effort out, or set what it has with --set"
        )
    update: dict[str, Any] = {"protocols": protocols}
    if effort == "low" and "precision" not in named:
        update["precision"] = "auto"
    return pipeline.model_copy(update=update)


def _of(content: Any, *names: str) -> set[str]:
    """Return the keys of a section of overrides, none where there is no such section."""
    for name in names:
        content = content.get(name) if isinstance(content, dict) else None
    return set(content) if isinstance(content, dict) else set()


def _changes(recipe: dict[str, Any], effort: Effort, given: set[str]) -> dict[str, Any]:
    """Return what changes in the parameters of a method under one protocol, but for those that are given."""
    share = UPDATES[effort]
    found: dict[str, Any] = {}
    for key in {"updates_per_case", "epochs"} - given:
        if (recipe.get(key) or 1) > 1:
            found[key] = max(1, round(share * recipe[key]))
    if found and "teacher_momentum" in recipe.keys() - given:
        found["teacher_momentum"] = round(recipe["teacher_momentum"] ** (1.0 / share), 6)
    if effort == "low" and "weak_views" in recipe.keys() - given and recipe["weak_views"] > LOW_VIEWS:
        found["weak_views"] = LOW_VIEWS
    return found
