"""How names are compared and put in order."""

from __future__ import annotations

import re
import unicodedata
from pathlib import PurePath


def fold(name: str) -> str:
    """Return ``name`` in the form in which names are compared: no case, composed accents."""
    return unicodedata.normalize("NFC", name).casefold()


def valid(name: str) -> str:
    """Return a name as valid text: bytes of a file name that are none become backslash escapes."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def natural(name: str | PurePath) -> tuple[object, ...]:
    """Return a key that sorts names as people do, folder by folder: P1, P2, P10, whatever their case."""
    parts = PurePath(name).parts
    return (tuple(_numbered(fold(part)) for part in parts), str(name))


def _numbered(text: str) -> tuple[object, ...]:
    """Return texts and numbers in turn."""
    return tuple(int(part) if index % 2 else part for index, part in enumerate(re.split(r"(\d+)", text)))
