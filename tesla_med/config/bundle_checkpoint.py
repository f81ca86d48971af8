"""Which file a MONAI bundle loads into its network, and which part of it, read without running anything.

Loaders are looked for in the whole configuration, under any key; where there is none, ``ckpt_path`` names the
file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tesla_med.errors import CheckpointError

if TYPE_CHECKING:
    from tesla_med.config.bundle_config import BundleConfig

LOADERS = ("checkpointloader", "checkpoint_loader")
"""Keys under which a text that cannot be read is a loader all the same."""
UNKNOWN = ""
"""In place of a key: a part of the file is named, but it cannot be read which."""
LONGEST = 1000
"""Characters of a mapping that is written as an expression."""
_NOT_SEARCHED = frozenset(("_meta_", "bundle_root", "_desc_"))
_PART = re.compile(r"'[\w.]+'|\"[\w.]+\"")
_NETWORK = re.compile(r"@network(?:_def)?\b")
_BY_HAND = re.compile(
    r"load_state_dict|torch\.load|jit\.load|CheckpointLoader|copy_model_state|load_net_with_metadata|load_file"
)
_IMPORT = re.compile(r"\$\s*(?:import|from)\s")
_NAMED = re.compile(r"@ckpt_path\b")


@dataclass(frozen=True)
class Named:
    """What a configuration loads into its network.

    Attributes:
        path: the file; None where nothing names one, or where it cannot be read which.
        key: the part of the file that is the network's; None: not said.
        problem: why it cannot be read which file is named.
    """

    path: Path | None = None
    key: str | None = None
    problem: str | None = None


def named_checkpoint(config: BundleConfig) -> Named:
    """Return the checkpoint that a configuration names.

    Raises:
        CheckpointError: it lies outside of the bundle.
    """
    found = list(dict.fromkeys(_of_loader(config, node, key) for node, key in _loaders(config)))
    if not found and isinstance(config.content.get("ckpt_path"), str):
        found = [Named(*_file(config, config.content["ckpt_path"], "ckpt_path"))]
    if not found:
        return Named()
    if len({(item.path, item.problem) for item in found}) == 1:
        return found[0] if len(found) == 1 else Named(found[0].path, UNKNOWN, found[0].problem)
    names = sorted({str(item.path or f"a file that cannot be read ({item.problem})") for item in found})
    return Named(key=UNKNOWN, problem=f"several checkpoint loaders, of {' and '.join(names)}")


def _loaders(config: BundleConfig) -> Iterator[tuple[Any, str]]:
    """Yield everything that may load weights, but for mappings that are switched off, and its key."""
    for node, key in _nodes(config.content):
        if isinstance(node, dict):
            target = str(node.get("_target_", "")).rpartition(".")[2]
            if (target.endswith("CheckpointLoader") or "load_path" in node) and not _off(config, node):
                yield node, key
        elif key in LOADERS or _loads(node, key):
            followed = _lexical(config, node)
            if followed is not None and not isinstance(followed, dict):
                yield node, key


def _nodes(content: Any) -> Iterator[tuple[Any, str]]:
    """Yield every mapping and every text of a configuration once, and its key."""
    left, seen = [(content, "")], set[int]()
    while left:
        node, key = left.pop()
        if isinstance(node, str):
            yield node, key
        if not isinstance(node, dict | list) or id(node) in seen:
            continue
        seen.add(id(node))  # YAML can hold itself
        if isinstance(node, dict):
            yield node, key
        pairs = enumerate(node) if isinstance(node, list) else node.items()
        inner = [
            (value, f"{key}::{name}".removeprefix("::")) for name, value in pairs if name not in _NOT_SEARCHED
        ]
        left += inner[::-1]


def _loads(text: str, key: str) -> bool:
    """Return whether a text loads weights, or takes what another file holds into a place that may."""
    runs = text[:1] == "$" or key.endswith("::_target_")
    if text[:1] == "%":
        return re.search(r"\.(?:json|ya?ml)\b", text) is not None
    loader = key.endswith("::_target_") and text.endswith("CheckpointLoader")  # its mapping counts
    return runs and not loader and _BY_HAND.search(text) is not None and _IMPORT.match(text) is None


def _lexical(config: BundleConfig, node: Any) -> Any:
    """Return what a reference leads to; where that cannot be read, the node as it is written."""
    try:
        return config.followed(node, "checkpoint")
    except CheckpointError:
        return node


def _off(config: BundleConfig, node: Any) -> bool:
    """Return whether a loader is switched off for certain; many ask whether the file is there."""
    try:
        off = config.plain(node.get("_disabled_", False), "_disabled_") if isinstance(node, dict) else False
    except CheckpointError:
        return False
    return off is True or str(off).lower() == "true"


def _of_loader(config: BundleConfig, node: Any, key: str) -> Named:
    if isinstance(node, str):
        named = config.content.get("ckpt_path")
        if _NAMED.search(node) and isinstance(named, str) and not _loads(named, "ckpt_path"):
            path, _, problem = _file(config, named, "ckpt_path")
            return Named(path, UNKNOWN, problem)
        return Named(key=UNKNOWN, problem=f"weights are loaded by {node[:100]!r} ({key[:60]})")
    path, _, problem = _file(config, node.get("load_path"), f"{key}::load_path")
    own = str(node.get("_target_", "CheckpointLoader")).rpartition(".")[2] != "CheckpointLoader"
    given = node.get("load_dict")
    return Named(path, UNKNOWN if own and given is None else _part(config, given), problem)


def _file(config: BundleConfig, text: Any, key: str) -> tuple[Path | None, str | None, str | None]:
    """Return the file that a text names, no key, and why it cannot be read."""
    try:
        value = config.plain(text, key)
    except CheckpointError:
        value = None
    if not isinstance(value, str) or not value or "//" in value:
        return None, None, f"{key} is {str(text)[:100]!r}, which cannot be read without running it"
    inside = os.path.normpath(config.folder.absolute())
    target = os.path.normpath(config.folder.absolute() / value)
    if Path(value).is_absolute() or os.path.commonpath([target, inside]) != inside:
        raise CheckpointError(
            f"{config.file}: {key} names {value!r}, outside of the bundle; weights must lie in it "
            "(--weights BUNDLE/models/FILE names one of its own)"
        )
    return Path(target), None, None


def _part(config: BundleConfig, node: Any) -> str | None:
    """Return the key of a ``load_dict`` that is the network's."""
    node = _lexical(config, node)
    if node is None:
        return None
    if isinstance(node, str):
        node = _pairs(node)
    if not isinstance(node, dict) or not node:
        return UNKNOWN
    if len(node) == 1:
        return str(next(iter(node)))
    keys = [str(key) for key, value in node.items() if isinstance(value, str) and _NETWORK.search(value)]
    return keys[0] if len(keys) == 1 else UNKNOWN


def _pairs(text: str) -> dict[str, str] | None:
    """Return a mapping that is written as an expression, ``${'model': @network}``; None of other texts."""
    inner = text[1:].strip()
    if text[:1] != "$" or len(text) > LONGEST or inner[:1] != "{" or inner[-1:] != "}":
        return None
    found = {}
    for entry in inner[1:-1].strip().removesuffix(",").split(","):
        name, _, value = entry.partition(":")
        if _PART.fullmatch(name.strip()) is None or not value.strip() or set(value) & set("{}'\""):
            return None
        found[name.strip()[1:-1]] = value.strip()
    return found
