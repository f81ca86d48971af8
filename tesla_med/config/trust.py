"""Which folders may have their own code run: those that a user named together with ``--trust-code``.

What a card or a pipeline says cannot bring a folder here.
"""

from __future__ import annotations

from pathlib import Path

from tesla_med.errors import CheckpointError

_TRUSTED: set[Path] = set()


def trust(folder: Path, *, given: bool = True) -> None:
    """Let the code of a folder be run in this process, or no longer where trust is not ``given`` again."""
    if given:
        _TRUSTED.add(folder.resolve())
    else:
        _TRUSTED.discard(folder.resolve())


def check_trusted(folder: str | Path) -> Path:
    """Return a folder whose code may be run.

    Raises:
        CheckpointError: nobody said so, or it is not there.
    """
    path = Path(folder)
    if path.resolve() not in _TRUSTED:
        raise CheckpointError(
            f"{path}: the model needs the code of this bundle; --trust-code lets MONAI run it, if you trust "
            "those who made it"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path}: the bundle whose code the model needs is not there any more")
    return path
