"""Train a tile classifier on labelled sites; save the best weights and their feature statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.errors import ConfigError, DataError, OutputError, TeslaMedError
from tesla_med.io.cases import site_folder
from tesla_med.io.files import output_lock, write_json
from tesla_med.io.tiles import UNLABELLED, TileSet, find_tiles, stream
from tesla_med.models.base import Network, build_model, default_device, to_model_range
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.training.measure import (
    SourceStatistics,
    make_statistics_card,
    save_statistics,
    source_statistics,
    statistics_path,
)
from tesla_med.types import Progress

WEIGHTS, RECORD = "source.safetensors", "train.json"
Vary = Callable[[Tensor, torch.Generator], Tensor]


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
    earlier = _check_folder(out, overwrite)
    tell = progress or (lambda *_: None)
    with torch.random.fork_rng(devices=[]):
        build_model(pipeline)  # wrong parameters are found before anything is read or replaced
    images, labels = load_tiles(pipeline, sites, volumes, tell)
    with output_lock(out):
        for path in earlier:
            path.unlink(missing_ok=True)
        return _train(pipeline, sites, images, labels, out, seed, place, tell)


def _check_folder(out: Path, overwrite: bool) -> list[Path]:
    """Return the files of an earlier training in ``out``, which are to be replaced."""
    statistics = statistics_path(out / WEIGHTS)
    own = {WEIGHTS, "source.json", statistics.name, statistics.with_suffix(".json").name, RECORD}
    found = {item.name for item in out.iterdir() if not item.name.startswith(".")} if out.is_dir() else set()
    if found - own:
        raise OutputError(f"{out}: holds {', '.join(sorted(found - own)[:3])}; choose another --out")
    if found and not overwrite:
        raise OutputError(f"{out}: holds an earlier training; give --overwrite, or another --out")
    return [out / name for name in sorted(found)]


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
        normalise = pipeline.preprocessing.stain_normalisation
        for batch in stream(tiles, kept, 64, pipeline.preprocessing.size, normalise=normalise):
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
    fitted = fit_tiles(pipeline, images, labels, seed=seed, device=place, progress=progress)
    card = make_card(pipeline, tuple(site.id for site in sites), {"seed": seed})
    save_checkpoint(out / WEIGHTS, fitted.model, card)
    statistics = tile_statistics(fitted.model, images[fitted.used], labels[fitted.used], pipeline)
    origin, count = [site.id for site in sites], len(fitted.used)
    about = make_statistics_card(out / WEIGHTS, pipeline, origin, count, count, statistics, seed)
    target = statistics_path(out / WEIGHTS)
    save_statistics(target, statistics, about)
    result = TileTraining(
        weights=out / WEIGHTS,
        statistics=target,
        validation_accuracy=fitted.validation_accuracy,
        best_step=fitted.best_step,
        tiles=count,
        held_out=fitted.held_out,
    )
    write_json(out / RECORD, {**vars(result), "weights": WEIGHTS, "statistics": target.name, "seed": seed})
    return result


@dataclass(frozen=True)
class Fitted:
    """A trained classifier, as of its best step.

    Attributes:
        model: in eval mode, on the device.
        validation_accuracy: share of held-out tiles that is right.
        best_step: that step.
        used: (n,) indices of the tiles trained on, int64 on the CPU.
        held_out: how many tiles it was validated on.
    """

    model: Network
    validation_accuracy: float
    best_step: int
    used: Tensor
    held_out: int


def fit_tiles(
    pipeline: PipelineConfig,
    images: Tensor,
    labels: Tensor,
    *,
    seed: int,
    device: torch.device,
    vary: Vary | None = None,
    precision: Literal["float32", "bfloat16"] = "float32",
    progress: Progress = lambda *_: None,
) -> Fitted:
    """Train the pipeline's network on tiles in memory: cross-entropy, AdamW, a cosine.

    Args:
        pipeline: of a classification task.
        images: (N, 3, H, W) uint8; where there is room, on the device.
        labels: (N,) class indices, where the images are.
        seed: of weights, split, draws and augmentation.
        device: where to compute.
        vary: (images in [0, 1], generator on the CPU) -> augmented images; default: flips, quarter turns and
            mild changes of brightness and contrast, if the pipeline says ``augment``.
        precision: ``bfloat16`` runs the network under autocast.
        progress: called with (stage, done, total).

    Raises:
        TeslaMedError: the loss is no longer finite.
    """
    config = pipeline.train
    vary = vary or (varied if config.augment else lambda batch, _: batch)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=generator)
    held = order[: max(1, round(config.validation_fraction * len(order)))]
    used = order[len(held) :] if len(order) > len(held) else order
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = build_model(pipeline).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * min(step / config.steps, 1.0)))
    )
    best, best_step, kept = -1.0, 0, copy.deepcopy(model.state_dict())
    for step in range(1, config.steps + 1):
        chosen = used[torch.randint(len(used), (config.batch_size,), generator=generator)].to(images.device)
        batch = vary(images[chosen].float() / 255, generator)
        inputs = to_model_range(batch.to(device), pipeline.preprocessing.model_range)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            logits = model.train()(inputs)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[chosen].to(device))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        progress("train", step, config.steps)
        if step % config.validate_every == 0 or step == config.steps:
            if not bool(torch.isfinite(loss)):
                raise TeslaMedError(f"training diverged by step {step}; lower train.learning_rate")
            accuracy = _accuracy(model, images, labels, held.to(images.device), pipeline)
            if accuracy > best:
                best, best_step, kept = accuracy, step, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    return Fitted(model.eval(), best, best_step, used, len(held))


def turned(images: Tensor, generator: torch.Generator) -> Tensor:
    """Flip each of (N, 3, H, W) left-right with p = 0.5 and, where it is square, turn it by quarters."""
    draws = torch.rand(2, len(images), 1, 1, 1, generator=generator).to(images.device)
    flipped = torch.where(draws[0] < 0.5, images.flip(-1), images)
    if images.shape[-1] != images.shape[-2]:
        return flipped
    quarters = (4 * draws[1]).long()
    for number in (1, 2, 3):
        flipped = torch.where(quarters == number, torch.rot90(flipped, number, (-2, -1)), flipped)
    return flipped


def varied(images: Tensor, generator: torch.Generator) -> Tensor:
    """Also change brightness and contrast of each of (N, 3, H, W) in [0, 1] a little."""
    changed = turned(images, generator)
    draws = torch.rand(2, len(images), 1, 1, 1, generator=generator).to(images.device)
    mean = changed.mean(dim=(1, 2, 3), keepdim=True)
    changed = (changed - mean) * (0.85 + 0.3 * draws[0]) + mean + 0.1 * (draws[1] - 0.5)
    return changed.clamp(0, 1)


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
def _accuracy(
    model: Network, images: Tensor, labels: Tensor, places: Tensor, pipeline: PipelineConfig
) -> float:
    device = next(model.parameters()).device
    right = 0
    for part in torch.split(places, pipeline.predict_batch):
        batch = images[part].float().to(device) / 255
        logits = model.eval()(to_model_range(batch, pipeline.preprocessing.model_range))
        right += int((logits.argmax(1) == labels[part].to(device)).sum())
    return right / len(places)
