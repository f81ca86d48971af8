"""Files of MONAI bundles: TorchScript, checked before it is loaded, and bundles written again."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tesla_med.config.bundle_files import bundle_folder, weights_of
from tesla_med.errors import CheckpointError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.files import atomic_path, write_json
from tesla_med.models.checkpoint import fitting, one_state

PROVENANCE = "tesla_med.json"
COPIED = ("configs", "scripts", "docs")
_REACHES_OUT = re.compile(r"\b(save|_save\w*|load\w*|from_file)\s*\(|\bops\.(?!prim\b|aten\b)\w+")
"""Operators of TorchScript that write or read files, and operators from other libraries."""


def load_script(path: Path) -> nn.Module:
    """Return a TorchScript, on the CPU.

    A TorchScript is a program of its own: its source lies in the file as text, torch compiles and interprets
    it, and no Python is run, neither by loading nor by calling it. The language knows tensors, numbers and
    containers only. A few of its operators reach beyond them (``save`` writes a file, ``from_file`` reads
    one), and a class may use them while it is loaded; so the text is searched for them first, and a file that
    names one is refused.

    Raises:
        CheckpointError: it is missing, cannot be loaded, or reaches beyond tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: this TorchScript is the model's network, and it is not there")
    check_fetched(path, CheckpointError)
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if "/code/" in name and name.endswith(".py")]
            found = [_REACHES_OUT.search(archive.read(name).decode("utf-8")) for name in names]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot be read as TorchScript: {error}") from None
    if outside := next((match[0] for match in found if match is not None), None):
        raise CheckpointError(
            f"{path}: refused, it uses {outside!r} and could reach files or other libraries"
        )
    try:
        network: nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    except Exception as error:  # torch raises many kinds on damaged files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path}: cannot be loaded as TorchScript: {reason[0]}") from None
    return network


def write_bundle(source: Path, target: Path, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write a bundle with other weights, which MONAI's own workflows read.

    Configurations, scripts, documents and licence are copied, links left out. The weights are written under
    the name and in the structure of the source, keys and data types as they were, and ``tesla_med.json`` says
    where they come from.

    Args:
        source: what the weights were read from: a bundle or a file in its ``models/``.
        target: parent of the new folder, which gets the name of the source.
        state: weights by our names.
        about: what is said of them.

    Returns:
        The new folder.

    Raises:
        CheckpointError: the weights of the source are not those of this network.
        OutputError: a file cannot be written.
    """
    folder = bundle_folder(source)
    assert folder is not None  # noqa: S101 - it was read from there
    folder = folder.resolve()
    weights = weights_of(source if source.is_file() else folder)
    own = {name.removeprefix("network."): value.detach().to("cpu") for name, value in state.items()}
    new = target / folder.name
    with atomic_path(new / "models" / weights.name) as temporary:
        if weights.suffix == ".ts":
            script = load_script(weights)
            script.load_state_dict(own)
            torch.jit.save(script, str(temporary))
        else:
            torch.save(_with(weights, own), temporary)
    for path in _files(folder):
        with atomic_path(new / path.relative_to(folder)) as temporary:
            shutil.copyfile(path, temporary)
    write_json(new / PROVENANCE, dict(about))
    return new


def _with(path: Path, own: Mapping[str, Tensor]) -> Any:
    """Return the content of a weights file with other weights in place of its own."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    theirs = one_state(content, path)
    names = dict(zip(theirs, fitting(theirs, own.keys()), strict=True))
    if missing := [name for name, short in names.items() if short not in own]:
        raise CheckpointError(f"{path}: weights of another network: {', '.join(missing[:6])}")
    theirs.update({name: own[short].to(theirs[name]) for name, short in names.items()})
    return content


def _files(folder: Path) -> list[Path]:
    """Return the files of a bundle that go with its weights."""
    inside = [path for name in COPIED for path in sorted((folder / name).rglob("*"))]
    beside = sorted(folder.glob("LICENSE*"))
    return [path for path in (*inside, *beside) if path.is_file() and not path.is_symlink()]
