"""The configuration of a MONAI bundle as data: references followed, nothing run.

Keys that are not asked for are searched for what loads weights, and else not looked at.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tesla_med.config.expressions import NotPlain, threshold, work_out
from tesla_med.errors import CheckpointError

METADATA = "metadata.json"
INFERENCE = ("inference.json", "inference.yaml", "inference.yml")
TRUST = "--trust-code lets MONAI run what the bundle holds, if you trust those who made it"
MOST = 20_000
"""Values that one configuration may hold once its references are followed."""
DEEPEST = 50
PARTS = {
    "network": ("evaluator::network", "network", "network_def"),
    "inferer": ("evaluator::inferer", "inferer"),
    "postprocessing": ("evaluator::postprocessing", "postprocessing"),
    "preprocessing": (
        "evaluator::val_data_loader::dataset::transform",
        "dataloader::dataset::transform",
        "dataset::transform",
        "preprocessing",
    ),
}
"""Where the parts of a workflow lie: first as what is run refers to them, then by their usual names."""
_HINTS = frozenset(("_target_", "_desc_", "_disabled_", "_requires_", "_mode_"))
_MOVED = re.compile(r"\$?\s*@(\w+(?:(?:::|#)\w+)*)(?:\.to\([^()]*\)|\.cuda\(\)|\.eval\(\))*\s*")
"""A component on a device, as in ``$@network_def.to(@device)``."""

_JOIN = re.compile(r"\bos\.path\.join\(([^()]*)\)")


def _joined(found: re.Match[str]) -> str:
    """Return ``os.path.join(a, b)`` as a sum of texts, which says the same of parts of a path."""
    return "(" + " + '/' + ".join(found[1].rstrip(" ,").split(",")) + ")"


def inference_file(folder: Path) -> Path | None:
    """Return the inference configuration of a bundle; None where it has none."""
    files = [folder / "configs" / name for name in INFERENCE]
    return next((file for file in files if file.is_file()), None)


def config_files(folder: Path) -> tuple[Path, Path]:
    """Return metadata and inference configuration of a bundle."""
    inference = inference_file(folder)
    assert inference is not None  # noqa: S101 - it is how bundles are recognised
    return folder / "configs" / METADATA, inference


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

    def place(self, part: str) -> tuple[str, Any] | None:
        """Return the key of a part of ``PARTS``, references to it followed, and what is written there."""
        return next((found for key in PARTS[part] if (found := self.at(key)) is not None), None)

    def at(self, key: str) -> tuple[str, Any] | None:
        """Return where a key leads to, references followed, and what is written there; None for nowhere."""
        where, node = "", self.content
        first, *parts = key.split("::")
        if first == "evaluator" and first not in self.content and len(self.evaluators()) == 1:
            first = self.evaluators()[0]
        for part in (first, *parts):
            if not isinstance(node, dict) or node.get(part) is None:
                return None
            where, node = self._referred(f"{where}::{part}".removeprefix("::"), node[part])
        return where, node

    def evaluators(self) -> list[str]:
        """Return the keys of all evaluators."""
        return [
            key
            for key, node in self.content.items()
            if isinstance(node, dict) and str(node.get("_target_", "")).endswith("Evaluator")
        ]

    def _referred(self, where: str, node: Any) -> tuple[str, Any]:
        for _ in range(20):
            moved = _MOVED.fullmatch(node) if isinstance(node, str) else None
            if moved is None:
                break
            try:
                where, node = moved[1].replace("#", "::"), self._found(moved[1])
            except NotPlain:
                break
        return where, node

    def transforms(self, part: str) -> list[tuple[str, Any]]:
        """Return the transforms of a part, as they are written, with their keys.

        A ``Compose`` in another is taken for what it holds.

        Raises:
            CheckpointError: it is missing or switched off, or resamples lazily, which gives other voxels.
        """
        where, node = self.place(part) or (part, None)
        node = self.followed(node, where)
        if node is None:
            raise self.refused(where, node, "it is missing")
        if _composes(node) and self.component(node, where) is None:
            raise self.refused(where, node, "it is switched off")
        return list(self._flat(where, node, 0))

    def _flat(self, where: str, node: Any, depth: int) -> Iterator[tuple[str, Any]]:
        self._spend(where, depth)
        if _composes(node):
            found = self.component(node, where)
            if found is None:
                return
            if self.plain(found[1].get("lazy", False), f"{where}::lazy"):
                raise self.refused(f"{where}::lazy", node["lazy"], "resampling all at once is not supported")
            where = f"{where}::transforms"
            node = self.followed(found[1].get("transforms", []), where)
        for index, item in enumerate(node if isinstance(node, list) else [node]):
            inner = f"{where}::{index}"
            try:
                followed = self.followed(item, inner)
                yield from (
                    list(self._flat(inner, followed, depth + 1)) if _composes(followed) else [(inner, item)]
                )
            except CheckpointError:  # refused by its key where it is read
                yield inner, item

    # ------------------------------------------------------------ values

    def plain(self, node: Any, where: str) -> Any:
        """Return a value of numbers, texts, lists and mappings, references followed.

        Raises:
            CheckpointError: it holds a class, or something to run.
        """
        self._spend(where, where.count("::"))
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

    def _spend(self, where: str, depth: int) -> None:
        self._left -= 1
        if self._left < 0 or depth > DEEPEST:
            raise CheckpointError(
                f"{self.file}: {where[:60]} holds more than {MOST} values, or more than {DEEPEST} levels of "
                "them, once references are followed"
            )

    def _value(self, text: str) -> Any:
        if text[:1] == "$":
            return work_out(_JOIN.sub(_joined, text[1:]), self._look_up)
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


def _composes(node: Any) -> bool:
    return isinstance(node, dict) and str(node.get("_target_", "")).rpartition(".")[2] == "Compose"


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
