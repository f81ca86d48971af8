"""Weights: safetensors with a JSON card beside them; other people's state dicts, weights only.

The card says what the weights were trained for, so that a mask is never made with the wrong
classes, size or intensity range by accident.
"""

from __future__ import annotations

import json
import pickle
import platform
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from tesla_med import __version__
from tesla_med.config.bundle_checkpoint import UNKNOWN
from tesla_med.config.bundle_files import network_key
from tesla_med.config.models import LabelClass, ModelConfig, PipelineConfig, Preprocessing
from tesla_med.errors import CheckpointError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.files import write_bytes, write_json
from tesla_med.prepare.acquisition import Acquisition
from tesla_med.types import Record

SUFFIXES = (".safetensors", ".pth", ".pt", ".ckpt", ".tar", ".bin")
WRAPPERS = ("state_dict", "model_state_dict", "network_weights", "model", "net")
"""Names of the state dict in a file that holds several, the first that is there counts."""


class ModelCard(Record):
    """What a weights file is for; written as ``<weights stem>.json``."""

    pipeline: str
    channels: int
    classes: tuple[LabelClass, ...]
    regions: bool = False
    preprocessing: Preprocessing
    model: ModelConfig
    training_sites: tuple[str, ...] = ()
    acquisition: Acquisition | None = None
    versions: dict[str, str] = {}
    extra: dict[str, Any] = {}


SOURCE_DICE = "source_dice"
"""In ``extra`` of a card: Dice on held-out images of the training."""
STEADINESS = "steadiness"
"""In ``extra`` of a card: consistency with reduced and with enlarged slices on the images of the training."""


def steadiness_of(card: ModelCard | None) -> tuple[float, float]:
    """Return how steady a network is with reduced and with enlarged slices of its training; unknown: 1."""
    found = None if card is None else card.extra.get(STEADINESS)
    if not isinstance(found, list | tuple) or len(found) != 2:
        return (1.0, 1.0)
    return (float(found[0]), float(found[1]))


def make_card(
    pipeline: PipelineConfig,
    training_sites: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    acquisition: Acquisition | None = None,
) -> ModelCard:
    """Return the card of weights made with ``pipeline``."""
    return ModelCard(
        pipeline=pipeline.name,
        channels=pipeline.channels,
        classes=pipeline.classes,
        regions=pipeline.regions,
        preprocessing=pipeline.preprocessing,
        model=pipeline.model,
        training_sites=training_sites,
        acquisition=acquisition,
        versions=versions(),
        extra=extra or {},
    )


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    names = ("torch", "monai", "nibabel", "numpy")
    return {"tesla-med": __version__, "python": platform.python_version()} | {
        name: _installed(name) for name in names
    }


@cache
def _installed(name: str) -> str:
    from importlib.metadata import version

    return version(name)


