"""Parts of a bundle that MONAI makes by running the bundle's code, for folders that a user trusts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from tesla_med.config.bundle_config import BundleConfig, config_files
from tesla_med.config.trust import check_trusted
from tesla_med.errors import CheckpointError

log = logging.getLogger(__name__)
_SAID: set[Path] = set()
_ROOTS: set[Path] = set()
"""Bundles whose modules may have been imported."""
_ADDED: set[str] = set()
"""What was added to the path on which modules are found."""


def run_key(folder: str, part: str) -> Any:
    """Return what a part of a bundle stands for (see ``PARTS``), evaluated by MONAI.

    Raises:
        CheckpointError: the folder is not trusted, or evaluating the key fails.
    """
    path = check_trusted(folder)
    from monai.bundle import ConfigParser

    if path not in _SAID:
        log.warning("%s: code of this bundle is run (--trust-code)", path)
        _SAID.add(path)
    metadata, inference = config_files(path)
    parser = ConfigParser()
    key, _ = BundleConfig(path).place(part) or (part, None)
    root = str(path.resolve())
    _alone(path.resolve())
    try:
        parser.read_config(str(inference))
        parser.read_meta(str(metadata))
        parser["bundle_root"] = root
        return parser.get_parsed_content(key)
    except Exception as error:  # whatever the bundle's code raises
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{inference}: {key} cannot be evaluated by MONAI: {reason[0]}") from error


def _alone(root: Path) -> None:
    """Let a bundle's own modules, ``scripts.NAME``, be found, and none of another bundle's in their place."""
    others = _ROOTS - {root}
    _ROOTS.clear()
    _ROOTS.add(root)
    sys.path[:] = [entry for entry in sys.path if entry not in _ADDED - {str(root)}]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("__main__", "tesla_med") and _lies_in(module, others):
            del sys.modules[name]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
        _ADDED.add(str(root))


def _lies_in(module: object, roots: set[Path]) -> bool:
    """Return whether a module belongs to one of these folders, and is not installed in one."""
    held = [getattr(module, "__file__", None), *_folders(module)]
    paths = [Path(item) for item in held if isinstance(item, str)]
    installed = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    return any(
        root in path.parents
        and "site-packages" not in path.parts
        and not any(prefix in path.parents and root in prefix.parents for prefix in installed)
        for path in paths
        for root in roots
    )


def _folders(module: object) -> list[str]:
    """Return the folders of a package; a namespace package has no file."""
    try:
        return [str(item) for item in getattr(module, "__path__", ())]
    except (TypeError, KeyError, AttributeError):  # modules that make their parts on demand
        return []
