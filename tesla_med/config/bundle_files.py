"""The files of a MONAI bundle: which it has, and which hold its weights."""

from __future__ import annotations

import os
from pathlib import Path

from tesla_med.config.bundle_checkpoint import UNKNOWN, named_checkpoint
from tesla_med.config.bundle_config import METADATA, BundleConfig, inference_file
from tesla_med.config.paths import whole_path
from tesla_med.errors import CheckpointError

SUFFIXES = (".pt", ".pth", ".ts", ".safetensors")


def bundle_folder(path: Path) -> Path | None:
    """Return the bundle that a path means: itself, or that around a file in its ``models/``; else None."""
    path = whole_path(path)
    inside = path.suffix in SUFFIXES and path.parent.name == "models"
    folder = path.parent.parent if inside else path
    return (
        folder if (folder / "configs" / METADATA).is_file() and inference_file(folder) is not None else None
    )


def weights_of(path: Path) -> Path:
    """Return the file with the weights that a path means: itself, or the one that a bundle loads.

    Where nothing names one that is ``models/model.pt``, and a TorchScript of the same name is taken for a
    file that is not there.

    Raises:
        CheckpointError: there is none, it lies outside of the bundle, or it cannot be read which it is.
    """
    folder = bundle_folder(path)
    if folder is None or path.resolve() != folder.resolve():
        return path
    named = named_checkpoint(BundleConfig(folder))
    if named.problem is not None:
        return _only(folder, named.problem)
    wanted = named.path or folder / "models" / "model.pt"
    for file in (wanted, wanted.with_suffix(".ts")):
        if file.is_file():
            return file
    others = sorted(item.name for item in (folder / "models").glob("*") if item.is_file())
    by = " that the configuration names" if named.path is not None else ""
    hint = "; --weights BUNDLE/models/FILE takes another" if any(map(_weights, others)) else ""
    raise CheckpointError(
        f"{folder}: no {_inside(wanted, folder)}{by} and no {wanted.stem}.ts; found: "
        f"{', '.join(others) or 'nothing'}{hint}. ONNX and TensorRT cannot be adapted, and are not read"
    )


def weights_notes(path: Path) -> tuple[str, ...]:
    """Return remarks on the weights of a bundle, where they are not the ones that its configuration names."""
    folder = bundle_folder(path)
    if folder is None:
        return ()
    given = path.resolve() != folder.resolve()
    try:
        named = named_checkpoint(BundleConfig(folder))
    except CheckpointError as outside:
        return (f"{outside}; {path.name} was given",)
    if named.problem is not None:
        taken = f"{path.name} was given" if given else f"{weights_of(path).name}, the only one, is taken"
        return (f"the bundle's configuration does not tell its weights: {named.problem}; {taken}",)
    wanted = named.path or folder / "models" / "model.pt"
    if given and path.resolve() not in (wanted.resolve(), wanted.with_suffix(".ts").resolve()):
        return (f"the bundle's configuration names {_inside(wanted, folder)}; {path.name} was given",)
    return ()


def network_key(path: Path) -> str | None:
    """Return the part of a weights file that is the network's, as the bundle says in which it lies.

    Returns:
        None where nothing says it; an empty text where it is said in a way that cannot be read.
    """
    folder = next((item for item in path.parents[:3] if bundle_folder(item) is not None), None)
    if folder is None:
        return None
    try:
        return named_checkpoint(BundleConfig(folder)).key
    except CheckpointError:  # names a file outside, so the one that was given is another
        return UNKNOWN


def _only(folder: Path, problem: str) -> Path:
    """Return the one file that can hold the weights; a TorchScript counts where there is nothing else."""
    files = sorted(item for item in (folder / "models").glob("*") if item.is_file() and _weights(item.name))
    plain = [item for item in files if item.suffix != ".ts"] or files
    if len(plain) != 1:
        raise CheckpointError(
            f"{folder}: which weights its configuration means cannot be read: {problem}; found: "
            f"{', '.join(item.name for item in files) or 'nothing'}. --weights BUNDLE/models/FILE takes one"
        )
    return plain[0]


def _weights(name: str) -> bool:
    return Path(name).suffix in SUFFIXES


def _inside(file: Path, folder: Path) -> str:
    return os.path.relpath(file.absolute(), folder.absolute())
