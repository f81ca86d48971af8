"""``report/report.html``: one self-contained page that can be read, sent on and printed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tesla_med.config.models import LabelClass
from tesla_med.engine.quality import audit, pairs
from tesla_med.records import CaseResult, TileResult
from tesla_med.reports import _content, _run_content
from tesla_med.reports.base import REPORTS, Report, RunContext
from tesla_med.reports.calibration import reliability_png, summarise_results
from tesla_med.reports.drawing import data_uri
from tesla_med.reports.quality import scatter_png
from tesla_med.reports.tile_pictures import tile_pictures
from tesla_med.scoring.metrics import dice
from tesla_med.scoring.predicted import predicted_cases, predicted_table, predicted_tiles
from tesla_med.types import CaseView


@dataclass(frozen=True)
class Overlay:
    """One overlay, ready to be put into the page."""

    uri: str
    caption: str
    width: int


@REPORTS.register("html")
class HtmlReport(Report):
    """Summary, scores with the worst case first, overlays, calibration and settings."""

    name = "html"
    summary = "report.html, one self-contained page"

    kinds = (CaseResult, TileResult)
    draws = True

    def start(self, run: RunContext) -> None:
        """Start with an empty page."""
        super().start(run)
        self._page = next(made for kind, made in PAGES.items() if issubclass(run.kind, kind))(run)

    def case(self, result: Any, view: CaseView | None) -> None:
        """Take note of an item."""
        self._page.case(result, view)

    def finish(self, results: Sequence[Any]) -> list[Path]:
        """Write the page."""
        from tesla_med.io.files import write_text

        path = self.run.report_folder / "report.html"
        write_text(path, self._page.render(list(results)))
        return [path]


class CasePage:
    """The page of a run on volumes: the worst cases first, with overlays."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._pictures: dict[str, tuple[CaseResult, list[Overlay]]] = {}
        self._agreement: dict[str, dict[int, float | None]] = {}
        self._drawable = 0

    def case(self, result: CaseResult, view: CaseView | None) -> None:
        """Draw the case if it is among the worst so far; keep the agreement of its two masks."""
        if view is None:
            return
        self._agreement[result.case] = {
            item.value: dice(view.source_mask == item.value, view.mask == item.value)
            for item in self.run.pipeline.foreground
        }
        self._drawable += 1
        limit, quality = self.run.pipeline.report.max_cases_with_overlays, self.run.pipeline.quality
        if limit and len(self._pictures) >= limit:
            best = max(self._pictures, key=lambda name: _content.severity(self._pictures[name][0], quality))
            if _content.severity(result, quality) >= _content.severity(self._pictures[best][0], quality):
                return
            del self._pictures[best]
        if limit:
            self._pictures[result.case] = (result, draw_case(result, view, self.run))

    def render(self, results: list[CaseResult]) -> str:
        """Return the page as HTML."""
        from tesla_med import __version__

        run = self.run
        calibration = summarise_results(results, run)
        diagram = reliability_png(calibration, run.pipeline)
        rows = _content.case_rows(results, self._agreement, run.pipeline.quality)
        page: str = template("report.html.j2").render(
            run=run,
            version=__version__,
            tiles=_content.tiles(results, calibration),
            referenced=_content.has_references(results),
            rows=rows,
            classes=_content.class_summary(results),
            predicted_classes=predicted_table(found := predicted_cases(results, run.pipeline), "case"),
            warned=found.remarks,
            headings=[_content.heading(metric) for metric in _content.figure_metrics(results)],
            definitions=_content.definitions(),
            legend=run.pipeline.foreground,
            pictures={name: pictures for name, (_, pictures) in self._pictures.items()},
            drawable=self._drawable,
            undrawn=sum(item.status != "failed" for item in results) - self._drawable,
            nominal=_content.physical_titles() if _content.has_blank_volumes(results) else "",
            predicted=_content.has_predictions(results),
            quality=run.pipeline.quality,
            audit=audit(results),
            scatter=data_uri(scatter_png(results), "image/png") if pairs(results) else None,
            calibration=_run_content.calibration_rows(calibration, run.pipeline.classes),
            diagram=None if diagram is None else data_uri(diagram, "image/png"),
            settings=_run_content.settings(run),
            blank=_run_content.BLANK,
        )
        return page


class TilePage:
    """The page of a run on tiles: accuracy, calibration, and the pictures that other reports made."""

    def __init__(self, run: RunContext) -> None:
        self.run = run

    def case(self, result: TileResult, view: CaseView | None) -> None:
        """Do nothing: the page is about all tiles."""

    def render(self, results: list[TileResult]) -> str:
        """Return the page as HTML."""
        from tesla_med import __version__
        from tesla_med.scoring.classes import class_figures

        run = self.run
        drawn = tile_pictures(results, run)
        pictures = {name: data_uri(content, "image/png") for name, content in drawn.items()}
        page: str = template("tiles.html.j2").render(
            run=run,
            version=__version__,
            figures=class_figures(results, run.pipeline),
            pictures=pictures,
            predicted_classes=predicted_table(found := predicted_tiles(results, run.pipeline), "tile"),
            warned=found.remarks,
            remarks=Counter(text for item in results for text in item.notes),
            unread=[item for item in results if item.status == "failed"],
            blank=[item for item in results if item.status == "blank"],
            tiles=len(results),
        )
        return page


PAGES: dict[type, Any] = {CaseResult: CasePage, TileResult: TilePage}


def template(name: str) -> Any:
    """Return a template of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def draw_case(result: CaseResult, view: CaseView, run: RunContext) -> list[Overlay]:
    """Draw the slices of one case that hold the most foreground.

    Args:
        result: its scores, shown above the panels.
        view: its arrays.
        run: for the classes, the number of slices and the slice direction.
    """
    from tesla_med.io.nifti import slice_axis
    from tesla_med.reports import overlays

    axis = slice_axis(view.affine, run.pipeline.preprocessing.orientation)
    low, high = overlays.display_window(view)
    pictures = []
    for index in overlays.choose_slices(view, axis, run.pipeline.report.overlays_per_case):
        figure = overlays.draw(view, axis, index, run.pipeline.foreground, _titles(view, axis, index, run))
        caption = f"Slice {index + 1} of {view.image.shape[axis]}, display window {low:.4g} to {high:.4g}"
        uri = data_uri(overlays.to_jpeg(figure), "image/jpeg")
        pictures.append(Overlay(uri, caption, round(figure.get_figwidth() * figure.dpi)))
    return pictures


def _titles(view: CaseView, axis: int, index: int, run: RunContext) -> dict[str, str]:
    """Name each panel; with a reference, add the Dice of this slice, said to be of this slice."""
    from numpy import take

    if view.reference is None:
        return {}
    truth = take(view.reference, index, axis=axis)
    titles = {}
    for name, mask in (("source", view.source_mask), ("adapted", view.mask)):
        shown = mask if view.ignored is None else mask * ~view.ignored
        score = _slice_dice(truth, take(shown, index, axis=axis), run.pipeline.foreground)
        titles[name] = f"{name}   slice Dice {score}"
    return titles


def _slice_dice(truth: Any, mask: Any, classes: Sequence[LabelClass]) -> str:
    scores = [dice(truth == item.value, mask == item.value) for item in classes]
    return " / ".join(_run_content.NOT_APPLICABLE if score is None else f"{score:.2f}" for score in scores)
