"""``report/calibration.json`` and ``report/reliability.png``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tesla_med.config.models import PipelineConfig
from tesla_med.records import CaseResult, TileResult
from tesla_med.reports.base import REPORTS, Report, RunContext, counts_of
from tesla_med.scoring.areas import BOUNDARY_WIDTH
from tesla_med.scoring.calibration import ALL_CLASSES, MODELS, meaning_of
from tesla_med.scoring.summary import merge, summarise

COLORS = {"source": "#8a94a3", "adapted": "#1f6f8b"}
REGION = "calibration region"
OBSERVED = "observed"
INK = "#27313d"


@REPORTS.register("calibration")
class CalibrationReport(Report):
    """Calibration of the unadapted model and of the method: the region, the boundary, all voxels."""

    name = "calibration"
    summary = "calibration.json and a reliability diagram"
    kinds = (CaseResult, TileResult)

    def finish(self, results: Sequence[Any]) -> list[Path]:
        """Write both files; without a scored case only the JSON, which says so."""
        from tesla_med.io.files import atomic_path, write_json

        summary = summarise_results(results, self.run)
        folder = self.run.report_folder
        data, picture = folder / "calibration.json", folder / "reliability.png"
        words = definitions(self.run.pipeline)
        if "boundary" not in summary:  # tiles have none, nor have counts of an earlier version
            del words["boundary"]
        if self.run.pipeline.whole_images:
            words["region"] = f"every {self.run.item} that has a label"
        write_json(data, summary | {"definitions": words} if "region" in summary else summary)
        drawn = reliability_png(summary, self.run.pipeline)
        if drawn is None:
            picture.unlink(missing_ok=True)  # one of an earlier run would contradict the JSON
            return [data]
        with atomic_path(picture) as temporary:
            temporary.write_bytes(drawn)
        return [data, picture]


def summarise_results(results: Sequence[Any], run: RunContext | None = None) -> dict[str, Any]:
    """Return :func:`tesla_med.scoring.summary.summarise` of every record that has counts.

    Args:
        results: the records.
        run: knows how to count records that do not hold their counts themselves.
    """
    counts = counts_of(results) if run is None else run.counts(results)
    return summarise(merge(counts), counts)


def definitions(pipeline: PipelineConfig) -> dict[str, str]:
    """Return what each figure means, in words."""
    names = ", ".join(f"{item.value} {item.name}" for item in pipeline.classes)
    noun = _noun(pipeline)

    def bins(target: str) -> str:
        confidence, accuracy = meaning_of(target, noun)
        return f"confidence is the {confidence}, accuracy the {accuracy}"

    return {
        "classes": names,
        "all": f"all classes together: {bins(ALL_CLASSES)}",
        **{str(item.value): f"one class: {bins(item.name)}" for item in pipeline.classes},
        "region": (
            "union of the foregrounds of reference, source mask and adapted mask, dilated by"
            f" {pipeline.report.region_dilation} voxels within slices"
        ),
        "boundary": (
            f"within {BOUNDARY_WIDTH} voxels of an edge of a foreground class of the reference, on both"
            " sides, within slices"
        ),
        "ece": f"mean over {noun}s of |accuracy - confidence| of the {noun}'s bin; bins are (low, high]",
        "brier": "mean squared error of the probability; for all classes summed over classes, 0 to 2",
        "nll": "mean negative natural logarithm of the probability of the true value, at least epsilon",
        "difference": "adapted minus source; below zero the adapted model is better",
        "intervals": (
            "percentiles of the figure over cases drawn with replacement, the same cases for both models;"
            " null with fewer than two cases that have voxels in the area"
        ),
        "clipped": f"{noun}s whose probability of the true value was below epsilon",
    }


def _noun(pipeline: PipelineConfig) -> str:
    return "tile" if pipeline.whole_images else "voxel"


def reliability_png(summary: Mapping[str, Any], pipeline: PipelineConfig) -> bytes | None:
    """Draw the reliability of the region, or of all tiles, one row per foreground class.

    The source model is on the left, the adapted one on the right.

    Returns:
        A PNG file, or None where no voxel of the region was scored.
    """
    if "region" not in summary or not summary["region"]["adapted"][ALL_CLASSES]["voxels"]:
        return None
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    classes = pipeline.foreground
    what, noun = "all labelled tiles" if pipeline.whole_images else REGION, _noun(pipeline)
    figure = Figure(figsize=(8.6, 0.5 + 4.1 * len(classes)), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    rows = figure.subfigures(len(classes), 1, squeeze=False, hspace=0.04)
    for part, item in zip(rows[:, 0], classes, strict=True):
        grid = part.subplots(
            2, 2, sharex=True, sharey="row", gridspec_kw={"height_ratios": [4, 1], "hspace": 0.02}
        )
        part.suptitle(f"{item.name} (label {item.value}), {what}", color=INK, weight="bold")
        for column, model in enumerate(MODELS):
            _draw(grid[0, column], grid[1, column], summary["region"][model][str(item.value)], model)
        confidence, accuracy = meaning_of(item.name, noun)
        grid[0, 0].set_ylabel(accuracy, color=INK)
        grid[1, 0].set_ylabel(f"{noun}s", color=INK)
        for axes in grid[1]:
            axes.set_xlabel(confidence, color=INK)
        handles = {
            name: handle
            for handle, name in zip(*grid[0, 0].get_legend_handles_labels(), strict=True)
            if name != OBSERVED
        }  # the bars, of two colours, are told by the label of the axis
        part.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=8
        )
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130)
    return stream.getvalue()


def _draw(above: Any, below: Any, figures: Mapping[str, Any], model: str) -> None:
    bins = figures["bins"]
    edges, counts = bins["edges"], bins["count"]
    left, width = edges[:-1], edges[1] - edges[0]
    color = COLORS[model]
    filled = [index for index, count in enumerate(counts) if count]
    above.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="perfect", zorder=3)
    above.bar(
        [left[index] for index in filled],
        [bins["accuracy"][index] for index in filled],
        width,
        align="edge",
        color=color,
        edgecolor="white",
        linewidth=0.8,
        label=OBSERVED,
    )
    above.plot(
        [bins["confidence"][index] for index in filled],
        [bins["accuracy"][index] for index in filled],
        "o",
        color=INK,
        markersize=3.2,
        label="mean probability of the bin",
        zorder=4,
        clip_on=False,
    )
    ece = figures["ece"]
    above.set_title(f"{model}   ECE {'n/a' if ece is None else format(ece, '.3f')}", color=INK, fontsize=11)
    above.set(xlim=(0, 1), ylim=(0, 1), yticks=[0, 0.25, 0.5, 0.75, 1])
    below.bar(left, counts, width, align="edge", color=color, edgecolor="white", linewidth=0.8)
    below.set_yscale("symlog", linthresh=10)
    below.set_ylim(bottom=0)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#aab3bf")
        axes.tick_params(colors="#56616f", labelsize=8)
        axes.grid(axis="y", color="#e8ebef", linewidth=0.8)
        axes.set_axisbelow(True)
