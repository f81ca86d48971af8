"""One page for a whole study: sites against methods, every case as a dot, links to the runs' reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tesla_med import __version__
from tesla_med.config.study import StudyConfig
from tesla_med.io.files import write_text
from tesla_med.records import WITHOUT_RESULT
from tesla_med.study.cells import Grid, StudyCell
from tesla_med.study.tables import change_in

STUDY_HTML = "study.html"
REPORT = Path("report") / "report.html"
LOSSES = (1, 2, 5)
"""Points below the own source that count as harm."""


@dataclass(frozen=True)
class Dot:
    """One case of one cell, values in percent.

    Attributes:
        name: of the case, and the seed where there are several.
        source: of the unadapted model; None without a reference.
        adapted: of the method; the predicted Dice where there is no reference.
    """

    name: str
    source: float | None
    adapted: float


@dataclass(frozen=True)
class Row:
    """One site under one method.

    Attributes:
        what: weights, method and protocol.
        site: id.
        dots: cases that have a score, or a predicted Dice.
        scored: whether there are references.
        source: mean of the unadapted model in percent; None without references.
        adapted: mean of the method, or of its predicted Dice.
        change: mean change in points, over the cases of which both are known, see
            :func:`~tesla_med.study.tables.change_in`; None without references.
        harm: cases that lose more than 1, 2 and 5 points.
        untrusted: cases on which no mask is trusted.
        failed: cases without a mask or a score.
        cases: in all.
        reports: address and label of the report of each cell.
    """

    what: str
    site: str
    dots: tuple[Dot, ...]
    scored: bool
    source: float | None
    adapted: float | None
    change: float | None
    harm: tuple[int, ...]
    untrusted: int
    failed: int
    cases: int
    reports: tuple[tuple[str, str], ...]


def write_page(
    out: Path,
    study: StudyConfig,
    grid: Grid,
    contents: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, str],
) -> Path:
    """Write ``study.html``, which loads nothing from elsewhere.

    Args:
        out: folder of the study.
        study: as given.
        grid: its cells.
        contents: of the cells that are done, by name.
        failed: reasons of the others, by name.

    Raises:
        OutputError: the file cannot be written.
    """
    from tesla_med.reports.html import template

    rows = rows_of(out, grid, contents)
    accuracy = any(row["metric"] == "accuracy" for content in contents.values() for row in content["cases"])
    path = out / STUDY_HTML
    text = template("study.html.j2").render(
        name=study.name,
        version=__version__,
        metric="accuracy" if accuracy else "Dice",
        sites=list(dict.fromkeys(row.site for row in rows)),
        rows=rows,
        losses=LOSSES,
        done=sum(cell.name in contents for cell in grid.cells),
        cells=len(grid.cells),
        problems=[*grid.problems, *failed.items()],
    )
    write_text(path, text)
    return path


def rows_of(out: Path, grid: Grid, contents: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row for each site, weights, method and protocol of the cells that are done, in their order."""
    groups: dict[tuple[str, str], list[StudyCell]] = {}
    several = len({str(cell.key["weights"]) for cell in grid.cells}) > 1
    for cell in grid.cells:
        if cell.name in contents:
            key = cell.key
            what = f"{key['method']} {key['protocol']}" + (f", {key['weights']}" if several else "")
            groups.setdefault((str(key["site"]), what), []).append(cell)
    return [_row(out, site, what, cells, contents) for (site, what), cells in groups.items()]


def _row(
    out: Path, site: str, what: str, cells: Sequence[StudyCell], contents: Mapping[str, Mapping[str, Any]]
) -> Row:
    found = [(cell, case) for cell in cells for case in contents[cell.name]["cases"]]
    scored = any(case["adapted"] is not None for _, case in found)
    dots = []
    for cell, case in found:
        value = case["adapted"] if scored else case.get("predicted")
        if value is not None:
            name = case["case"] + (f", seed {cell.key['seed']}" if len(cells) > 1 else "")
            dots.append(Dot(name, None if case["source"] is None else 100 * case["source"], 100 * value))
    changes = [100 * change for _, case in found if (change := change_in(case)) is not None]
    before = [100 * case["source"] for _, case in found if case["source"] is not None]
    reports = [
        (f"{cell.folder(out).relative_to(out).as_posix()}/{REPORT.as_posix()}", f"seed {cell.key['seed']}")
        for cell in cells
        if (cell.folder(out) / REPORT).is_file()
    ]
    return Row(
        what,
        site,
        tuple(dots),
        scored,
        fmean(before) if before else None,
        fmean(dot.adapted for dot in dots) if dots else None,
        fmean(changes) if changes else None,
        tuple(sum(change < -loss for change in changes) for loss in LOSSES),
        sum(case.get("trusted") is False for _, case in found),
        sum(case["status"] in WITHOUT_RESULT for _, case in found),
        len(found),
        tuple(reports),
    )
