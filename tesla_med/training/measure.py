"""Measure the source statistics of a network on labelled items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.config.request import check_seed
from tesla_med.config.resolve import source_sites
from tesla_med.engine.signals import ZOOMS, zoomed_mask
from tesla_med.models.base import Network, default_device, predicted_class, to_model_range
from tesla_med.models.loading import load_model
from tesla_med.models.moments import SourceStatistics, source_statistics
from tesla_med.models.statistics import make_statistics_card, save_statistics, statistics_path
from tesla_med.prepare.fill import hidden
from tesla_med.prepare.histogram import Histogram
from tesla_med.tasks.base import task_of
from tesla_med.tasks.labelled import Part
from tesla_med.tta.base import MethodContext, make_method
from tesla_med.types import Progress


def measure(
    model: Network,
    part: Part,
    pipeline: PipelineConfig,
    seed: int = 0,
    progress: Progress | None = None,
) -> SourceStatistics:
    """Return the statistics over every image of ``part``, unaugmented and without fill."""

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for images, given, fill in measured(part, pipeline.predict_batch):
            labels = given if fill is None else given.long().masked_fill(fill, -1)  # of no class
            yield to_model_range(images, pipeline.preprocessing.model_range), labels
            done += len(images)
            if progress:
                progress("statistics", done, part.images)

    generator = torch.Generator().manual_seed(seed)
    return source_statistics(model, stream(), len(pipeline.classes), generator=generator)


def measured(part: Part, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """Yield every image of a part once, at most ``size`` at once, with its labels and where it is fill."""
    for (images, labels), fill in zip(part.batches(size), part.unmeasured(size), strict=False):
        yield images, labels, fill


@torch.no_grad()
def steadiness(model: Network, part: Part, pipeline: PipelineConfig) -> tuple[float, float]:
    """Return how well masks agree with those in reduced and in enlarged slices, over all images of ``part``.

    The Dice of each foreground class over all of them, averaged over classes; 1 where nothing is found.
    What a network that was not trained at several sizes makes of them says little of a mask, and this
    says how little.
    """
    device = next(model.parameters()).device
    context = MethodContext(
        device, model_range=pipeline.preprocessing.model_range, predict_batch=pipeline.predict_batch
    )
    source, classes = make_method("source", model, {}, context), len(pipeline.classes)
    common, total = torch.zeros(len(ZOOMS), classes), torch.zeros(len(ZOOMS), classes)
    for images, _, fill in measured(part, pipeline.predict_batch):
        mask = hidden(predicted_class(source.probabilities(source.model, images)), fill)
        for row, zoom in enumerate(ZOOMS):
            found = hidden(zoomed_mask(source, source.model, images, zoom), fill)
            for index in range(1, classes):
                one, two = mask == index, found == index
                common[row, index] += int((one & two).sum())
                total[row, index] += int(one.sum()) + int(two.sum())
    dice = torch.where(total > 0, 2.0 * common / total.clamp_min(1.0), 1.0)[:, 1:].mean(dim=1)
    return (float(dice[0]), float(dice[1]))


def intensities(part: Part, pipeline: PipelineConfig) -> tuple[tuple[float, ...], ...]:
    """Return evenly spaced quantiles of every image of ``part``, in [0, 1], of each channel."""
    histogram = Histogram()
    for images, _, fill in measured(part, pipeline.predict_batch):
        histogram.add(images, fill)
    return histogram.quantiles()


def compute_statistics(
    weights: str | Path,
    pipeline: str | PipelineConfig | None,
    sites: str | SiteConfig | Sequence[str | SiteConfig],
    volumes: str | Path,
    out: str | Path | None = None,
    device: str = "auto",
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Measure and save the source statistics of existing weights on labelled source cases or tiles.

    Args:
        weights: of the source model.
        pipeline: name, YAML path or loaded configuration; None: that of the first site.
        sites: where the labelled cases come from: ids, YAML paths or loaded configurations.
        volumes: the folder that holds them.
        out: file to write; default: beside the weights.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the draws of pixels; a whole number of 0 or above.
        progress: called with (stage, done, total).

    Returns:
        The file written: ``out``, or ``<stem>.statistics.safetensors`` beside the weights.

    Raises:
        CheckpointError: the weights cannot be read or do not fit.
        ConfigError: unknown pipeline or site, a seed that is none, or the device is not available.
        DataError: no labelled case or tile.
        OutputError: the files cannot be written.
    """
    check_seed(seed)
    target, weights = default_device(device), user_path(weights)
    config, given = source_sites(pipeline, sites, weights)
    loaded = load_model(weights, config)
    model = loaded.model.to(target)
    task = task_of(loaded.pipeline)(given[0], loaded.pipeline)
    every = task.labelled(given, user_path(volumes), progress).every()
    statistics = measure(model, every, loaded.pipeline, seed, progress)
    path = statistics_path(weights) if out is None else user_path(out)
    count = len(every.names), every.images
    known = intensities(every, loaded.pipeline)
    card = make_statistics_card(weights, loaded.pipeline, every.sites, *count, statistics, seed, known)
    save_statistics(path, statistics, card)
    return path
