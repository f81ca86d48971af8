"""Source feature statistics: what the adapting methods of the Y protocols know of the source.

Features are the input of the network's head, one vector a pixel, or one a tile. Sums are kept in float64.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import Field, ValidationError
from torch import Tensor
from torch.nn import functional

from tesla_med.config.models import LabelClass, PipelineConfig, Protocol, SiteConfig
from tesla_med.errors import CheckpointError, ConfigError, DataError
from tesla_med.io.files import atomic_path, sha256, write_json
from tesla_med.models.base import Network, default_device, to_model_range
from tesla_med.training.slices import LabelledCase, batches, load_labelled
from tesla_med.types import Progress, Record

PIXELS_PER_SLICE = 16384


@dataclass(frozen=True)
class SourceStatistics:
    """Moments of the source features, float32 on the CPU; D features, L classes.

    Attributes:
        mean: (D,) over all pixels.
        covariance: (D, D), divided by the number of pixels.
        class_mean: (L, D) by reference class; zeros for a class without pixels.
        class_covariance: (L, D, D); zeros for a class without pixels.
        class_pixels: (L,) int64, pixels used of each class.
        class_ratio: (L,) share of each class among the pixels, sums to 1.
    """

    mean: Tensor
    covariance: Tensor
    class_mean: Tensor
    class_covariance: Tensor
    class_pixels: Tensor
    class_ratio: Tensor


class StatisticsCard(Record):
    """What the statistics were measured on; written beside them as JSON."""

    weights_sha256: str
    pipeline: str
    sites: tuple[str, ...]
    classes: tuple[LabelClass, ...]
    cases: int
    slices: int
    pixels: int
    pixels_per_slice: int | None
    seed: int
    features: int
    versions: dict[str, str] = Field(default_factory=dict)


@dataclass(frozen=True)
class GivenStatistics:
    """Source statistics of a run, and where they came from.

    Attributes:
        moments: the tensors.
        card: what they were measured on.
        path: their file.
        sha256: its hash.
    """

    moments: SourceStatistics
    card: StatisticsCard
    path: Path
    sha256: str

    def record(self) -> dict[str, Any]:
        """Return what a reader of the run must know of them."""
        return {
            "file": self.path.name,
            "sha256": self.sha256,
            "sites": list(self.card.sites),
            "cases": self.card.cases,
            "pixels": self.card.pixels,
        }


def statistics_for(
    protocol: Protocol,
    weights: Path,
    weights_sha256: str,
    pipeline: PipelineConfig,
    given: str | Path | None = None,
) -> GivenStatistics | None:
    """Return the source statistics that a run under ``protocol`` uses, None under N.

    Args:
        protocol: Y-O and Y-M need statistics, N-O and N-M must not have any.
        weights: file of the source weights.
        weights_sha256: its hash.
        pipeline: names the classes.
        given: a file; default: :func:`statistics_path` of the weights.

    Raises:
        ConfigError: a file was given under N.
        CheckpointError: the file is missing, damaged, or of other weights or classes.
    """
    if protocol.startswith("N"):
        if given is not None:
            raise ConfigError(
                f"protocol {protocol} uses nothing of the source but its weights, and source statistics were "
                f"given ({given}); leave --statistics out, or choose Y-O or Y-M"
            )
        return None
    path = statistics_path(weights) if given is None else Path(given)
    moments, card = load_statistics(path)
    if card.weights_sha256 != weights_sha256:
        raise CheckpointError(
            f"{path}: measured with other weights (sha256 {card.weights_sha256[:12]}...) than {weights.name} "
            f"({weights_sha256[:12]}...); measure them for these with 'tesla-med statistics'"
        )
    values = tuple(item.value for item in card.classes)
    if values != tuple(pipeline.values):
        raise CheckpointError(
            f"{path}: of classes {values}, and pipeline {pipeline.name!r} has {tuple(pipeline.values)}"
        )
    return GivenStatistics(moments, card, path, sha256(path))


class _Moments:
    """Running sums of the features, per class; the whole follows from the classes."""

    def __init__(self, classes: int, features: int, device: torch.device) -> None:
        self.count = torch.zeros(classes, dtype=torch.float64, device=device)
        self.total = torch.zeros(classes, features, dtype=torch.float64, device=device)
        self.square = torch.zeros(classes, features, features, dtype=torch.float64, device=device)
        self.origin = self.total[0].clone()

    def add(self, vectors: Tensor, labels: Tensor) -> None:
        """Add (P, D) vectors with (P,) class indices."""
        exact = vectors.double()
        if not self.count.any():  # sums about a nearby point lose fewer digits
            self.origin = exact.mean(dim=0)
        exact = exact - self.origin
        for index in range(len(self.count)):
            part = exact[labels == index]
            self.count[index] += len(part)
            self.total[index] += part.sum(dim=0)
            self.square[index] += part.T @ part

    def result(self) -> SourceStatistics:
        """Return means and covariances."""
        mean, covariance = _mean_and_covariance(self.count.sum(), self.total.sum(0), self.square.sum(0))
        class_mean, class_covariance = _mean_and_covariance(self.count, self.total, self.square)
        seen = self.count > 0
        class_mean = torch.where(seen[:, None], class_mean + self.origin, 0.0)
        return SourceStatistics(
            mean=(mean + self.origin).float().cpu(),
            covariance=covariance.float().cpu(),
            class_mean=class_mean.float().cpu(),
            class_covariance=class_covariance.float().cpu(),
            class_pixels=self.count.long().cpu(),
            class_ratio=(self.count / self.count.sum()).float().cpu(),
        )


def _mean_and_covariance(count: Tensor, total: Tensor, square: Tensor) -> tuple[Tensor, Tensor]:
    known = count.clamp_min(1)
    mean = total / known[..., None]
    return mean, square / known[..., None, None] - mean[..., :, None] * mean[..., None, :]


@torch.no_grad()
def source_statistics(
    model: Network,
    batches: Iterable[tuple[Tensor, Tensor]],
    classes: int,
    *,
    pixels_per_slice: int | None = PIXELS_PER_SLICE,
    generator: torch.Generator | None = None,
) -> SourceStatistics:
    """Measure the features at the input of ``model.head``, in eval mode.

    Args:
        model: on its device; its mode is put back afterwards.
        batches: images (N, C, H, W) float32 in the model's range, class indices (N, H, W), or (N,) of tiles.
        classes: L.
        pixels_per_slice: at most this many pixels of each slice, drawn without replacement;
            None takes all.
        generator: on the CPU, for the draw; seed 0 if not given.

    Raises:
        DataError: no batch came.
        CheckpointError: the head's input is not a map (N, D, h, w), or (N, D) of a tile classifier.
    """
    generator = generator or torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    caught: list[Tensor] = []
    hook = model.head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0]))
    training = model.training
    model.eval()
    moments: _Moments | None = None
    try:
        for images, labels in batches:
            caught.clear()
            model(images.to(device))
            features = _feature_map(caught, labels.dim())
            moments = moments or _Moments(classes, features.shape[1], device)
            if labels.dim() == 1:
                moments.add(features.flatten(1), labels.to(device))
                continue
            for vectors, targets in _pixels(features, labels.to(device), images.shape[-2:]):
                kept = _subset(len(targets), pixels_per_slice, generator).to(device)
                moments.add(vectors[kept], targets[kept])
    finally:
        hook.remove()
        model.train(training)
    if moments is None:
        raise DataError("source statistics need at least one labelled slice, got none")
    return moments.result()


def _feature_map(caught: list[Tensor], label_axes: int) -> Tensor:
    """Return (N, D, h, w), of tiles with one pixel each."""
    shape = tuple(caught[-1].shape) if caught else "nothing"
    if caught and label_axes == 1 and caught[-1].dim() == 2:
        return caught[-1][:, :, None, None]
    if not caught or label_axes == 1 or caught[-1].dim() != 4:
        wanted = "(N, D)" if label_axes == 1 else "(N, D, h, w)"
        raise CheckpointError(f"the head's input should be {wanted} features, got {shape}")
    return caught[-1]


def _pixels(features: Tensor, labels: Tensor, size: Sequence[int]) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield for each slice (P, D) vectors and (P,) labels; padding is cropped, coarse maps are met."""
    height, width = size
    if features.shape[-2] >= height and features.shape[-1] >= width:
        features = features[..., :height, :width]
    else:
        labels = functional.interpolate(labels[:, None].float(), features.shape[-2:])[:, 0].long()
    for feature, target in zip(features, labels, strict=True):
        yield feature.flatten(1).T, target.flatten().long()


