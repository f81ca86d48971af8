"""What TensorBoard is told of cases and of tiles: their curves, tables and pictures."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tesla_med.io.names import valid
from tesla_med.records import CaseResult, TileResult
from tesla_med.reports.base import RunContext
from tesla_med.scoring.metrics import figure_columns
from tesla_med.types import CaseView

LAST_OF_CASE = "seconds"
"""The tag that is written last of every case: the losses before it are those of the case."""
LAYOUT_TAG = "custom_scalars__config__"
LAYOUT = {
    "Site": {
        "Dice by case": ["Multiline", ["dice/mean", "dice_source/mean"]],
        "mean Dice so far": [
            "Multiline",
            ["site_mean/dice_adapted", "site_mean/dice_source", "site_mean/predicted_dice"],
        ],
        "entropy by case": ["Multiline", ["entropy/adapted", "entropy/source"]],
        "guard by case": ["Multiline", ["guard/share", "guard/trusted"]],
    }
}
"""Charts of the tab *Custom scalars*: source and adapted in one."""
LEAST_OVERLAP = 0.25
"""Share of the wider of two display windows that both must hold for a case to be shown in that of the run."""
MOST_ROWS = 120
"""Cases in the picture of all Dice."""
TRUSTED = {True: "yes", False: "**no**", None: ""}
"""Of a case, in words: whether its mask is trusted."""


class CaseCurves:
    """A point per case, and an overlay of as many as the pipeline says."""

    def __init__(self, run: RunContext, writer: Any) -> None:
        self.run, self._writer = run, writer
        self._number = {name: number for number, name in enumerate(run.names)}
        self._means: dict[str, list[float]] = {}
        self._window: tuple[float, float] | None = None
        writer.add_custom_scalars(LAYOUT)

    @staticmethod
    def own() -> tuple[str, ...]:
        """Return the tags of what is told of cases; those that end in a slash stand for all below."""
        figures = (f"{name}/" for name in figure_columns())
        return (*figures, "entropy/", LAST_OF_CASE, "site_mean/", "guard/", "all_cases/", LAYOUT_TAG)

    def unit(self, records: Sequence[Any], view: CaseView | None) -> None:
        """Write the figures of one case and, up to the limit of the pipeline, an overlay."""
        for result in records:
            number = self._number.setdefault(result.case, len(self._number))
            for tag, value in self._figures(result).items():
                if value is not None:
                    self._writer.add_scalar(tag, value, number)
            if view is not None and number < self.run.pipeline.report.max_cases_with_overlays:
                self._overlay(result, view, number)

    def finish(self, results: Sequence[Any]) -> None:
        """Write a table of all cases, worst first, and a picture of their Dice, which nothing smooths."""
        self._writer.add_text("all_cases/table", case_table(results), 0)
        picture = dice_picture(results)
        if picture is not None:
            self._writer.add_image("all_cases/dice", picture, 0, dataformats="HWC")

    def _figures(self, result: CaseResult) -> dict[str, float | None]:
        figures: dict[str, float | None] = {
            "dice/mean": result.mean_dice,
            "dice_source/mean": result.mean_dice_source,
            "entropy/adapted": result.entropy,
            "entropy/source": result.entropy_source,
            "guard/share": result.share,
            "guard/trusted": None if result.trusted is None else float(result.trusted),
        }
        for score in result.scores:
            figures |= {f"{name}/{score.name}": score.value(name) for name in figure_columns()}
        for name, value in (
            ("dice_adapted", result.mean_dice),
            ("dice_source", result.mean_dice_source),
            ("predicted_dice", result.predicted_dice),
        ):
            if value is not None:
                known = self._means.setdefault(name, [])
                known.append(value)
                figures[f"site_mean/{name}"] = sum(known) / len(known)
        return figures | {LAST_OF_CASE: result.seconds}

    def _overlay(self, result: CaseResult, view: CaseView, number: int) -> None:
        from tesla_med.io.nifti import slice_axis
        from tesla_med.reports.overlays import choose_slices, draw, to_array

        axis = slice_axis(view.affine, self.run.pipeline.preprocessing.orientation)
        index = choose_slices(view, axis, 1)[0]
        (low, high), common = self._window_of(view)
        picture = to_array(draw(view, axis, index, self.run.pipeline.foreground, window=(low, high)))
        shown = "source | adapted" + (" | reference" if view.reference is not None else "")
        text = (
            f"{shown}; slice {index + 1} of {view.image.shape[axis]};"
            f" display window {low:.6g} to {high:.6g}, the same for every panel and {common};"
            " radiological display"
        )
        tag = f"overlay/{valid(result.case)}"
        self._writer.add_image(tag, picture, number, dataformats="HWC")
        self._writer.add_text(tag, text, number)

    def _window_of(self, view: CaseView) -> tuple[tuple[float, float], str]:
        """Return the window of the first case, or a case's own where its intensities lie elsewhere."""
        from tesla_med.reports.overlays import display_window

        own = display_window(view)
        self._window = self._window or own
        low, high = max(own[0], self._window[0]), min(own[1], self._window[1])
        if high - low >= LEAST_OVERLAP * max(own[1] - own[0], self._window[1] - self._window[0]):
            return self._window, "for every case"
        return own, "for this case only, whose intensities are on another scale than those of the first"


