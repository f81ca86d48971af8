"""Hold an output folder for one run."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tesla_med.errors import OutputError
from tesla_med.io.files import TEMPORARY

log = logging.getLogger(__name__)
LOCK_NAME = ".tesla-med.lock"
LOCK_FILE_NAME = ".tesla-med.lock-file"
"""Stands for a lock where the file system has none."""
LOCK_NAMES = (LOCK_NAME, LOCK_FILE_NAME)
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, 524}  # 524: ENOTSUPP of the kernel, as on NFS


@contextmanager
def output_lock(folder: Path, wanted: bool = True) -> Iterator[None]:
    """Hold ``folder`` for one run; the folder is created if missing. Nothing is done unless it is ``wanted``.

    The lock goes with the process, so a run that was killed leaves none behind. Where the file system has no
    locks, a file takes their place, which a run that was killed may leave behind. What such a run was writing
    directly in the folder is removed.

    Raises:
        OutputError: another run holds the folder, or it cannot be written.
    """
    from filelock import Timeout

    if not wanted:
        yield
        return
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquired(folder)
    except Timeout as error:
        left = folder / LOCK_FILE_NAME
        stale = (
            f"; where none is, remove {left}, which a killed run left"
            if left == Path(error.lock_file)
            else ""
        )
        raise OutputError(
            f"{folder}: another run is writing here; wait for it to end or choose another output folder"
            f"{stale}"
        ) from None
    except (OSError, NotImplementedError) as error:
        raise OutputError(f"{folder}: the output folder cannot be locked for writing: {error}") from error
    try:
        for left in folder.glob(f"{TEMPORARY}*"):
            with suppress(OSError):
                left.unlink()
        yield
    finally:
        lock.release()


def in_folder(folder: Path) -> list[Path]:
    """Return what an output folder holds beside a lock and half-written files; nothing if there is none."""
    there = folder.iterdir() if folder.is_dir() else ()
    return [item for item in there if item.name not in LOCK_NAMES and not item.name.startswith(TEMPORARY)]


def system_lock(path: Path, timeout: float = 0.0) -> Any:
    """Return the system's lock on a file, held, or None where its file system has no locks.

    Args:
        path: the file of the lock.
        timeout: seconds to wait for whoever holds it.

    Raises:
        filelock.Timeout: it is still held.
        OSError: the file cannot be written.
    """
    from filelock import FileLock

    lock = FileLock(str(path), timeout=timeout)
    try:
        lock.acquire()
        return lock
    except (OSError, NotImplementedError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_LOCKS:
            raise
    return None


def file_as_lock(path: Path, timeout: float = 0.0) -> Any:
    """Return a file that stands for a lock, held; arguments and errors as of :func:`system_lock`."""
    from filelock import SoftFileLock

    lock = SoftFileLock(str(path), timeout=timeout)
    lock.acquire()
    return lock


def _acquired(folder: Path) -> Any:
    """Return a lock that is held: the system's, or a file where its file system has none."""
    lock = system_lock(folder / LOCK_NAME)
    if lock is not None:
        return lock
    log.warning(
        "the file system of the output folder has no locks: while a run is active the file %s takes their "
        "place, which does not see runs of machines that have locks there",
        LOCK_FILE_NAME,
    )
    return file_as_lock(folder / LOCK_FILE_NAME)
