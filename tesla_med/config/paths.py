"""What a user's path means: one rule for options, YAML files and arguments of functions."""

from __future__ import annotations

import os
from pathlib import Path

from tesla_med.errors import ConfigError


def user_path(path: str | Path) -> Path:
    """Return a path in which a leading ``~`` or ``~name`` stands for a home folder, as in a shell.

    ``./~`` stands for a file or folder of that name.

    Raises:
        ConfigError: the home folder is not known, and nothing of that name is there.
    """
    given = Path(path)
    if not given.parts or not given.parts[0].startswith("~"):
        return given
    if str(path).startswith(f".{os.sep}"):
        return given.absolute()  # so that the rule may be applied again
    expanded = os.path.expanduser(given)  # noqa: PTH111 - Path.expanduser raises where no home is known
    if expanded == str(given) and not given.exists():
        raise ConfigError(
            f"{given}: the home folder that {given.parts[0]} stands for is not known; set HOME, give the "
            f"full path, or write ./{given} for a file or folder of this name"
        )
    return Path(expanded)


def whole_path(path: Path) -> Path:
    """Return an absolute path without ``.`` and ``..``, whose last part is the name of the file or folder."""
    return Path(os.path.normpath(path.absolute()))


def leads_outside(path: Path, folder: Path) -> bool:
    """Return whether a path in a folder leads out of it, by a link."""
    return not path.resolve().is_relative_to(folder.resolve())
