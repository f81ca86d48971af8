"""From a pipeline and a weights file to a network, with the card's word over the pipeline's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from torch import Tensor, nn

from tesla_med.config.bundle_config import config_files
from tesla_med.config.bundle_files import bundle_folder, weights_of
from tesla_med.config.bundle_reader import bundle_notes
from tesla_med.config.models import PipelineConfig, Preprocessing, ScalingChoice, Section, SiteConfig
from tesla_med.config.nnunet import DATASET, PLANS, nnunet_folder, nnunet_notes
from tesla_med.config.paths import user_path
from tesla_med.errors import CheckpointError, ConfigError
from tesla_med.io.files import sha256, sha256_of
from tesla_med.models.base import Network, build_model
from tesla_med.models.checkpoint import SOURCE_DICE, ModelCard, load_state, read_card, read_state

NO_FILL = "weights without a card: fill is left alone (--set preprocessing.fill.enabled=true keeps it out)"


@dataclass(frozen=True)
class LoadedModel:
    """A network with its weights, and the pipeline as the weights need it.

    ``notes`` name what was taken from the card instead of the pipeline, as it should be; ``warnings`` say
    that there is no card, or that settings depart from what the weights were trained with.
    """

    model: Network
    pipeline: PipelineConfig
    card: ModelCard | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()


def load_model(path: Path, pipeline: PipelineConfig, overrides: tuple[str, ...] = ()) -> LoadedModel:
    """Build the network and load the weights.

    The card beside the weights decides the network and the preprocessing, since that is what they
    were trained with; keys set by ``overrides`` (``a.b=value``) stay. Without a card the pipeline's
    own are taken, with a warning.

    Raises:
        CheckpointError: unreadable weights, another architecture, or classes that do not fit.
    """
    if (form := foreign_form(path)) is not None:
        return {"nnunet": _load_nnunet, "bundle": _load_bundle}[form](path, pipeline)
    state = read_state(path)
    card = read_card(path)
    if card is None:
        text = f"{path.name} has no card: the preprocessing and model of pipeline {pipeline.name!r} are used"
        resolved = pipeline
        warnings: tuple[str, ...] = (text,)
        notes: tuple[str, ...] = ()
        asked = any(item.startswith("preprocessing.fill") for item in overrides)
        if pipeline.preprocessing.fill.enabled and not asked:
            resolved, notes = _without_fill(pipeline), (NO_FILL,)
    else:
        _check_classes(card, pipeline, path)
        resolved, warnings, notes = _follow_card(card, pipeline, overrides)
    if any(text.startswith("preprocessing.intensity") for text in overrides):
        resolved = resolved.model_copy(update={"scaling": ScalingChoice()})  # it is named, so not chosen
    known = None if card is None else card.extra.get(SOURCE_DICE)
    if isinstance(known, float) and 0 < known <= 1 and pipeline.quality.source_dice is None:
        quality = resolved.quality.model_copy(update={"source_dice": known})
        resolved = resolved.model_copy(update={"quality": quality})
    model = build_model(resolved)
    load_state(model, state, path)
    return LoadedModel(model, resolved, card, warnings, notes)


def _load_nnunet(path: Path, pipeline: PipelineConfig) -> LoadedModel:
    """Return the network of an nnU-Net folder; the pipeline holds what its plans say already."""
    from tesla_med.models.nnunet_files import left_out_folds, read_folds, with_weights

    if pipeline.preprocessing.nnunet is None:
        raise CheckpointError(f"{path}: an nnU-Net; pipeline {pipeline.name!r} was loaded without its plans")
    folds = read_folds(path)
    resolved, state = with_weights(pipeline, folds)
    try:
        model = build_model(resolved)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    load_state(model, state, path)
    folder = nnunet_folder(path)
    lost = left_out_folds(path) if folder is not None and path.resolve() == folder.resolve() else ()
    return LoadedModel(model, resolved, None, lost, () if folder is None else nnunet_notes(folder))


def _load_bundle(path: Path, pipeline: PipelineConfig) -> LoadedModel:
    """Return the network of a MONAI bundle; the pipeline holds what its configuration says already."""
    if pipeline.preprocessing.bundle is None:
        raise CheckpointError(
            f"{path}: a MONAI bundle; pipeline {pipeline.name!r} was loaded without its configuration"
        )
    model, weights = build_model(pipeline), weights_of(path)
    if weights.suffix != ".ts":  # a TorchScript came with its weights
        network = model.network
        assert isinstance(network, nn.Module)  # noqa: S101 - a registered network of bundles
        load_state(network, read_state(weights), weights)
    return LoadedModel(model, pipeline, None, (), bundle_notes(path))


def foreign_form(path: Path) -> Literal["nnunet", "bundle"] | None:
    """Return whose model weights are part of, nnU-Net's or MONAI's; None: they are a file of their own."""
    if path.suffix == ".safetensors":
        return None
    if nnunet_folder(path) is not None:
        return "nnunet"
    return None if bundle_folder(path) is None else "bundle"


def write_back(source: Path, target: Path, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write adapted weights in the form of the model that they came from.

    Args:
        source: folder of that model, or what of it was given as weights.
        target: parent of the new folder, which gets the name of the source.
        state: weights by our names.
        about: what is said of them, written beside them.

    Returns:
        The new folder.

    Raises:
        OutputError: a file cannot be written.
    """
    from tesla_med.models.bundle_files import write_bundle
    from tesla_med.models.nnunet_files import write_folder

    return {"nnunet": write_folder, "bundle": write_bundle}[foreign_form(source) or "nnunet"](
        source, target, state, about
    )


