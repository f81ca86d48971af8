"""What lies in a watched folder, and what of it is complete.

A file that is still being copied changes, or grows, or cannot be read yet. So a case is taken up when its
files have been the same, by size and time of change, for a while; whether they can be read is found out then.
The folder is looked through again and again (polled): network shares tell nobody of changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tesla_med.config.models import SiteConfig
from tesla_med.errors import DataError
from tesla_med.io.cases import beside, find_cases, site_folder
from tesla_med.io.dicom import check_count
from tesla_med.io.files import sha256_of
from tesla_med.io.matching import is_named_as_mask
from tesla_med.io.volumes import read_case
from tesla_med.types import Case, Volume
from tesla_med.watch.history import SETTINGS


@dataclass(frozen=True)
class Found:
    """A case that lies in the folder.

    Attributes:
        case: its files.
        top: folder that its names are relative to.
        state: tells its files from what they are when any of them changes; see :func:`state_of`.
        lone: whether it is named as the mask of an image that is not there.
    """

    case: Case
    top: Path
    state: str
    lone: bool = False


class Inbox:
    """A watched folder.

    Args:
        folder: to be looked through, with its sub-folders.
        site: gives the patterns of names.
        others: the other sites of the pipeline, whose files are left alone.
        channels: of the images.
        settle: seconds for which the files of a case must not have changed.

    Attributes:
        skipped: files and folders that the last look left out, with the reason.
        folder: as given.
        top: the folder that is looked through: the given one, or one in it that is named after the site.
            Looks keep to it from the first that finds that one or a case, whatever comes; None before.
        beside: what lies beside it and is not looked at.
    """

    def __init__(
        self, folder: Path, site: SiteConfig, others: Sequence[SiteConfig], channels: int, settle: float
    ) -> None:
        self.folder, self.settle = folder, settle
        self.skipped: tuple[tuple[Path, str], ...] = ()
        self.top: Path | None = None
        self.beside: tuple[Path, ...] = ()
        self._about = site, others, channels
        self._since: dict[str, tuple[str, float]] = {}

    def look(self, now: float) -> list[Found]:
        """Return every case that lies there, settled or not, in natural order of names.

        Args:
            now: seconds of a clock that never goes back.

        Raises:
            DataError: the folder is not there or cannot be listed.
            ConfigError: a pattern of the site can never match.
        """
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such folder; create or mount it, or give the one to watch")
        site, others, _ = self._about
        top = self.top or site_folder(self.folder, site)
        if not top.is_dir():
            raise DataError(f"{top}: no such folder any more; put it back, or begin another --out")
        listed = find_cases(self.folder, *self._about, each=True, within=top)
        unseen = [path for path in beside(top, self.folder, site, others) if not (path / SETTINGS).is_file()]
        self.top = top if listed.cases or top != self.folder else None  # a share may not be mounted yet
        self.beside = tuple(unseen)
        self.skipped = (
            *((path, f"beside {top.name}, the folder of the site") for path in unseen),
            *listed.skipped,
        )
        found = [self._found(case, top) for case in listed.cases]
        since = {}
        for item in found:
            state, first = self._since.get(item.case.name, ("", now))
            since[item.case.name] = (item.state, first if state == item.state else now)
        self._since = since
        return found

    def _found(self, case: Case, top: Path) -> Found:
        lone = case.image.is_file() and is_named_as_mask(case.image, self._about[0])
        return Found(case, top, state_of(case, top), lone)

    def settled(self, item: Found, now: float) -> bool:
        """Whether the files of a case that :meth:`look` returned have been as they are for long enough."""
        state, first = self._since[item.case.name]
        return state == item.state and now - first >= self.settle

    def read(self, item: Found) -> tuple[Volume, str]:
        """Read the image of a case whole, and return it with the hash of its files.

        Raises:
            DataError: it cannot be used, is truncated, or is not all there.
            GeometryError: its grid cannot be used.
        """
        if item.case.image.is_dir() and not item.case.problem:
            check_count(item.case.image, self._about[0].files.series)
        digest = sha256_of(item.case.files)
        return read_case(item.case, self._about[0]), digest

    def unchanged(self, item: Found) -> bool:
        """Whether the files of a case are still as they were found."""
        return state_of(item.case, item.top) == item.state


def state_of(case: Case, top: Path) -> str:
    """Return 64 hexadecimal digits that change with the size or the time of change of any file of a case.

    Files of its references and of its region count, and all files in a folder of DICOM slices. A file that
    is gone counts as such.
    """
    digest = hashlib.sha256()
    paths = [*case.files, *(path for path in (*case.masks, case.region_mask) if path is not None)]
    for path in paths:
        for item in _slices(path, deep=bool(case.problem)) if path.is_dir() else [path]:
            name = item.relative_to(top) if item.is_relative_to(top) else item
            try:
                found = item.stat()
                about = f"{found.st_size} {found.st_mtime_ns}"
            except OSError:
                about = "gone"
            digest.update(f"{name.as_posix()} {about}\n".encode("utf-8", "surrogateescape"))
    digest.update(case.problem.encode("utf-8", "backslashreplace"))
    return digest.hexdigest()


def _slices(folder: Path, *, deep: bool) -> list[Path]:
    """Return the files in a folder, with those below it where several folders make one case."""
    try:
        there = folder.rglob("*") if deep else folder.iterdir()
        return sorted(item for item in there if not item.name.startswith(".") and item.is_file())
    except OSError:
        return []
