"""Weights of nnU-Net v2 folders: read without running anything, written so that nnU-Net reads them again."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tesla_med.config.models import ModelConfig, PipelineConfig
from tesla_med.config.nnunet import CHECKPOINTS, DATASET, PLANS, configuration_of, folds_of, nnunet_folder
from tesla_med.config.paths import leads_outside, whole_path
from tesla_med.errors import CheckpointError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.files import atomic_path, write_json
from tesla_med.models.nnunet import our_name, own_names

WEIGHTS, AXES = "network_weights", "inference_allowed_mirroring_axes"
PROVENANCE = "tesla_med.json"


@dataclass(frozen=True)
class Fold:
    """What one checkpoint holds.

    Attributes:
        path: its file.
        content: all of it.
    """

    path: Path
    content: dict[str, Any]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The state dict by nnU-Net's names, a wrapper of a compiled network taken off."""
        found: dict[str, Tensor] = self.content[WEIGHTS]
        return {
            name.removeprefix("module.").removeprefix("_orig_mod."): value for name, value in found.items()
        }

    @property
    def mirror(self) -> tuple[int, ...]:
        """The spatial axes over which predictions are mirrored."""
        return tuple(int(axis) for axis in self.content.get(AXES) or ())

    @property
    def batch_norm(self) -> bool:
        """Whether norms have running statistics, whatever the plans say of the norm."""
        return any(name.endswith("running_mean") for name in self.weights)


def read_folds(path: Path) -> list[Fold]:
    """Return the folds that a path means: those of a model folder, or the one of a fold or checkpoint.

    Raises:
        CheckpointError: no checkpoint, or one that is damaged, would run code, or holds no weights.
    """
    folds, folder = [_read(file) for file in fold_files(path)], nnunet_folder(path)
    for fold in folds:
        _check_configuration(fold, folder)
    return folds


def _check_configuration(fold: Fold, folder: Path | None) -> None:
    """Raise if a checkpoint is that of another configuration than its folder says: other voxels are seen."""
    trained = fold.content.get("init_args")
    name = trained.get("configuration") if isinstance(trained, dict) else None
    said = None if folder is None or "__" not in folder.name else configuration_of(folder)
    if isinstance(name, str) and said is not None and name != said:
        raise CheckpointError(
            f"{fold.path}: trained as {name!r}, but its folder's name says {said!r}; name the folder as "
            f"nnU-Net did, ...__{name}"
        )


def fold_files(path: Path) -> list[Path]:
    """Return the checkpoints that a path means, unread.

    Raises:
        CheckpointError: there is none.
    """
    folder, path = nnunet_folder(path), whole_path(path)
    if path.is_file():
        return [path]
    if folder is None or path.resolve() == folder.resolve():
        return folds_of(path)
    files = [path / name for name in CHECKPOINTS if (path / name).is_file()][:1]
    if not files:
        raise CheckpointError(f"{path}: holds neither {CHECKPOINTS[0]} nor {CHECKPOINTS[1]}")
    return files


def left_out_folds(path: Path) -> tuple[str, ...]:
    """Return a remark where numbered folds of a model folder have no checkpoint of the kind that is used."""
    used = folds_of(path)
    folders = {item for item in path.glob("fold_*") if item.name.removeprefix("fold_").isdigit()}
    left = sorted(item.name for item in folders - {item.parent for item in used})
    if not left or used[0].parent not in folders:
        return ()
    text = f"{path.name}: {', '.join(left)} without {used[0].name}"
    return (f"{text}; {len(used)} of {len(folders)} folds are used",)


