"""Which file a MONAI bundle loads into its network, and which part of it, read without running anything.

The loader is ``checkpointloader`` or one of ``handlers``; where there is none, ``ckpt_path`` names the file.
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
    from tesla_med.config.bundle_files import BundleConfig

LOADERS = ("checkpointloader", "checkpoint_loader")
HANDLERS = ("handlers", "val_handlers", "evaluator::val_handlers")
UNKNOWN = ""
"""In place of a key: a part of the file is named, but it cannot be read which."""
_ENTRY = r"['\"]([\w.]+)['\"]\s*:\s*([^,{}'\"]+)"
_PAIRS = re.compile(rf"\$\s*\{{\s*{_ENTRY}(?:,\s*{_ENTRY})*,?\s*\}}\s*")
"""A mapping as an expression, ``${'model': @network}``."""
_NETWORK = re.compile(r"@network(?:_def)?\b")
_BY_HAND = re.compile(r"load_state_dict|torch\.load|CheckpointLoader")


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
        texts = [text for key in ("initialize", "run") for text in _texts(config.content.get(key))]
        by_hand = next((text for text in texts if _BY_HAND.search(text)), None)
        return Named(problem=None if by_hand is None else f"weights are loaded by {by_hand[:100]!r}")
    if len(found) > 1:
        names = " and ".join(sorted({str(item.path or "a file that cannot be read") for item in found}))
        return Named(key=UNKNOWN, problem=f"several checkpoint loaders, of {names}")
    return found[0]


def _texts(node: Any) -> list[str]:
    return [item for item in (node if isinstance(node, list) else [node]) if isinstance(item, str)]


def _loaders(config: BundleConfig) -> Iterator[tuple[Any, str]]:
    """Yield every loader that is not switched off once, and its key."""
    seen: set[int] = set()  # an evaluator refers to the handlers
    for key in LOADERS:
        node = _lexical(config, config.content.get(key))
        if node is not None and not _off(config, node):
            seen.add(id(node))
            yield node, key
    for key in HANDLERS:
        node = _lexical(config, _at(config.content, key))
        for index, entry in enumerate(node if isinstance(node, list) else [node]):
            item = _lexical(config, entry)
            if id(item) in seen:
                continue
            seen.add(id(item))
            target = str(item.get("_target_", "")) if isinstance(item, dict) else str(item)
            text = isinstance(item, str) and _BY_HAND.search(item) is not None
            if text or (target.rpartition(".")[2] == "CheckpointLoader" and not _off(config, item)):
                yield item, f"{key}::{index}"


def _at(content: Any, key: str) -> Any:
    for part in key.split("::"):
        content = content.get(part) if isinstance(content, dict) else None
    return content


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
    if not isinstance(node, dict):
        path, _, problem = _file(config, node, key)
        return Named(path, UNKNOWN if problem else None, problem)
    path, _, problem = _file(config, node.get("load_path"), f"{key}::load_path")
    return Named(path, _part(config, node.get("load_dict")), problem)


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
        whole = _PAIRS.fullmatch(node)
        node = dict(re.findall(_ENTRY, node)) if whole is not None else None
    if not isinstance(node, dict) or not node:
        return UNKNOWN
    if len(node) == 1:
        return str(next(iter(node)))
    keys = [str(key) for key, value in node.items() if isinstance(value, str) and _NETWORK.search(value)]
    return keys[0] if len(keys) == 1 else UNKNOWN