class TileCurves:
    """A point per batch, at the number of tiles seen so far: entropy and running accuracy."""

    def __init__(self, run: RunContext, writer: Any) -> None:
        self.run, self._writer = run, writer
        self._tiles = self._labelled = 0
        self._correct = {"source": 0, "adapted": 0}

    @staticmethod
    def own() -> tuple[str, ...]:
        """Return the tags of what is told of tiles; those that end in a slash stand for all below."""
        return ("entropy/", "running/", "final/", "confusion", "reliability", "uncertain")

    def unit(self, records: Sequence[Any], view: CaseView | None) -> None:
        """Write entropy of a batch, and accuracy and error of all labelled tiles so far."""
        from tesla_med.scoring.score import normalised_entropy

        read: list[TileResult] = [item for item in records if item.probs is not None]
        if not read:
            return
        self._tiles += len(read)
        known = [item for item in read if item.label]
        self._labelled += len(known)
        for name, probs, correct in (
            ("source", [item.probs_source for item in read], [item.correct_source for item in known]),
            ("adapted", [item.probs for item in read], [item.correct for item in known]),
        ):
            entropy = float(normalised_entropy(np.array(probs, np.float32).T).mean())
            self._writer.add_scalar(f"entropy/{name}", entropy, self._tiles)
            self._correct[name] += sum(bool(item) for item in correct)
            if self._labelled:
                accuracy = self._correct[name] / self._labelled
                self._writer.add_scalar(f"running/accuracy_{name}", accuracy, self._tiles)
                self._writer.add_scalar(f"running/error_{name}", 1.0 - accuracy, self._tiles)

    def finish(self, results: Sequence[Any]) -> None:
        """Write the final figures and the pictures."""
        from PIL import Image

        from tesla_med.reports.tile_pictures import tile_pictures
        from tesla_med.scoring.classes import class_figures

        names = [item.name for item in self.run.pipeline.classes]
        for name, values in class_figures(results, self.run.pipeline).items():
            for key in FINAL:
                if values[key] is not None:
                    self._writer.add_scalar(f"final/{key}_{name}", values[key], self._tiles)
            for title, share in zip(names, values["accuracy_by_class"], strict=True):
                if share is not None:
                    self._writer.add_scalar(f"final/accuracy_{name}/{title}", share, self._tiles)
        for name, content in tile_pictures(results, self.run).items():
            picture = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
            self._writer.add_image(name, picture, self._tiles, dataformats="HWC")


def case_table(results: Sequence[CaseResult]) -> str:
    """Return a Markdown table of cases, those that nobody trusts first, then by Dice or predicted Dice."""

    def known(result: CaseResult) -> float:
        value = result.predicted_dice if result.mean_dice is None else result.mean_dice
        return 2.0 if value is None else value

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.1f}"

    lines = ["| case | source | adapted | change | predicted | mask | trusted | status |", "|---" * 8 + "|"]
    for item in sorted(results, key=lambda item: (item.trusted is not False, known(item), item.case)):
        before, after, moved = item.mean_dice_source, item.mean_dice, item.dice_change
        change = "" if moved is None else f"{100 * moved:+.1f}"
        cells = [valid(item.case).replace("|", "\\|"), percent(before), percent(after), change]
        cells += [percent(item.predicted_dice), item.used or "", TRUSTED[item.trusted], item.status]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def dice_picture(results: Sequence[CaseResult]) -> Any:
    """Return a picture (H, W, 3) uint8 of the Dice of the first ``MOST_ROWS`` cases; None if none is known.

    Without references it shows the predicted Dice.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    scored = [item for item in results if item.mean_dice is not None]
    shown = scored or [item for item in results if item.predicted_dice is not None]
    if not shown:
        return None
    shown = shown[:MOST_ROWS]

    def percents(values: Iterable[float | None]) -> list[float]:
        return [np.nan if value is None else 100 * value for value in values]

    figure = Figure(figsize=(7, 0.8 + 0.24 * len(shown)), dpi=100, layout="constrained")
    axes = figure.subplots()
    rows = np.arange(len(shown))
    if scored:
        axes.scatter(percents(item.mean_dice_source for item in shown), rows, c="#7a8794", label="source")
        axes.scatter(percents(item.mean_dice for item in shown), rows, c="#c2500a", label="adapted")
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    else:
        axes.scatter(percents(item.predicted_dice for item in shown), rows, c="#c2500a")
    axes.set_yticks(rows, [valid(item.case)[-40:] for item in shown], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(-1, 101)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel("Dice, %" if scored else "predicted Dice, %")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


CURVES: dict[type, Any] = {CaseResult: CaseCurves, TileResult: TileCurves}
FINAL = ("accuracy", "error", "mean_class_accuracy", "ece", "brier", "nll")