def weights_sha256(path: Path) -> str:
    """Return the hash of weights: of one file, or of what counts in an nnU-Net folder or a MONAI bundle.

    Raises:
        DataError: a file cannot be read.
        CheckpointError: the folder holds no checkpoint.
    """
    if bundle_folder(path) is not None and path.is_dir():
        return sha256_of([*config_files(path), weights_of(path)])
    if nnunet_folder(path) is None or not path.is_dir():
        return sha256(path)
    from tesla_med.models.nnunet_files import fold_files

    folder = nnunet_folder(path) or path
    return sha256_of([folder / PLANS, folder / DATASET, *fold_files(path)])


def weights_path(weights: str | Path | None, site: SiteConfig) -> Path:
    """Return the path of the weights of a run: those given, else those of the site.

    Raises:
        CheckpointError: neither is there.
    """
    if weights is not None:
        return user_path(weights)
    if site.weights is None:
        raise CheckpointError(
            f"no weights: give --weights FILE, or 'weights' in the configuration of site {site.id!r}"
        )
    return user_path(site.weights)


def _check_classes(card: ModelCard, pipeline: PipelineConfig, path: Path) -> None:
    def short(classes: Any) -> list[str]:
        return [f"{item.value}={item.name}" for item in classes]

    if [item.value for item in card.classes] != list(pipeline.values) or card.channels != pipeline.channels:
        raise CheckpointError(
            f"{path}: trained for {card.channels} channel(s), classes {', '.join(short(card.classes))}, but "
            f"pipeline {pipeline.name!r} has {pipeline.channels} and {', '.join(short(pipeline.classes))}; "
            f"use --pipeline {card.pipeline} or other weights"
        )


def _follow_card(
    card: ModelCard, pipeline: PipelineConfig, overrides: tuple[str, ...]
) -> tuple[PipelineConfig, tuple[str, ...], tuple[str, ...]]:
    """Return the pipeline with what the card remembers, but for single keys that ``overrides`` set.

    With it come warnings of keys that depart from the card, and notes of what was taken from it. A pipeline
    that leaves fill alone does so with every card.
    """
    paths = [text.partition("=")[0].strip().split(".") for text in overrides]
    update: dict[str, Section] = {}
    warnings: list[str] = []
    notes: list[str] = []
    sections: dict[str, tuple[Section, Section]] = {
        "model": (card.model, pipeline.model),
        "preprocessing": (card.preprocessing, pipeline.preprocessing),
    }
    for name, (trained, given) in sections.items():
        asked = {path[1] for path in paths if path[0] == name and len(path) > 1}
        own = {key: getattr(given, key) for key in type(given).model_fields if key in asked}
        taken = trained.model_copy(update=own)
        update[name] = taken
        if departs := _differences(trained, taken, name):
            warnings.append(f"--set departs from what the weights were trained with: {'; '.join(departs)}")
        if changes := _differences(taken, _expected(given, taken, pipeline), name):
            notes.append(f"taken from the weights' card instead of the pipeline: {'; '.join(changes)}")
    resolved = pipeline.model_copy(update=update)
    if resolved.preprocessing.fill.enabled and not pipeline.preprocessing.fill.enabled:
        resolved = _without_fill(resolved)
        notes.append(f"fill is left alone, as pipeline {pipeline.name!r} says, though not in the training")
    return resolved, tuple(warnings), tuple(notes)


def _without_fill(pipeline: PipelineConfig) -> PipelineConfig:
    """Return the pipeline with fill left alone."""
    preprocessing = pipeline.preprocessing
    off = preprocessing.fill.model_copy(update={"enabled": False})
    return pipeline.model_copy(update={"preprocessing": preprocessing.model_copy(update={"fill": off})})


def _expected(given: Section, taken: Section, pipeline: PipelineConfig) -> Section:
    """Return a section of the pipeline; the scaling that its own training uses is no surprise in a card."""
    own = taken.intensity if isinstance(taken, Preprocessing) else None
    if own is None or own != pipeline.train.intensity:
        return given
    return given.model_copy(update={"intensity": own})


def _differences(trained: Section, given: Section, prefix: str) -> list[str]:
    before, now = trained.model_dump(mode="json"), given.model_dump(mode="json")
    return [
        f"{prefix}.{key}={_in_yaml(before[key])} (pipeline: {_in_yaml(now[key])})"
        for key in before
        if before[key] != now[key]
    ]


def _in_yaml(value: Any) -> str:
    """Return a value as it stands in a YAML file, in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").strip()
