"""Name patterns of a site: which files match, and which case they belong to."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

from tesla_med.errors import ConfigError
from tesla_med.io.volumes import stem


def fold(name: str) -> str:
    """Return ``name`` in the form in which names are compared: no case, composed accents."""
    return unicodedata.normalize("NFC", name).casefold()


class NamePattern:
    """A glob for file names; its extension stands for every format that can be read.

    The case key is the name up to where the last ``*`` ends: ``Case*.nii.gz`` and
    ``*_segmentation.nii.gz`` share the key ``case07`` for the files of Case07. A pattern
    without ``*`` names one file a folder and has the empty key.

    Raises:
        ConfigError: a bracket expression that makes no sense.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        parts = [_translate(part) for part in _tokens(fold(stem(text)))]
        last = max((index for index, part in enumerate(parts) if part == ".*"), default=-1)
        try:
            self._regex = re.compile(f"({''.join(parts[: last + 1])}){''.join(parts[last + 1 :])}", re.DOTALL)
        except re.error as error:
            raise ConfigError(f"file name pattern {text!r} cannot be understood: {error}") from None

    def key(self, path: Path) -> str | None:
        """Return the case key of a file whose name matches, or None."""
        match = self._regex.fullmatch(fold(stem(path)))
        return match.group(1) if match else None


def _tokens(text: str) -> list[str]:
    """Split a glob into ``*``, ``?``, ``[...]`` and single characters."""
    return re.findall(r"\*|\?|\[!?\]?[^\]]*\]|.", text, re.DOTALL)


def _translate(part: str) -> str:
    if part in ("*", "?"):
        return ".*" if part == "*" else "."
    if len(part) == 1:
        return re.escape(part)
    inside = re.sub(r"([\\\[\]^&~|])", r"\\\1", part[1:-1])
    return f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
