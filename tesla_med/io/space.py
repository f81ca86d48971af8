"""Why a file could not be written, and how much space that would have taken."""

from __future__ import annotations

import errno
import shutil
from contextlib import suppress
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def unwritten(path: Path, error: OSError, needed: int | None) -> str:
    """Return why a file could not be written and what to do, in words.

    Args:
        path: the file.
        error: that came of it.
        needed: bytes to be written, if known.
    """
    text = f"{path}: cannot be written: {error.strerror or error}"
    if error.errno not in _FULL:
        return text + "; check that the folder exists and may be written to"
    parts = [f"{_size(needed)} needed"] if needed is not None else []
    with suppress(OSError):
        parts.append(f"{_size(shutil.disk_usage(path.parent).free)} free")
    return f"{text} ({', '.join(parts)}); free some space or choose another output folder"


def disk_is_full(error: Exception) -> bool:
    """Return whether a file could not be written for want of space."""
    return isinstance(cause := error.__cause__, OSError) and cause.errno in _FULL


def _size(count: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if count >= 0.95 * unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"
