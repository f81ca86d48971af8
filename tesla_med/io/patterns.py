"""Name patterns of a site: which files match, and which case they belong to."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import NamedTuple

from tesla_med.errors import ConfigError
from tesla_med.io.names import fold
from tesla_med.io.volumes import stem

NOT_READ = frozenset(
    (
        ".dcm",
        ".ima",
        ".img",
        ".hdr",
        ".mgz",
        ".png",
        ".jpg",
        ".jpeg",
        ".tif",
        ".tiff",
        ".npy",
        ".npz",
        ".h5",
        ".mat",
    )
)
"""Extensions of formats that hold images or masks, but are not read as volumes."""


class Match(NamedTuple):
    """Where a file that matches a pattern belongs; files of one case agree in both.

    Attributes:
        place: the folders above those of the pattern, and what the wildcards in its folders stand for.
        key: the case key.
    """

    place: tuple[str, ...]
    key: str

    def __str__(self) -> str:
        """Return both in words."""
        return f"folder {'/'.join(self.place) or '.'}, key {self.key or '(none)'}"


class NamePattern:
    """A glob for file names; its extension stands for every format that can be read.

    The case key is the name up to where the last ``*`` ends: ``Case*.nii.gz`` and
    ``*_segmentation.nii.gz`` share the key ``case07`` for the files of Case07. A pattern
    without ``*`` names one file a folder and has the empty key.

    A pattern may hold folders, the last ones of a path: ``imagesTr/*.nii.gz``, ``sub-*/anat/*_T2w.nii.gz``.

    Raises:
        ConfigError: a bracket expression that makes no sense, or a path that no file below a folder has.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        *folders, name = fold(text).removeprefix("./").removeprefix("**/").split("/")
        if "\\" in text or not name or any(part in ("", ".", "..", "**") or ":" in part for part in folders):
            raise ConfigError(
                f"file name pattern {text!r} can never match: write names of folders and of a file with / "
                "between them, as in imagesTr/*.nii.gz; a place of its own is the 'root' of a mask"
            )
        parts = [_translate(part) for part in _tokens(stem(name))]
        last = max((index for index, part in enumerate(parts) if part == ".*"), default=-1)
        try:
            self._regex = re.compile(f"({''.join(parts[: last + 1])}){''.join(parts[last + 1 :])}", re.DOTALL)
            self._folders = [_folder_pattern(folder) for folder in folders]
        except re.error as error:
            raise ConfigError(f"file name pattern {text!r} cannot be understood: {error}") from None

    def match(self, relative: PurePath) -> Match | None:
        """Return where a file belongs, given its path below the folder that is searched, or None."""
        above = [fold(part) for part in relative.parts[:-1]]
        name = self._regex.fullmatch(fold(stem(Path(relative))))
        split = len(above) - len(self._folders)
        if name is None or split < 0:
            return None
        place = above[:split]
        for pattern, folder in zip(self._folders, above[split:], strict=True):
            found = pattern.fullmatch(folder)
            if found is None:
                return None
            if pattern.groups:
                place.append("".join(found.groups()))
        return Match(tuple(place), name.group(1))

    def name(self, relative: PurePath) -> str:
        """Return the name of the case of an image: its path, without extension and fixed folders.

        Fixed are the folders that the pattern spells out: ``imagesTr/*.nii.gz`` makes ``p_00`` of
        ``imagesTr/p_00.nii.gz``.
        """
        above = relative.parts[:-1]
        split = len(above) - len(self._folders)
        pairs = zip(self._folders, above[split:], strict=True)
        kept = [*above[:split], *(folder for pattern, folder in pairs if pattern.groups)]
        return PurePath(*kept, stem(Path(relative))).as_posix()

    def subject(self, path: PurePath) -> str:
        """Return what the wildcards of the folders stand for in a path that matches, else its case key."""
        found = self.match(path)
        assert found is not None  # noqa: S101 - the caller has asked
        own = found.place[len(path.parts) - 1 - len(self._folders) :]
        return "/".join(own) or found.key

    def unreadable(self) -> str:
        """Return the extension of the pattern if it is that of a format that is not read, or ``""``."""
        end = PurePath(self.text).suffix
        return end if end.lower() in NOT_READ else ""


def _folder_pattern(text: str) -> re.Pattern[str]:
    """Return a pattern for one folder, whose groups are its wildcards."""
    parts = (
        f"({_translate(item)})" if item in "*?" or len(item) > 1 else re.escape(item)
        for item in _tokens(text)
    )
    return re.compile("".join(parts), re.DOTALL)


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
