"""``tensorboard/``: Dice per case, losses, policy, volumes, entropy and overlays as events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.reports.base import REPORTS, Report, RunContext
from tesla_med.types import CaseResult, CaseView

FOLDER = "tensorboard"


@REPORTS.register("tensorboard")
class TensorboardReport(Report):
    """Events for TensorBoard; the step of a case is its number in the run, from 0."""

    name = "tensorboard"
    summary = "TensorBoard events: Dice per case, losses, policy, overlays"

    def start(self, run: RunContext) -> None:
        """Open the event file."""
        from torch.utils.tensorboard import SummaryWriter

        super().start(run)
        self._writer: Any = SummaryWriter(str(run.out / FOLDER))
        self._cases = 0
        self._pictures = 0
        self._means: dict[str, list[float]] = {"adapted": [], "source": []}
        title = f"{run.site.id} ({run.site.institution}), {run.method}, {run.protocol}, seed {run.seed}"
        self._writer.add_text("run", "  \n".join([title, *run.notes]), 0)

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write every value under its tag."""
        for tag, value in scalars.items():
            self._writer.add_scalar(tag, value, step)

    def case(self, result: CaseResult, view: CaseView | None) -> None:
        """Write the figures of one case and, up to the limit of the pipeline, an overlay."""
        number = self._cases
        self._cases += 1
        for tag, value in self._figures(result).items():
            if value is not None:
                self._writer.add_scalar(tag, value, number)
        if view is not None and self._pictures < self.run.pipeline.report.max_cases_with_overlays:
            self._pictures += 1
            self._overlay(result, view, number)
        self._writer.flush()

    def finish(self, results: Sequence[CaseResult]) -> list[Path]:
        """Close the event file."""
        self._writer.close()
        folder = Path(self._writer.log_dir)
        return sorted(folder.glob("events.out.tfevents.*"))

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _figures(self, result: CaseResult) -> dict[str, float | None]:
        figures: dict[str, float | None] = {
            "dice/mean": result.mean_dice,
            "dice_source/mean": result.mean_dice_source,
            "entropy/adapted": result.entropy,
            "entropy/source": result.entropy_source,
            "seconds": result.seconds,
        }
        for score in result.scores:
            figures[f"dice/{score.name}"] = score.dice
            figures[f"dice_source/{score.name}"] = score.dice_source
            figures[f"hd95_mm/{score.name}"] = score.hd95_mm
            figures[f"volume_ml/{score.name}"] = score.volume_ml
            figures[f"volume_ml_source/{score.name}"] = score.volume_ml_source
        for model, value in (("adapted", result.mean_dice), ("source", result.mean_dice_source)):
            if value is not None:
                self._means[model].append(value)
                figures[f"site_mean/dice_{model}"] = sum(self._means[model]) / len(self._means[model])
        return figures

    def _overlay(self, result: CaseResult, view: CaseView, number: int) -> None:
        from tesla_med.io.nifti import slice_axis
        from tesla_med.reports.overlays import choose_slices, display_window, draw, to_array

        axis = slice_axis(view.affine, self.run.pipeline.preprocessing.orientation)
        index = choose_slices(view, axis, 1)[0]
        picture = to_array(draw(view, axis, index, self.run.pipeline.foreground))
        low, high = display_window(view)
        shown = "source | adapted" + (" | reference" if view.reference is not None else "")
        text = (
            f"{shown}; slice {index + 1} of {view.image.shape[axis]};"
            f" display window {low:.6g} to {high:.6g}, the same for every panel; radiological display"
        )
        # Parts of file names that are no valid text cannot be stored as a tag.
        tag = f"overlay/{result.case}".encode("utf-8", "backslashreplace").decode("utf-8")
        self._writer.add_image(tag, picture, number, dataformats="HWC")
        self._writer.add_text(tag, text, number)
