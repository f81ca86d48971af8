"""Files of MONAI bundles: TorchScript, checked before it is loaded, and bundles written again."""

from __future__ import annotations

import io
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tesla_med.config.bundle_files import bundle_folder, weights_of
from tesla_med.config.paths import whole_path
from tesla_med.errors import CheckpointError
from tesla_med.io.fetched import check_fetched
from tesla_med.io.files import atomic_path, write_json
from tesla_med.models.checkpoint import fitting, one_state

PROVENANCE = "tesla_med.json"
COPIED = ("configs", "scripts", "docs")
_REACHING = re.compile(r"_?save|_?load|from_file|rpc_\w+|\w*PythonOp")
"""Operators of TorchScript that write or read files, or reach other machines or Python."""
_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\[nrt"'\\])*"|'(?:[^'\\\n]|\\[nrt"'\\])*')|(?P<word>\w+)|\s+|.""", re.DOTALL
)
_LIBRARIES = ("prim", "aten")
"""Whose operators a script may name."""


def load_script(path: Path) -> nn.Module:
    """Return a TorchScript, on the CPU.

    A TorchScript is a program of its own: its source lies in the file as text, torch compiles and interprets
    it, and no Python is run, neither by loading nor by calling it. The language knows tensors, numbers and
    containers only. A few of its operators reach beyond them (``save`` writes a file, ``from_file`` reads
    one), and a class may use them while it is loaded. So the text is searched for their names first, in code
    and in literals, and a file that holds one is refused, as is one that is written in a way that could hide
    a name. What torch loads is put together from what was searched.

    Raises:
        CheckpointError: it is missing, cannot be loaded, or reaches beyond tensors.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: this TorchScript is the model's network, and it is not there")
    check_fetched(path, CheckpointError)
    try:
        searched = _searched(path)
    except (OSError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: cannot be read as TorchScript: {error}") from None
    try:
        network: nn.Module = torch.jit.load(searched, map_location="cpu")  # type: ignore[no-untyped-call]
    except Exception as error:  # torch raises many kinds on damaged files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path}: cannot be loaded as TorchScript: {reason[0]}") from None
    return network


def _searched(path: Path) -> io.BytesIO:
    """Return an archive of what a TorchScript's archive holds, once all of its code was searched.

    Torch and Python need not find the same in one file: torch takes names in any case, and other places in
    the file for the same name. So what it gets is written anew.
    """
    found, seen = io.BytesIO(), set[str]()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(found, "w", zipfile.ZIP_STORED) as copy:
        for name in archive.namelist():
            if name.casefold() in seen:
                raise CheckpointError(f"{path}: refused, it holds {name!r} twice")
            seen.add(name.casefold())
            content = archive.read(name)
            outside = reaches_out(content.decode("utf-8")) if _is_code(name) else None
            if outside is not None:
                raise CheckpointError(
                    f"{path}: refused, it uses {outside!r} and could reach files or other libraries"
                )
            copy.writestr(name, content)
    found.seek(0)
    return found


def _is_code(name: str) -> bool:
    parts = name.casefold().split("/")
    return parts[-1].endswith(".py") or ("code" in parts[:-1] and not parts[-1].endswith("_pkl"))


def reaches_out(code: str) -> str | None:
    """Return what in TorchScript code could reach beyond tensors, or hide that; None if nothing does.

    Looked for are the words of ``_REACHING``, in code and in literals (``getattr`` takes names as text), and
    operators of other libraries. Comments, escaped letters and literals beside each other are never written
    by torch, and could be used to spell such a word.
    """
    before: list[str] = []
    for token in _TOKEN.finditer(code):
        held = token[0]
        if held.isspace():
            continue
        if held in ("\\", "#", '"', "'") or (token["text"] and before[-1:] == ["text"]):
            return held
        words = re.findall(r"\w+", held) if token["text"] else [held]
        if word := next((word for word in words if _REACHING.fullmatch(word)), None):
            return word
        if before[-1:] == ["ops"] and before[-2:-1] != ["."] and held != ".":
            return "ops"
        if before[-2:] == ["ops", "."] and before[-3:-2] != ["."] and held not in _LIBRARIES:
            return f"ops.{held}"
        before = [*before[-2:], "text" if token["text"] else held]
    return None


def write_bundle(source: Path, target: Path, state: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
    """Write a bundle with other weights, which MONAI's own workflows read.

    Configurations, scripts, modules of Python, documents and licence are copied, links left out. The weights
    are written under the name and in the structure of the source, keys and data types as they were, and
    ``tesla_med.json`` says where they come from.

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
    weights = whole_path(weights_of(source if source.is_file() else folder))
    own = {name.removeprefix("network."): value.detach().to("cpu") for name, value in state.items()}
    new = target / folder.name
    with atomic_path(new / weights.relative_to(folder)) as temporary:
        if weights.suffix == ".ts":
            script = load_script(weights)
            script.load_state_dict(own)
            torch.jit.save(script, str(temporary))
        else:
            torch.save(_with(weights, own), temporary)
    folder = folder.resolve()
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
    """Return the files of a bundle, a path without links, that go with its weights; none behind a link."""
    inside = [path for name in COPIED for path in sorted((folder / name).rglob("*"))]
    beside = sorted(folder.glob("LICENSE*"))
    packages = [
        path.parent for path in sorted(folder.glob("*/__init__.py")) if path.parent.name not in COPIED
    ]
    own = [*sorted(folder.glob("*.py")), *(path for name in packages for path in sorted(name.rglob("*.py")))]
    return [path for path in (*inside, *own, *beside) if path.is_file() and path.resolve() == path]
