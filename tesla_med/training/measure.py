"""Measure the source statistics of a network on labelled items."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.models.base import Network, default_device, to_model_range
from tesla_med.models.loading import load_model
from tesla_med.models.moments import SourceStatistics, source_statistics
from tesla_med.models.statistics import make_statistics_card, save_statistics, statistics_path
from tesla_med.prepare.histogram import Histogram
from tesla_med.tasks.base import task_of
from tesla_med.tasks.labelled import Part
from tesla_med.types import Progress


def measure(
    model: Network,
    part: Part,
    pipeline: PipelineConfig,
    seed: int = 0,
    progress: Progress | None = None,
) -> SourceStatistics:
    """Return the statistics over every image of ``part``, unaugmented."""

    def stream() -> Iterator[tuple[Tensor, Tensor]]:
        done = 0
        for images, labels in part.batches(pipeline.predict_batch):
            yield to_model_range(images, pipeline.preprocessing.model_range), labels
            done += len(images)
            if progress:
                progress("statistics", done, part.images)

    generator = torch.Generator().manual_seed(seed)
    return source_statistics(model, stream(), len(pipeline.classes), generator=generator)


def intensities(part: Part, pipeline: PipelineConfig) -> tuple[tuple[float, ...], ...]:
    """Return evenly spaced quantiles of every image of ``part``, in [0, 1], of each channel."""
    histogram = Histogram()
    for images, _ in part.batches(pipeline.predict_batch):
        histogram.add(images)
    return histogram.quantiles()


def compute_statistics(
    weights: Path,
    pipeline: PipelineConfig,
    sites: Sequence[SiteConfig],
    volumes: Path,
    out: Path | None = None,
    device: str = "auto",
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> Path:
    """Measure and save the source statistics of existing weights on labelled source cases or tiles.

    Returns:
        The file written: ``out``, or ``<stem>.statistics.safetensors`` beside the weights.

    Raises:
        CheckpointError: the weights cannot be read or do not fit.
        ConfigError: the device is not available.
        DataError: no labelled case or tile.
        OutputError: the files cannot be written.
    """
    target = default_device(device)
    loaded = load_model(weights, pipeline)
    model = loaded.model.to(target)
    task = task_of(loaded.pipeline)(sites[0], loaded.pipeline)
    every = task.labelled(sites, Path(volumes), progress).every()
    statistics = measure(model, every, loaded.pipeline, seed, progress)
    path = out or statistics_path(weights)
    count = len(every.names), every.images
    known = intensities(every, loaded.pipeline)
    card = make_statistics_card(weights, loaded.pipeline, every.sites, *count, statistics, seed, known)
    save_statistics(path, statistics, card)
    return path
