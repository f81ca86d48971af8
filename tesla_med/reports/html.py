"""``report/report.html``: one page that can be read, sent on and printed, and beside it every slice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tesla_med.engine.quality import audit, pairs
from tesla_med.records import CaseResult, TileResult
from tesla_med.reports import _content, _run_content, overlays, slices
from tesla_med.reports.base import REPORTS, Report, RunContext
from tesla_med.reports.calibration import reliability_png, summarise_results
from tesla_med.reports.drawing import data_uri
from tesla_med.reports.quality import scatter_png
from tesla_med.reports.tile_pictures import tile_pictures
from tesla_med.scoring.metrics import dice
from tesla_med.scoring.predicted import predicted_cases, predicted_table, predicted_tiles
from tesla_med.types import CaseView

LAYERS = ("adapted", "source", "reference", "entropy")
"""What can be shown on an image, in the order of the keys 1 to 4; the same as in ``tesla-med review``."""
MOST_BYTES = 20_000_000
"""What the pictures of cases may take in the page; the slices beside it have no limit."""


@REPORTS.register("html")
class HtmlReport(Report):
    """Summary, scores with the worst case first, slices, calibration and settings."""

    name = "html"
    summary = "report.html, one page, and every slice beside it"

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
    """The page of a run on volumes: the worst cases first, with key slices; every slice lies beside it."""

    def __init__(self, run: RunContext) -> None:
        self.run = run
        self._stills: dict[str, tuple[CaseResult, dict[str, Any]]] = {}
        self._agreement: dict[str, dict[int, float | None]] = {}
        self._counts: dict[str, int] = {}
        self._layers: set[str] = set()
        self._drawable = 0

    def case(self, result: CaseResult, view: CaseView | None) -> None:
        """Draw the case, keep its key slices if it is among the worst so far and how its masks agree."""
        if view is not None:
            self._agreement[result.case] = {
                item.value: dice(view.source_mask == item.value, view.mask == item.value)
                for item in self.run.pipeline.foreground
            }
        content = self._earlier(result) if view is None else self._drawn(result, view)
        self._drawable += view is not None or content is not None
        if content is None:
            return
        self._layers |= {*content["layers"]}
        if len(content["slices"]) == content["count"]:
            self._counts[result.case] = content["count"]
        if self._among_worst(result):
            key = [item for item in content["slices"] if item["index"] in content["key"]]
            self._stills[result.case] = (result, {**content, "slices": key})
            if len(self._stills) > self.run.pipeline.report.max_cases_with_overlays:
                del self._stills[self._best()]

    def _among_worst(self, result: CaseResult) -> bool:
        limit = self.run.pipeline.report.max_cases_with_overlays
        if len(self._stills) < limit:
            return True
        return limit > 0 and self._severity(result) < self._severity(self._stills[self._best()][0])

    def _best(self) -> str:
        return max(self._stills, key=lambda name: self._severity(self._stills[name][0]))

    def _severity(self, result: CaseResult) -> tuple[Any, ...]:
        return _content.severity(result, self.run.pipeline.quality)

    def _drawn(self, result: CaseResult, view: CaseView) -> dict[str, Any] | None:
        """Draw a case, and write its slices unless the pipeline wants those of the page only."""
        from tesla_med.io.nifti import slice_axis

        config = self.run.pipeline.report
        if not config.slices and not self._among_worst(result):
            return None
        axis = slice_axis(view.affine, self.run.pipeline.preprocessing.orientation)
        key = overlays.choose_slices(view, axis, config.overlays_per_case)
        chosen = None if config.slices else key
        content = slices.draw_slices(view, axis, self.run.pipeline.foreground, chosen)
        content |= {"key": key, "used": result.used}
        if config.slices:
            slices.write_slices(slices.file_of(self.run.report_folder, result.case), content)
        return content

    def _earlier(self, result: CaseResult) -> dict[str, Any] | None:
        """Return the slices that were written before; those of a mask that was undone become the source's."""
        path = slices.file_of(self.run.report_folder, result.case)
        if result.status == "failed":
            path.unlink(missing_ok=True)
            return None
        content = slices.read_slices(path)
        if content is not None and content["used"] != result.used:
            content = slices.reset_to_source(content) | {"used": result.used}
            slices.write_slices(path, content)
        return content

    def _embedded(self, rows: Sequence[_content.CaseRow]) -> dict[str, dict[str, Any]]:
        """Return key slices by case, worst first, as many as the page may hold."""
        left, found = MOST_BYTES, {}
        for name in (row.name for row in rows if row.name in self._stills):
            content = self._stills[name][1]
            left -= slices.encoded_size(content)
            if left < 0:
                break
            found[name] = content
        return found

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
            predicted_classes=predicted_table(
                found := predicted_cases(results, run.pipeline), "case", frozen=run.method == "source"
            ),
            warned=found.remarks,
            headings=[_content.heading(metric) for metric in _content.figure_metrics(results)],
            definitions=_content.definitions(),
            legend=run.pipeline.foreground,
            stills=(stills := self._embedded(rows)),
            limited=len(stills) < len(self._stills),
            files={name: slices.address_of(name) for name in self._counts},
            counts=self._counts,
            layers=[name for name in LAYERS if name in self._layers],
            keys=LAYERS,
            roles=slices.ROLES,
            ramp=slices.RAMP,
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
            predicted_classes=predicted_table(
                found := predicted_tiles(results, run.pipeline), "tile", frozen=run.method == "source"
            ),
            warned=found.remarks,
            remarks=Counter(text for item in results for text in item.notes),
            unread=[item for item in results if item.status == "failed"],
            blank=[item for item in results if item.status == "blank"],
            tiles=len(results),
            settings=_run_content.settings(run),
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
