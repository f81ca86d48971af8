"""What can be chosen by name, as tables for ``tesla-med list``."""

from __future__ import annotations

import logging
from collections.abc import Callable, ItemsView, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
Table = tuple[list[str], list[list[str]]]


def _methods() -> Table:
    from tesla_med.tta import METHODS

    rows = [[name, ", ".join(item.protocols), item.summary, item.citation] for name, item in METHODS.items()]
    return ["method", "protocols", "summary", "citation"], rows


def _ops() -> Table:
    from tesla_med.augment.ops import OP_SETS, OPS

    rows = []
    for name, op in OPS.items():
        sets = ", ".join(key for key, members in OP_SETS.items() if name in members)
        identity = "none" if op.identity is None else f"{op.identity:g}"
        rows.append([name, op.kind, op.unit, identity, op.gradient, sets])
    return ["op", "kind", "range for magnitude 0 to 1", "identity at", "gradient", "op sets"], rows


def _models() -> Table:
    from tesla_med.models import MODELS

    return ["model", "summary"], [[name, item.summary] for name, item in MODELS.items()]


def _reports() -> Table:
    from tesla_med.reports.base import REPORTS

    return ["report", "summary"], [[name, item.summary] for name, item in REPORTS.items()]


def _exports() -> Table:
    from tesla_med.exports.base import EXPORTS

    return ["format", "summary"], [[name, item.summary] for name, item in EXPORTS.items()]


def _tasks() -> Table:
    from tesla_med.tasks.base import OPTIONS, TASKS

    rows = [
        [name, item.item, item.metric, ", ".join(key for key in OPTIONS if key not in item.honours)]
        for name, item in TASKS.items()
    ]
    return ["task", "item", "headline metric", "refuses"], rows


def _metrics() -> Table:
    from tesla_med.scoring.metrics import METRICS

    rows = [
        [item.name, item.title, item.unit or "none", item.better or "neither", item.what]
        for item in METRICS.in_order()
    ]
    return ["metric", "title", "unit", "better", "meaning"], rows


def _pipelines() -> Table:
    from tesla_med.config.files import load_pipeline, pipeline_files

    found = _usable(pipeline_files(), load_pipeline)
    rows = [[name, item.title, ", ".join(entry.name for entry in item.foreground)] for name, item in found]
    return ["pipeline", "title", "classes"], rows


def _usable(files: Mapping[str, Path], load: Callable[[str], Any]) -> ItemsView[str, Any]:
    """Return what YAML files hold, by name; those that cannot be used are warned of."""
    from tesla_med.config.files import readable

    found, broken = readable(files, load)
    for reason in broken.values():
        log.warning("broken: %s", reason)
    return found.items()


def _tables() -> Table:
    from tesla_med.config.tables import load_table, table_files

    found = _usable(table_files(), load_table)
    rows = [
        [name, item.title, item.pipeline, str(len(item.rows)), ", ".join(item.protocols)]
        for name, item in found
    ]
    return ["table", "title", "pipeline", "rows", "protocols"], rows


LISTS: dict[str, Callable[[], Table]] = {
    "methods": _methods,
    "ops": _ops,
    "models": _models,
    "reports": _reports,
    "exports": _exports,
    "metrics": _metrics,
    "tasks": _tasks,
    "pipelines": _pipelines,
    "tables": _tables,
}