def _subset(count: int, limit: int | None, generator: torch.Generator) -> Tensor:
    if limit is None or count <= limit:
        return torch.arange(count)
    return torch.randperm(count, generator=generator)[:limit]


def statistics_path(weights: Path) -> Path:
    """Return where the statistics of ``weights`` belong: ``<stem>.statistics.safetensors``."""
    return weights.with_name(f"{weights.stem}.statistics.safetensors")


def measure(
    model: Network,
    cases: Sequence[LabelledCase],
    pipeline: PipelineConfig,
    seed: int = 0,
    progress: Progress | None = None,
) -> SourceStatistics:
    """Return the statistics over every slice of ``cases``, unaugmented."""

    def stream() -> Iterable[tuple[Tensor, Tensor]]:
        for index, case in enumerate(cases):
            size = pipeline.predict_batch
            for images, labels in zip(batches(case.images, size), batches(case.labels, size), strict=True):
                yield to_model_range(images, pipeline.preprocessing.model_range), labels
            if progress:
                progress("statistics", index + 1, len(cases))

    generator = torch.Generator().manual_seed(seed)
    return source_statistics(model, stream(), len(pipeline.classes), generator=generator)


def save_statistics(path: Path, statistics: SourceStatistics, card: StatisticsCard) -> None:
    """Write the tensors to ``path`` (.safetensors) and the card beside it (.json).

    Raises:
        OutputError: the files cannot be written.
    """
    from safetensors.torch import save_file

    tensors = {item.name: getattr(statistics, item.name).contiguous() for item in fields(statistics)}
    with atomic_path(path) as temporary:
        save_file(tensors, str(temporary))
    write_json(path.with_suffix(".json"), card.model_dump(mode="json"))


