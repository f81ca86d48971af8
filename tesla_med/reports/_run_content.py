"""What the HTML report shows of a run in addition to its cases: calibration and settings, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tesla_med.config.models import LabelClass
from tesla_med.reports.base import RunContext
from tesla_med.scoring.calibration import ALL_CLASSES, FIGURES
from tesla_med.scoring.summary import DIFFERENCE

NOT_APPLICABLE = "n/a"
BLANK = "–"
SECTION_LIMIT = 160
RESULTS = ("cases", "predicted", "remarks", "failed", "tiles_read_with_remarks", "notes")
"""Keys of the manifest that are no settings: the page shows them elsewhere."""
AREA_TEXT = {"region": "calibration region", "boundary": "boundary", "all": "all voxels"}


def calibration_rows(summary: Mapping[str, Any], classes: Sequence[LabelClass]) -> list[dict[str, Any]]:
    """Return a row for each area and class with the figures of both models; none without them.

    Each figure is (source, adapted). The rows of all classes also have ``intervals``, the same
    pairs of "low to high", and ``changes``, (change, interval, tone) of each figure.
    """
    rows: list[dict[str, Any]] = []
    for area, title in AREA_TEXT.items():
        if area not in summary:
            continue
        names = [(ALL_CLASSES, "all classes")] + [(str(item.value), item.name) for item in classes[1:]]
        for key, name in names:
            source, ours = summary[area]["source"][key], summary[area]["adapted"][key]
            row: dict[str, Any] = {"area": title, "name": name, "voxels": f"{ours['voxels']:,}"}
            row["figures"] = [(number(source[item], 3), number(ours[item], 3)) for item in FIGURES]
            row["intervals"] = row["changes"] = None
            if key == ALL_CLASSES:
                names_of = [f"{item}_interval" for item in FIGURES]
                row["intervals"] = [(_interval(source[item]), _interval(ours[item])) for item in names_of]
                row["changes"] = [_change(summary[area][DIFFERENCE][key], item) for item in FIGURES]
            rows.append(row)
    return rows


def _interval(bounds: Sequence[float] | None) -> str:
    return NOT_APPLICABLE if bounds is None else " to ".join(number(value, 3) for value in bounds)


def _change(difference: Mapping[str, Any], figure: str) -> tuple[str, str, str]:
    """Return adapted minus source, its interval, and a tone where the interval leaves zero out."""
    value, bounds = difference[figure], difference[f"{figure}_interval"]
    if value is None:
        return BLANK, "", ""
    if bounds is None:
        return signed(value), NOT_APPLICABLE, ""
    low, high = bounds
    found = tone(-high) if high < 0 else tone(-low) if low > 0 else ""
    return signed(value), f"{signed(low)} to {signed(high)}", found


def settings(run: RunContext) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (heading, rows) of every setting, the manifest's sections one by one."""
    pairs = [
        ("site", f"{run.site.id}, {run.site.institution}"),
        ("description", run.site.description),
        ("scanner", _scanner(run)),
        ("pipeline", f"{run.pipeline.name}: {run.pipeline.title}"),
        ("method", run.method),
        ("protocol", run.protocol),
        ("seed", str(run.seed)),
        ("reset", run.reset),
    ]
    groups = [("run", [(key, value) for key, value in pairs if value])]
    loose: list[tuple[str, str]] = []
    for key, value in run.manifest.items():
        if key in RESULTS:
            continue
        if isinstance(value, Mapping):
            rows = [(name.removeprefix("parameters."), text) for name, text in _flat(value)]
            groups.append((str(key), rows))
        else:
            loose.append((str(key), _plain(value)))
    if loose:
        groups.insert(1, ("environment", loose))
    return [(heading, rows) for heading, rows in groups if rows]


def signed(change: float) -> str:
    """Return a change with its sign; a change that rounds to zero has none."""
    return "±0.000" if abs(change) < 0.0005 else f"{change:+.3f}".replace("-", "−")


def tone(change: float) -> str:
    """Return good, bad or nothing for a change where more is better."""
    return "" if abs(change) < 0.0005 else "good" if change > 0 else "bad"


def number(value: float | None, digits: int) -> str:
    return BLANK if value is None else f"{value:.{digits}f}"


def _scanner(run: RunContext) -> str:
    known = run.site.scanner
    field = None if known.field_strength_t is None else f"{known.field_strength_t:g} T"
    parts = (known.manufacturer, known.model, field, known.sequence, known.coil and f"{known.coil} coil")
    return ", ".join(part for part in parts if part)


def _flat(content: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((f"{prefix}{key}", _plain(value)))
    return rows


def _plain(value: Any) -> str:
    if value is None or value in ("", [], (), {}):
        return BLANK
    if isinstance(value, list | tuple):
        text = ", ".join(_plain(item) for item in value)
    elif isinstance(value, Mapping):
        text = " ".join(f"{key}: {_plain(item)}" for key, item in value.items())
    else:
        text = str(value)
    return text if len(text) <= SECTION_LIMIT else text[: SECTION_LIMIT - 1] + "…"
