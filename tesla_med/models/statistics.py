"""Source statistics on disk: their card, their files, and the check that they belong to the weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from tesla_med.config.models import Intensity, LabelClass, PipelineConfig, Protocol
from tesla_med.config.paths import user_path
from tesla_med.errors import CheckpointError, ConfigError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.files import atomic_path, sha256, write_json
from tesla_med.models.checkpoint import versions
from tesla_med.models.moments import PIXELS_PER_SLICE, SourceStatistics
from tesla_med.types import Record


class StatisticsCard(Record):
    """What the statistics were measured on; written beside them as JSON.

    ``intensities`` are evenly spaced quantiles of the images in [0, 1], of each channel.
    """

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
    intensities: tuple[tuple[float, ...], ...] = ()
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
                f"protocol {protocol} uses nothing from the source but its weights, yet source statistics "
                f"were given ({given}); leave --statistics out, or choose Y-O or Y-M"
            )
        return None
    path = statistics_path(weights) if given is None else user_path(given)
    moments, card = load_statistics(path)
    if card.weights_sha256 != weights_sha256:
        raise CheckpointError(
            f"{path}: measured with other weights (sha256 {card.weights_sha256[:12]}...) than {weights.name} "
            f"({weights_sha256[:12]}...); measure them for these with 'tesla-med statistics'"
        )
    values = tuple(item.value for item in card.classes)
    if values != tuple(pipeline.values):
        raise CheckpointError(
            f"{path}: for classes {values}, but pipeline {pipeline.name!r} has {tuple(pipeline.values)}"
        )
    return GivenStatistics(moments, card, path, sha256(path))


def with_histogram(pipeline: PipelineConfig, given: GivenStatistics | None) -> PipelineConfig:
    """Return the pipeline with the source's histogram among the scalings to choose from, where it is known.

    Args:
        pipeline: of a run; where it leaves no choice of the scaling, none is added.
        given: source statistics of the run; None under N.
    """
    if given is None or not given.card.intensities or not pipeline.scaling.candidates:
        return pipeline
    histogram = Intensity(scaling="histogram", quantiles=given.card.intensities)
    candidates = (*pipeline.scaling.candidates, histogram)
    scaling = pipeline.scaling.model_copy(update={"candidates": candidates})
    return pipeline.model_copy(update={"scaling": scaling})


def statistics_path(weights: Path) -> Path:
    """Return where the statistics of ``weights`` belong: ``<stem>.statistics.safetensors``."""
    return weights.with_name(f"{weights.stem}.statistics.safetensors")


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
    check_fetched(path, CheckpointError)
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
    intensities: tuple[tuple[float, ...], ...] = (),
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
        intensities: quantiles of the images.
    """
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
        intensities=intensities,
        versions=versions(),
    )