def on_host(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of a state dict on the CPU.

    Copies also because some networks have a tensor under two names, which safetensors does not allow.
    """
    return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


def save_checkpoint(path: Path, model: nn.Module | Mapping[str, Tensor], card: ModelCard) -> None:
    """Write the weights to ``path`` (.safetensors) and the card beside it, each in one step.

    Args:
        path: of the weights.
        model: the network, or its state as :func:`on_host` returns it.
        card: of the weights.

    Raises:
        OutputError: the files cannot be written.
    """
    from safetensors.torch import save

    state = on_host(model.state_dict()) if isinstance(model, nn.Module) else model
    tensors = {name: value.contiguous() for name, value in state.items()}
    # One entry only: of several the order is random, and with it the bytes and the hash of the file.
    # Bytes, not a file, so that a full disk is told of as it is for every other file.
    write_bytes(path, save(tensors, metadata={"format": "pt"}))
    write_json(path.with_suffix(".json"), card.model_dump(mode="json"))


def read_card(path: Path) -> ModelCard | None:
    """Return the card beside the weights at ``path``, or None if there is none.

    Raises:
        CheckpointError: a card is there but cannot be read.
    """
    card = path.with_suffix(".json")
    if not card.is_file():
        return None
    try:
        return ModelCard.model_validate(json.loads(card.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise CheckpointError(
            f"{card}: not a model card of tesla-med ({_first_line(error)}); "
            "move it away to use the weights with the pipeline's own preprocessing"
        ) from None


def _may_be_weights(path: Path) -> bool:
    """Return whether a file may hold the weights of a network, by its name."""
    hidden, kind = path.name.startswith("."), path.suffix.lower()
    return kind in SUFFIXES and not hidden and path.is_file() and not path.stem.endswith(".statistics")


def _likeliest(path: Path) -> tuple[int, str]:
    """Return by what files that may hold weights are sorted."""
    return SUFFIXES.index(path.suffix.lower()), path.name


def read_state(path: Path) -> dict[str, Tensor]:
    """Read a state dict: safetensors, or a PyTorch file holding nothing but weights.

    Half precision is cast to float32. In a file that holds more, such as an epoch or an optimiser, the one
    state dict is taken whatever its name; among several, the first of ``WRAPPERS``.

    Raises:
        CheckpointError: missing, another suffix, damaged, a file that would run code, or no one state dict.
    """
    check_fetched(path, CheckpointError)
    if path.is_dir():
        inside = sorted(filter(_may_be_weights, path.iterdir()), key=_likeliest)
        hint = f"; it holds {' and '.join(item.name for item in inside[:3])}" if inside else ""
        raise CheckpointError(
            f"no weights at {path}: a folder, but not that of an nnU-Net or a MONAI bundle{hint}; give a file"
        )
    if not path.is_file():
        raise CheckpointError(
            f"no weights at {path}; --weights takes a file ({', '.join(SUFFIXES)}) "
            "or the folder of an nnU-Net or of a MONAI bundle"
        )
    if path.suffix.lower() not in SUFFIXES:
        raise CheckpointError(f"{path}: expected one of {', '.join(SUFFIXES)}, got {path.suffix!r}")
    try:
        content = _read(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: refused, it holds more than weights and could run code ({_first_line(error)}); "
            "save the model's state_dict alone, or convert it to safetensors"
        ) from None
    except Exception as error:  # torch and safetensors raise many kinds on damaged files
        raise CheckpointError(
            f"{path}: cannot be read as weights ({path.stat().st_size} bytes: {_first_line(error)}); "
            "it may be cut off: copy it again"
        ) from None
    state = one_state(content, path)
    return {key: value.float() if value.is_floating_point() else value for key, value in state.items()}


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".safetensors":
        from safetensors.torch import load_file

        return load_file(str(path))
    return torch.load(path, map_location="cpu", weights_only=True)


def one_state(content: Any, path: Path) -> dict[str, Tensor]:
    """Return the state dict in the content of a file, the very one that is in it.

    Of a MONAI bundle it is the one that its checkpoint loader puts into the network.

    Raises:
        CheckpointError: there is none, or several and none has a name of ``WRAPPERS``, or that which the
            bundle names.
    """
    found = dict(_state_dicts(content))
    key = network_key(path)
    if key is not None and isinstance(content, dict):
        named = [] if key == UNKNOWN or key not in content else list(_state_dicts(content[key], key))
        found = dict(named) if len(named) == 1 else found
        if len(found) > 1:
            which = f"{key!r}, which is not one" if key else "one, but not in a way that can be read"
            raise CheckpointError(
                f"{path}: holds {len(found)} state dicts ({_some(list(found))}), and load_dict of the "
                f"bundle's configuration names {which}; save the network's state_dict() alone"
            )
    usual = [found[name] for name in WRAPPERS if name in found]
    if len(found) != 1 and not usual:
        where = f"{len(found)} of them: {_some(list(found))}" if found else _content(content)
        raise CheckpointError(
            f"{path}: expected one state dict (names of layers with their tensors), got {where}; "
            "save the network's state_dict() alone"
        )
    state: dict[str, Tensor] = usual[0] if usual else next(iter(found.values()))
    return state


def _state_dicts(content: Any, name: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield every mapping of names to tensors in nested mappings, with the last name that leads to it."""
    if not isinstance(content, dict) or not content:
        return
    if all(isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()):
        if not name or any("." in key for key in content):  # an optimiser's moments have names without one
            yield name, content
        return
    if depth:
        for key, value in content.items():
            yield from _state_dicts(value, str(key), depth - 1)


def _content(content: Any) -> str:
    if not isinstance(content, dict):
        return type(content).__name__
    kinds = [f"{key} ({type(value).__name__})" for key, value in content.items()]
    return f"none among {_some(kinds)}" if kinds else "nothing"


def load_state(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    """Load ``state`` strictly into ``model``.

    Parts that a compiled or wrapped model puts before or into every name are taken off where the rest fits.

    Raises:
        CheckpointError: keys are missing, unexpected or of another shape; each is listed.
    """
    own = model.state_dict()
    optional = {key for key in own if key.endswith("num_batches_tracked")}
    state = fitting(state, own.keys() - optional)
    missing = [key for key in own if key not in state and key not in optional]
    unexpected = [key for key in state if key not in own]
    shapes = [
        f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    if missing or unexpected or shapes:
        parts = [
            f"{len(items)} {what}: {_some(items)}"
            for what, items in (("missing", missing), ("unexpected", unexpected), ("other shape", shapes))
            if items
        ]
        raise CheckpointError(
            f"{path}: weights of another architecture than the pipeline's model: {len(state)} tensors found, "
            f"{len(own)} expected; {'; '.join(parts)}. "
            "Set model.name and model.params to the network that they were trained with; in a folder of "
            "nnU-Net or MONAI its plans, labels or configuration are those of other weights."
        )
    if any(not torch.isfinite(value).all() for value in state.values() if value.is_floating_point()):
        raise CheckpointError(f"{path}: holds NaN or infinite weights; use another checkpoint")
    model.load_state_dict(state, strict=False)


def fitting(state: dict[str, Tensor], needed: Set[str]) -> dict[str, Tensor]:
    """Return the state without the parts that all its names share, if it holds all that is needed then."""
    names = {key: key.replace("_orig_mod.", "") for key in state}
    while not needed <= set(names.values()):
        firsts = {name.partition(".")[0] for name in names.values()}
        if len(firsts) != 1 or not all("." in name for name in names.values()):
            return state
        names = {key: name.partition(".")[2] for key, name in names.items()}
    return {names[key]: value for key, value in state.items()}


def _some(items: list[str], limit: int = 6) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
