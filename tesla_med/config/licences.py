"""The terms that came with somebody else's model, for the notes of every run with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tesla_med.config.paths import leads_outside

LONGEST = 200
"""Characters that are repeated."""
_FILES = ("LICENSE", "LICENSE.txt", "LICENCE", "LICENCE.txt")
_FOLDERS = ("", "docs")
_LOWER = ("docs/license.txt",)


def terms_of(folder: Path, about: Mapping[str, Any], keys: Mapping[str, str], owner: str) -> list[str]:
    """Return what is said of the licence of a model.

    Args:
        folder: of the model; the first line of its licence file is repeated, unless a link leads out of it.
        about: what a file of the model says of it.
        keys: entries of that which are repeated, with what they are.
        owner: whose folder it is, for the note.
    """
    found = []
    for key, what in keys.items():
        held = about.get(key)
        if isinstance(held, str) and held.strip():
            found.append(f"{what} of the model: {_printed(held)}")
    names = [str(Path(part) / name) for part in _FOLDERS for name in _FILES] + list(_LOWER)
    for name in names:
        file = folder / name
        if file.is_file() and not leads_outside(file, folder):
            lines = [line.strip() for line in file.read_text("utf-8", errors="replace").splitlines()]
            text = next((line for line in lines if line), "")
            found.append(f"licence of the model ({name} of its {owner}): {_printed(text)}")
            break
    return found


def _printed(text: str) -> str:
    """Return the beginning of a text in one line, with nothing in it that a terminal would obey."""
    return "".join(item if item.isprintable() else " " for item in text.strip()[:LONGEST])
