"""Go through a folder: the one rule by which every command finds files, and the order it takes them in."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from tesla_med.errors import DataError
from tesla_med.io.names import fold, natural

Skipped = tuple[Path, str]
RESULTS = "a folder of results"
EXPORT_FILE = "export.json"
"""What ``tesla-med export`` writes beside the masks."""


def walk(top: Path, foreign: Collection[str] = ()) -> tuple[list[Path], list[Skipped]]:
    """Return every file below ``top``, in natural order, and what was left out with the reason.

    Hidden files and folders, folders of results and ``foreign`` ones are left out. A link that leads
    nowhere is a file, so that whoever needs it says what is missing. Each real folder is read once,
    linked ones last: real folders name what is found.

    Args:
        top: a folder.
        foreign: folded names of folders below it that belong to something else.

    Raises:
        DataError: ``top`` cannot be listed.
    """
    files: list[Path] = []
    skipped: list[Skipped] = []
    seen: set[Path] = set()
    folders: list[Path] = [top]
    links: list[Path] = []
    while folders or links:
        folder = folders.pop() if folders else links.pop(0)
        real = folder.resolve()
        if real in seen:
            skipped.append((folder, "a link to a folder that was read already"))
            continue
        seen.add(real)
        try:
            entries = sorted(folder.iterdir(), key=natural, reverse=True)
        except OSError as error:
            if folder == top:
                raise DataError(f"{top}: cannot be listed: {error.strerror or error}") from error
            skipped.append((folder, f"cannot be listed: {error.strerror or error}"))
            continue
        for entry in entries:
            reason = left_out(entry, foreign)
            if reason:
                skipped.append((entry, reason))
            elif is_entry(entry):
                files.append(entry)
            else:
                (links if entry.is_symlink() else folders).append(entry)
    return sorted(files, key=natural), sorted(skipped, key=lambda item: natural(item[0]))


def is_entry(path: Path) -> bool:
    """Whether a path is a file, or a link that leads nowhere."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def left_out(entry: Path, foreign: Collection[str]) -> str:
    """Return why a file or folder is left out, or ``""``."""
    if entry.name.startswith("."):
        return "hidden"
    try:
        if is_entry(entry):
            return ""
        if not entry.is_dir():
            return "not a regular file"
        if fold(entry.name) in foreign:
            return "the folder of another site"
        return RESULTS if (entry / "run.json").is_file() else ""
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def exports_among(files: Iterable[Path]) -> frozenset[Path]:
    """Return the folders of those files into which ``tesla-med export`` has written."""
    return frozenset(path.parent for path in files if path.name == EXPORT_FILE and _is_record(path))


def _is_record(path: Path) -> bool:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "notice" in content and isinstance(content.get("files"), dict)


def listed(folder: Path, keep: Callable[[Path], bool] = Path.is_dir) -> list[Path]:
    """Return what lies directly in a folder and is kept, in natural order.

    Raises:
        DataError: the folder cannot be listed.
    """
    try:
        return sorted((item for item in folder.iterdir() if keep(item)), key=natural)
    except OSError as error:
        raise DataError(f"{folder}: cannot be listed: {error.strerror or error}") from error
