"""What the items of a site are made of: every file that they are read from, by content."""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tesla_med.errors import DataError
from tesla_med.io.files import sha256, write_json
from tesla_med.types import Items, Progress

READERS = 8
"""Files that are hashed at a time."""
DETACHED = (".mhd", ".nhdr", ".hdr", ".img")
"""Headers, and images, whose other half lies beside them under the same name."""


class Hashes:
    """SHA-256 of files by path, size and time of change, kept in a file so that none is read twice.

    Args:
        path: the file; what cannot be read of it is hashed again. None: kept in memory alone.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.known: dict[str, list[Any]] = {}
        self.changed = False
        if path is None:
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            self.known = content if isinstance(content, dict) else {}
        except (OSError, ValueError):
            pass

    def of(self, path: Path) -> str:
        """Return the hash of a file; "unreadable" where it cannot be read, as runs name such an item."""
        try:
            state = path.stat()
            key, stamp = str(path.absolute()), [state.st_size, state.st_mtime_ns]
            kept = self.known.get(key)
            if isinstance(kept, list) and len(kept) == 3 and kept[:2] == stamp:
                return str(kept[2])
            digest = sha256(path)
        except (OSError, DataError):
            return "unreadable"
        self.known[key] = [*stamp, digest]
        self.changed = True
        return digest

    def save(self) -> None:
        """Write what was learned.

        Raises:
            OutputError: the file cannot be written.
        """
        if self.changed and self.path is not None:
            write_json(self.path, self.known)
            self.changed = False


def digest_of_items(items: Items, hashes: Hashes, progress: Progress, name: str) -> str:
    """Return one hash of the names of all items and of the content of every file that they are read from.

    Args:
        items: of a site.
        hashes: of files.
        progress: called with the files that are done.
        name: of the site.
    """
    files = sorted(set(_files(items.content)))
    digest = hashlib.sha256("\n".join(items.names).encode("utf-8", errors="surrogateescape"))
    stage = f"files of site {name}"
    with ThreadPoolExecutor(READERS) as pool:
        for count, (path, of) in enumerate(zip(files, pool.map(hashes.of, files), strict=True)):
            progress(stage, count, len(files))
            relative = Path(os.path.relpath(path, items.folder)).as_posix()
            digest.update(f"{relative} {of}\n".encode("utf-8", errors="surrogateescape"))
    progress(stage, len(files), len(files))
    return digest.hexdigest()


def _files(content: Any) -> Iterator[Path]:
    """Yield every file that a task's record of its items names; of a folder, such as a series, its files."""
    if isinstance(content, Path):
        if content.is_dir():
            yield from (path for path in content.iterdir() if path.is_file())
            return
        yield content
        if content.suffix.lower() in DETACHED:
            beside = content.parent.glob(f"{glob.escape(content.stem)}.*")
            yield from (path for path in beside if path.is_file())
    elif dataclasses.is_dataclass(content):
        for field in dataclasses.fields(content):
            if field.name != "folder":  # what names are relative to
                yield from _files(getattr(content, field.name))
    elif isinstance(content, Mapping):
        yield from _files(list(content.values()))
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _files(item)
