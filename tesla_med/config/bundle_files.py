"""The files of a MONAI bundle, and its configuration as data: references followed, nothing run.

Keys that are not asked for are never looked at.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tesla_med.config.expressions import NotPlain, threshold, work_out
from tesla_med.errors import CheckpointError

METADATA = "metadata.json"
INFERENCE = ("inference.json", "inference.yaml", "inference.yml")
SUFFIXES = (".pt", ".pth", ".ts", ".safetensors")
TRUST = "--trust-code lets MONAI run what the bundle holds, if you trust those who made it"
MOST = 20_000
"""Values that one configuration may hold once its references are followed."""
DEEPEST = 50
_HINTS = frozenset(("_target_", "_desc_", "_disabled_", "_requires_", "_mode_"))
_MOVED = re.compile(r"\$?\s*@(\w+(?:(?:::|#)\w+)*)(?:\.to\([^()]*\)|\.cuda\(\)|\.eval\(\))*\s*")
"""A component on a device, as in ``$@network_def.to(@device)``."""


def bundle_folder(path: Path) -> Path | None:
    """Return the bundle that a path means: itself, or that around a file in its ``models/``; else None."""
    inside = path.suffix in SUFFIXES and path.parent.name == "models"
    folder = path.parent.parent if inside else path
    return folder if (folder / "configs" / METADATA).is_file() and _inference(folder) is not None else None


def _inference(folder: Path) -> Path | None:
    files = [folder / "configs" / name for name in INFERENCE]
    return next((file for file in files if file.is_file()), None)


def config_files(folder: Path) -> tuple[Path, Path]:
    """Return metadata and inference configuration of a bundle."""
    inference = _inference(folder)
    assert inference is not None  # noqa: S101 - it is how bundles are recognised
    return folder / "configs" / METADATA, inference


def weights_of(path: Path) -> Path:
    """Return the file with the weights that a path means: itself, or the one of a bundle.

    Raises:
        CheckpointError: there is none, or it lies outside of the bundle.
    """
    folder = bundle_folder(path)
    if folder is None or path.resolve() != folder.resolve():
        return path
    usual = folder / "models" / "model.pt"
    if usual.is_file():
        return usual
    named = _named(BundleConfig(folder))
    if named is not None and named.is_file():
        return named
    script = folder / "models" / "model.ts"
    if script.is_file():
        return script
    others = sorted(item.name for item in (folder / "models").glob("*") if item.is_file())
    raise CheckpointError(
        f"{folder}: no models/model.pt" + (f" or {named}" if named else "") + " and no models/model.ts; "
        f"found: {', '.join(others) or 'nothing'}. ONNX and TensorRT cannot be adapted, and are not read"
    )


def _named(config: BundleConfig) -> Path | None:
    """Return the checkpoint that a configuration names."""
    for key in ("checkpointloader", "checkpoint_loader", "ckpt_path"):
        node = config.content.get(key)
        text = node.get("load_path") if isinstance(node, dict) else node
        if not isinstance(text, str):
            continue
        value = config.plain(text, key)
        inside = os.path.normpath(config.folder.absolute())
        target = os.path.normpath(config.folder.absolute() / str(value))
        if Path(str(value)).is_absolute() or os.path.commonpath([target, inside]) != inside:
            raise CheckpointError(
                f"{config.file}: {key} names {str(value)!r}, outside of the bundle; weights must lie in it"
            )
        return Path(target)
    return None


class BundleConfig:
    """The configuration of a bundle.

    Args:
        folder: the bundle.

    Attributes:
        folder: the same.
        metadata: content of metadata.json.
        file: the inference configuration.
        content: what it holds; ``bundle_root`` is the folder, whatever it says.

    Raises:
        CheckpointError: a file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        metadata, self.file = config_files(folder)
        self.metadata = _mapping(metadata)
        self.content = _mapping(self.file) | {"bundle_root": ".", "_meta_": self.metadata}
        self._left = MOST
        self._within: list[str] = []

    # ------------------------------------------------------------ components

    def component(self, node: Any, where: str) -> tuple[str, dict[str, Any]] | None:
        """Return the class of MONAI that a node names, and its arguments as they are written.

        Args:
            node: a mapping with ``_target_``, or a reference to one.
            where: its key.

        Returns:
            None where the component is switched off.

        Raises:
            CheckpointError: it is something else.
        """
        node = self.followed(node, where)
        if not isinstance(node, dict) or "_target_" not in node:
            raise self.refused(where, node, "a class with its arguments is expected")
        hints = {key for key in node if key.startswith("_") and key.endswith("_")}
        if unknown := sorted(hints - _HINTS):
            raise self.refused(where, node, f"{unknown[0]} is not known")
        if node.get("_mode_", "default") != "default":
            raise self.refused(where, node, "_mode_ is another than default")
        off = self.plain(node.get("_disabled_", False), f"{where}::_disabled_")
        if off is True or str(off).lower() == "true":
            return None
        target = self.plain(node["_target_"], f"{where}::_target_")
        if not isinstance(target, str) or not re.fullmatch(r"(?:monai\.)?[\w.]+", target):
            raise self.refused(where, node, "its class has no name")
        package, _, name = target.rpartition(".")
        if package and not package.startswith("monai."):
            raise self.refused(where, target, "it is not a class of MONAI")
        return name, {key: value for key, value in node.items() if key not in hints}

    def followed(self, node: Any, where: str) -> Any:
        """Return what a reference leads to, also one that moves a component to a device.

        Raises:
            CheckpointError: it leads nowhere, in a circle, or runs something.
        """
        for _ in range(20):
            if not isinstance(node, str) or node[:1] not in ("@", "$"):
                return node
            moved = _MOVED.fullmatch(node)
            try:
                node = self._found(moved[1]) if moved else self._value(node)
            except NotPlain as reason:
                raise self.refused(where, node, str(reason)) from None
        raise self.refused(where, node, "its references lead in a circle")

    def transforms(self, key: str) -> list[Any]:
        """Return the transforms of a key as they are written: of a ``Compose``, of a list, or one.

        Raises:
            CheckpointError: it is missing, or resamples lazily, which gives other voxels.
        """
        node = self.followed(self.content.get(key), key)
        if node is None:
            raise self.refused(key, node, "it is missing")
        if isinstance(node, dict) and str(node.get("_target_", "")).rpartition(".")[2] == "Compose":
            if self.plain(node.get("lazy", False), f"{key}::lazy"):
                raise self.refused(f"{key}::lazy", node["lazy"], "resampling all at once is not supported")
            node = self.followed(node.get("transforms", []), f"{key}::transforms")
        return node if isinstance(node, list) else [node]

    # ------------------------------------------------------------ values

    def plain(self, node: Any, where: str) -> Any:
        """Return a value of numbers, texts, lists and mappings, references followed.

        Raises:
            CheckpointError: it holds a class, or something to run.
        """
        self._left -= 1
        if self._left < 0 or where.count("::") > DEEPEST:
            raise CheckpointError(
                f"{self.file}: {where[:60]} holds more than {MOST} values, or more than {DEEPEST} levels of "
                "them, once references are followed"
            )
        if isinstance(node, str):
            if node[:1] == "$" and (least := threshold(node[1:])) is not None:
                return {"above": least}
            try:
                value = self._value(node)
            except NotPlain as reason:
                raise self.refused(where, node, str(reason)) from None
            return self.plain(value, f"{where}::") if isinstance(value, list | dict) else value
        if isinstance(node, dict):
            if "_target_" in node:
                raise self.refused(where, node, "a number, a text or a list is expected")
            return {str(key): self.plain(value, f"{where}::{key}") for key, value in node.items()}
        if isinstance(node, list | tuple):
            return [self.plain(value, f"{where}::{index}") for index, value in enumerate(node)]
        if node is None or isinstance(node, bool | int | float):
            return node
        raise self.refused(where, node, "a number, a text or a list is expected")

    def _value(self, text: str) -> Any:
        if text[:1] == "$":
            return work_out(text[1:], self._look_up)
        if text[:1] == "@":
            return self._look_up(text[1:].replace("#", "::"))
        if text[:1] == "%":
            raise NotPlain("it is a macro")
        return text

    def _look_up(self, name: str) -> Any:
        """Return the value of a key; components stay as they are written."""
        if name in self._within or len(self._within) > 50:
            raise NotPlain(f"@{name} leads in a circle")
        self._within.append(name)
        try:
            return self._inner(self._found(name), name)
        finally:
            self._within.pop()

    def _inner(self, node: Any, name: str) -> Any:
        if isinstance(node, str):
            return self._value(node)
        if isinstance(node, list):
            return [self._inner(item, name) if isinstance(item, str) else item for item in node]
        return node

    def _found(self, name: str) -> Any:
        """Return the node of a key, as it is written."""
        node: Any = self.content
        for part in name.replace("#", "::").split("::"):
            if isinstance(node, str):
                node = self._value(node)
            try:
                node = node[int(part)] if isinstance(node, list) else node[part]
            except (KeyError, IndexError, ValueError, TypeError):
                raise NotPlain(f"there is no @{name}") from None
        return node

    def refused(self, where: str, node: Any, why: str) -> CheckpointError:
        """Return the error that says which key holds what, and why it is not used."""
        short = reprlib.Repr()  # a configuration may hold itself
        short.maxstring, short.maxother, short.maxlevel = 100, 100, 2
        return CheckpointError(f"{self.file}: {where.rstrip(':')} is {short.repr(node)}: {why}; {TRUST}")


def dictionary_name(name: str) -> str:
    """Return the usual name of a dictionary transform: ``SpacingD`` and ``SpacingDict`` are ``Spacingd``."""
    if name.endswith("Dict"):
        return f"{name.removesuffix('Dict')}d"
    return f"{name[:-1]}d" if name.endswith("D") else name


def _mapping(path: Path) -> dict[str, Any]:
    """Return the content of a JSON or YAML file."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{path}: cannot be read: {reason[0]}") from None
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path}: expected keys with values, got {type(content).__name__}")
    return {str(key): value for key, value in content.items()}