def _read(path: Path) -> Fold:
    check_fetched(path, CheckpointError)
    try:
        with torch.serialization.safe_globals(_numbers()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        if found is None:
            raise CheckpointError(
                f"{path}: cannot be read as a checkpoint of nnU-Net v2; give the folder of the model, or "
                "copy the file again"
            ) from None
        raise CheckpointError(
            f"{path}: refused, it holds more than weights and numbers and could run code ({found[1]}); "
            "ask for the folder as nnU-Net's training wrote it"
        ) from None
    except Exception as error:  # torch raises many kinds on damaged files
        text = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{path}: cannot be read as a checkpoint of nnU-Net ({path.stat().st_size} bytes: {text[0]}); "
            "it may be cut off: copy it again"
        ) from None
    weights = content.get(WEIGHTS) if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise CheckpointError(f"{path}: holds no {WEIGHTS!r}; expected a checkpoint of nnU-Net v2")
    return Fold(path, content)


def _numbers() -> list[Any]:
    """Return what checkpoints hold beside tensors: numbers of numpy, in the records of the training."""
    kinds = {type(np.dtype(name)) for name in ("float64", "float32", "float16", "int64", "int32", "bool")}
    names = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
    scalar = np.float64(0).__reduce__()[0]
    return [np.dtype, *kinds, *[(scalar, name) for name in names]]


def with_weights(pipeline: PipelineConfig, folds: list[Fold]) -> tuple[PipelineConfig, dict[str, Tensor]]:
    """Return the pipeline with what only checkpoints say of the network, and its weights by our names.

    Raises:
        CheckpointError: folds of different networks.
    """
    first = folds[0]
    for fold in folds[1:]:
        if (fold.mirror, fold.batch_norm) != (first.mirror, first.batch_norm):
            raise CheckpointError(
                f"{fold.path}: not a fold of the training of {first.path}: other norms or mirroring"
            )
    params = {**pipeline.model.params, "folds": len(folds), "mirror": list(first.mirror)}
    if first.batch_norm and params.get("norm") != "BatchNorm":  # by the trainer, which the plans do not say
        params |= {"norm": "BatchNorm", "norm_options": {"eps": 1e-5, "affine": True}}
    state = {
        f"folds.{index}.{name}": value.float() if value.is_floating_point() else value
        for index, fold in enumerate(folds)
        for name, value in own_names(fold.weights).items()
    }
    model = ModelConfig(name=pipeline.model.name, params=params)
    return pipeline.model_copy(update={"model": model}), state


def write_folder(source: Path, target: Path, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write a model folder with other weights, which nnU-Net's own predictor reads.

    Plans and dataset.json are copied, and so are fingerprint and licence unless a link leads out of the
    folder. Every fold is written as ``checkpoint_final.pth`` under the names of the source, and
    ``tesla_med.json`` says where the weights come from.

    Args:
        source: what the weights were read from: a model folder, a fold or a checkpoint of it.
        target: parent of the new folder, which gets the name of the source.
        state: weights by our names.
        about: what is said of them.

    Returns:
        The new folder.

    Raises:
        OutputError: a file cannot be written.
    """
    folder = nnunet_folder(source)
    assert folder is not None  # noqa: S101 - it was read from there
    new = target / folder.name
    for index, fold in enumerate(read_folds(source)):
        own = {
            name.removeprefix(f"folds.{index}."): value.detach().to("cpu")
            for name, value in state.items()
            if name.startswith(f"folds.{index}.")
        }
        weights = {name: own[our_name(name, value, own)].to(value) for name, value in fold.weights.items()}
        content = fold.content | {WEIGHTS: weights, "optimizer_state": {}, "grad_scaler_state": None}
        inside = fold.path.parent.name if fold.path.parent != folder else "fold_0"
        path = new / inside / CHECKPOINTS[0]
        with atomic_path(path) as temporary:
            torch.save(content, temporary)
    for name in (PLANS, DATASET, "dataset_fingerprint.json", "LICENSE", "LICENSE.txt"):
        known = name in (PLANS, DATASET) or not leads_outside(folder / name, folder)
        if (folder / name).is_file() and known:
            with atomic_path(new / name) as temporary:
                shutil.copyfile(folder / name, temporary)
    write_json(new / PROVENANCE, dict(about))
    return new
