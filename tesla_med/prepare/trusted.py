"""Parts of a bundle that MONAI makes by running the bundle's code, for folders that a user trusts."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from tesla_med.config.bundle_files import config_files
from tesla_med.config.trust import check_trusted
from tesla_med.errors import CheckpointError

log = logging.getLogger(__name__)
_SAID: set[Path] = set()


def run_key(folder: str, *keys: str) -> Any:
    """Return what the first of these keys in a bundle's configuration stands for, evaluated by MONAI.

    Raises:
        CheckpointError: the folder is not trusted, or evaluating the key fails.
    """
    path = check_trusted(folder)
    from monai.bundle import ConfigParser

    if path not in _SAID:
        log.warning("%s: code of this bundle is run (--trust-code)", path)
        _SAID.add(path)
    metadata, inference = config_files(path)
    parser, key = ConfigParser(), keys[-1]
    root = str(path.resolve())
    if root not in sys.path:  # where a bundle's own modules, ``scripts.NAME``, are found
        sys.path.insert(0, root)
    try:
        parser.read_config(str(inference))
        parser.read_meta(str(metadata))
        parser["bundle_root"] = root
        key = next((name for name in keys if name in parser), key)
        return parser.get_parsed_content(key)
    except Exception as error:  # whatever the bundle's code raises
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"{inference}: {key} cannot be evaluated by MONAI: {reason[0]}") from error
