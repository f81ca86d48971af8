"""Train a tile classifier on labelled sites; save the best weights and their feature statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tesla_med.cases import site_folder
from tesla_med.config import PipelineConfig, SiteConfig
from tesla_med.errors import ConfigError, DataError, OutputError, TeslaMedError
from tesla_med.files import output_lock, write_json
from tesla_med.models.base import Network, build_model, default_device, to_model_range
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.statistics import (
    SourceStatistics,
    make_statistics_card,
    save_statistics,
    source_statistics,
    statistics_path,
)
from tesla_med.tiles import UNLABELLED, TileSet, find_tiles, stream
from tesla_med.types import Progress

WEIGHTS, RECORD = "source.safetensors", "train.json"


@dataclass(frozen=True)
class TileTraining:
    """Outcome of a training.

    Attributes:
        weights: file of the best step.
        statistics: the source feature statistics of those weights, over the tiles trained on.
        validation_accuracy: share of held-out tiles that is right, at that step.
        best_step: that step.
        tiles: tiles trained on.
        held_out: tiles validated on.
    """

    weights: Path
    statistics: Path
    validation_accuracy: float
    best_step: int
    tiles: int
    held_out: int


def train_tiles(
    pipeline: PipelineConfig,
    sites: Sequence[SiteConfig],
    volumes: Path,
    out: Path,
    *,
    seed: int = 0,
    device: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> TileTraining:
    """Train the pipeline's network on every labelled tile of ``sites``: cross-entropy, AdamW, a cosine.

    Tiles are read once and kept in memory as 8-bit. Flips, quarter turns and mild colour changes vary them.

    Args:
        pipeline: of a classification task.
        sites: where labelled tiles come from.
        volumes: the folder that holds them.
        out: a new or empty folder, unless ``overwrite``.
        seed: of weights, split, draws and augmentation.
        device: auto, cpu or cuda.
        overwrite: replace an earlier training in ``out``.
        progress: called with (stage, done, total).

    Raises:
        ConfigError: a pipeline of another task, or without a size.
        DataError: no labelled tile.
        OutputError: ``out`` holds something.
        TeslaMedError: the loss is no longer finite.
    """
    place = default_device(device)
    if pipeline.task != "classification" or pipeline.preprocessing.size is None:
        raise ConfigError(f"pipeline {pipeline.name!r} is not for tiles, or says no preprocessing.size")
    _check_folder(out, overwrite)
    with output_lock(out):
        tell = progress or (lambda *_: None)
        images, labels = load_tiles(pipeline, sites, volumes, tell)
        return _train(pipeline, sites, images, labels, out, seed, place, tell)


def _check_folder(out: Path, overwrite: bool) -> None:
    statistics = statistics_path(out / WEIGHTS)
    own = {WEIGHTS, "source.json", statistics.name, statistics.with_suffix(".json").name, RECORD}
    found = {item.name for item in out.iterdir() if not item.name.startswith(".")} if out.is_dir() else set()
    if found - own:
        raise OutputError(f"{out}: holds {', '.join(sorted(found - own)[:3])}; choose another --out")
    if found and not overwrite:
        raise OutputError(f"{out}: holds an earlier training; give --overwrite, or another --out")
    for name in found:
        (out / name).unlink()


def load_tiles(
    pipeline: PipelineConfig, sites: Sequence[SiteConfig], volumes: Path, progress: Progress | None = None
) -> tuple[Tensor, Tensor]:
    """Return all labelled tiles of ``sites``: uint8 images (N, 3, H, W) and class indices (N,).

    Raises:
        DataError: there are none.
    """
    progress = progress or (lambda *_: None)
    index = {value: place for place, value in enumerate(pipeline.values)}
    images: list[Tensor] = []
    labels: list[int] = []
    sets: list[TileSet] = [find_tiles(site_folder(volumes, site), site.tiles) for site in sites]
    total = sum(len(item.paths) for item in sets)
    assert pipeline.preprocessing.size is not None  # noqa: S101 - checked at the start
    for tiles in sets:
        kept = np.flatnonzero(tiles.labels != UNLABELLED).tolist()
        for batch in stream(tiles, kept, 64, pipeline.preprocessing.size):
            images += list((255 * batch.images).round().to(torch.uint8))
            labels += [index[int(tiles.labels[place])] for place in batch.index]
            progress("load", len(images), total)
    if not images:
        raise DataError(f"{volumes}: no labelled tile of site(s) {', '.join(site.id for site in sites)}")
    return torch.stack(images), torch.tensor(labels)


def _train(
    pipeline: PipelineConfig,
    sites: Sequence[SiteConfig],
    images: Tensor,
    labels: Tensor,
    out: Path,
    seed: int,
    place: torch.device,
    progress: Progress,
) -> TileTraining:
    config = pipeline.train
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    held = order[: max(1, round(config.validation_fraction * len(order)))]
    used = order[len(held) :] if len(order) > len(held) else order
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        model = build_model(pipeline).to(place)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step / config.steps, 1.0)))
    )
    best, best_step, kept = -1.0, 0, copy.deepcopy(model.state_dict())
    for step in range(1, config.steps + 1):
        chosen = used[torch.randint(len(used), (config.batch_size,), generator=generator)]
        batch = images[chosen].float() / 255
        batch = _varied(batch, generator) if config.augment else batch
        logits = model.train()(to_model_range(batch.to(place), pipeline.preprocessing.model_range))
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[chosen].to(place))
        if not bool(torch.isfinite(loss)):
            raise TeslaMedError(f"training diverged at step {step}; lower train.learning_rate")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        progress("train", step, config.steps)
        if step % config.validate_every == 0 or step == config.steps:
            accuracy = _accuracy(model, images[held], labels[held], pipeline)
            if accuracy > best:
                best, best_step, kept = accuracy, step, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    card = make_card(pipeline, tuple(site.id for site in sites), {"seed": seed})
    save_checkpoint(out / WEIGHTS, model, card)
    statistics = tile_statistics(model, images[used], labels[used], pipeline)
    origin = [site.id for site in sites]
    about = make_statistics_card(out / WEIGHTS, pipeline, origin, len(used), len(used), statistics, seed)
    target = statistics_path(out / WEIGHTS)
    save_statistics(target, statistics, about)
    result = TileTraining(out / WEIGHTS, target, best, best_step, len(used), len(held))
    write_json(out / RECORD, {**vars(result), "weights": WEIGHTS, "statistics": target.name, "seed": seed})
    return result


def _varied(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip, turn by quarters, and change brightness and contrast of each (3, H, W) in [0, 1] a little."""
    draws: Any = torch.rand(len(images), 5, generator=generator)
    varied = []
    for image, draw in zip(images, draws, strict=True):
        changed = image.flip(-1) if draw[0] < 0.5 else image
        if changed.shape[-1] == changed.shape[-2]:
            changed = torch.rot90(changed, int(4 * draw[1]), (-2, -1))
        mean = changed.mean()
        changed = (changed - mean) * (0.85 + 0.3 * draw[2]) + mean + 0.1 * (draw[3] - 0.5)
        varied.append(changed.clamp(0, 1))
    return torch.stack(varied)


def tile_statistics(
    model: Network, images: Tensor, labels: Tensor, pipeline: PipelineConfig
) -> SourceStatistics:
    """Return the feature statistics of a classifier over labelled tiles, unaugmented.

    Args:
        model: on its device.
        images: (N, 3, H, W) uint8.
        labels: (N,) class indices.
        pipeline: the range that the network takes and the number of classes.
    """

    def batches() -> Iterable[tuple[Tensor, Tensor]]:
        size = pipeline.predict_batch
        for part, classes in zip(torch.split(images, size), torch.split(labels, size), strict=True):
            yield to_model_range(part.float() / 255, pipeline.preprocessing.model_range), classes

    return source_statistics(model, batches(), len(pipeline.classes))


@torch.no_grad()
def _accuracy(model: Network, images: Tensor, labels: Tensor, pipeline: PipelineConfig) -> float:
    place = next(model.parameters()).device
    right = 0
    for start in range(0, len(images), pipeline.predict_batch):
        batch = images[start : start + pipeline.predict_batch].float() / 255
        logits = model.eval()(to_model_range(batch.to(place), pipeline.preprocessing.model_range))
        right += int((logits.argmax(1).cpu() == labels[start : start + len(batch)]).sum())
    return right / len(images)