def load_statistics(path: Path) -> tuple[SourceStatistics, StatisticsCard]:
    """Read what :func:`save_statistics` wrote.

    Raises:
        CheckpointError: a file is missing, damaged or of another shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    hint = "make them with 'tesla-med statistics'"
    if not path.is_file():
        raise CheckpointError(f"no source statistics at {path}; {hint}")
    try:
        tensors = load_file(str(path))
        card = StatisticsCard.model_validate(json.loads(path.with_suffix(".json").read_text("utf-8")))
        statistics = SourceStatistics(**{item.name: tensors[item.name] for item in fields(SourceStatistics)})
    except (OSError, ValueError, KeyError, SafetensorError, ValidationError) as error:
        raise CheckpointError(f"{path}: not source statistics of tesla-med ({error}); {hint} again") from None
    expected: dict[str, tuple[int, ...]] = _shapes(len(card.classes), card.features)
    for name, shape in expected.items():
        if tuple(getattr(statistics, name).shape) != shape:
            got = tuple(getattr(statistics, name).shape)
            raise CheckpointError(
                f"{path}: {name} should be {shape} as its card says, got {got}; {hint} again"
            )
    return statistics, card


def _shapes(classes: int, features: int) -> dict[str, tuple[int, ...]]:
    return {
        "mean": (features,),
        "covariance": (features, features),
        "class_mean": (classes, features),
        "class_covariance": (classes, features, features),
        "class_pixels": (classes,),
        "class_ratio": (classes,),
    }


def make_statistics_card(
    weights: Path,
    pipeline: PipelineConfig,
    sites: Sequence[str],
    cases: int,
    slices: int,
    statistics: SourceStatistics,
    seed: int,
) -> StatisticsCard:
    """Return the card of statistics measured with the network in the file ``weights``.

    Args:
        weights: their file.
        pipeline: of the network.
        sites: ids of those that the cases are from.
        cases: how many; of tiles, how many tiles.
        slices: of all cases; a tile is one.
        statistics: what was measured.
        seed: of the draw of pixels.
    """
    from tesla_med.models.checkpoint import versions

    return StatisticsCard(
        weights_sha256=sha256(weights),
        pipeline=pipeline.name,
        sites=tuple(sorted(set(sites))),
        classes=pipeline.classes,
        cases=cases,
        slices=slices,
        pixels=int(statistics.class_pixels.sum()),
        pixels_per_slice=PIXELS_PER_SLICE if pipeline.task == "segmentation" else None,
        seed=seed,
        features=len(statistics.mean),
        versions=versions(),
    )


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
    from tesla_med.models.loading import load_model

    place = default_device(device)
    loaded = load_model(weights, pipeline)
    model = loaded.model.to(place)
    if loaded.pipeline.task == "classification":
        from tesla_med.training.tiles import load_tiles, tile_statistics

        images, labels = load_tiles(loaded.pipeline, sites, volumes, progress)
        statistics = tile_statistics(model, images, labels, loaded.pipeline)
        cases = slices = len(images)
        names = [site.id for site in sites]
    else:
        data = load_labelled(loaded.pipeline, sites, volumes, progress)
        statistics = measure(model, data.cases, loaded.pipeline, seed, progress)
        cases, slices = len(data.cases), sum(len(case.images) for case in data.cases)
        names = [case.site for case in data.cases]
    path = out or statistics_path(weights)
    card = make_statistics_card(weights, loaded.pipeline, names, cases, slices, statistics, seed)
    save_statistics(path, statistics, card)
    return path
