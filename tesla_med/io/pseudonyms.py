"""Pseudonyms of cases, and the key file that says which is which.

A key file is a table that grows: a case of a site keeps its pseudonym in every command that is given the
same file. New pseudonyms are dealt out at random, so that neither number nor order says anything of a name.
"""

from __future__ import annotations

import csv
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

from tesla_med.errors import ConfigError, DataError, OutputError
from tesla_med.io.dicom import header_texts
from tesla_med.io.files import atomic_path
from tesla_med.io.locks import file_as_lock, system_lock
from tesla_med.types import Case

KEY_ALONE = "--key means nothing without --anonymise; give both, or leave it out"
WAIT = 10.0
"""Seconds that another command may hold the file."""
WITHHELD = "[withheld]"
PATTERN = re.compile(r"case-\d{4,}")
"""What a pseudonym looks like."""


@dataclass(frozen=True)
class Entry:
    """One case.

    Attributes:
        site: id of its site; "" where none is known.
        case: its name.
        pseudonym: ``case-0001`` and so on.
        secret: drawn for this case; identifiers that must stay consistent are made from it.
    """

    site: str
    case: str
    pseudonym: str
    secret: str


COLUMNS = tuple(item.name for item in fields(Entry))


def default_key() -> Path:
    """Return the key file of this user, apart from every output folder.

    Raises:
        ConfigError: the user has no home folder.
    """
    try:
        return Path.home() / ".tesla-med" / "pseudonyms.csv"
    except RuntimeError:
        raise ConfigError("no home folder is known for a key file; give one with --key FILE") from None


class KeyFile:
    """A key file in memory; new entries are on disk once :meth:`save` was called.

    Args:
        path: the file; None: that of this user. One that is not there yet has no entries.
        outside: output folders that are handed on, in which it must not lie.

    Raises:
        ConfigError: it lies in one of these folders.
        DataError: it is no key file.
    """

    def __init__(self, path: Path | None = None, outside: Sequence[Path] = ()) -> None:
        self.path = default_key() if path is None else Path(path)
        for folder in outside:
            if self.path.resolve().is_relative_to(folder.resolve()):
                raise ConfigError(
                    f"--key {self.path} lies in the output folder {folder}, which would be handed on with "
                    "it; choose a place apart"
                )
        self.entries = _read(self.path)
        self._new: list[Entry] = []
        self._settled: dict[str, Entry] = {}

    def find(self, site: str, case: str) -> Entry | None:
        """Return the entry of a case of a site, or of one whose site was not known when it got its own.

        With an unknown site ("") it is that of the only case of this name.

        Raises:
            DataError: several sites have a case of this name.
        """
        known = [item for item in self.entries if item.case == case]
        for wanted in (site, ""):
            if exact := [item for item in known if item.site == wanted]:
                return exact[0]
        if site == "" and len(known) > 1:
            where = ", ".join(item.site for item in known)
            raise DataError(
                f"{self.path}: case {case} is known of several sites ({where}); give the output folder of "
                "the run, which names its site"
            )
        return known[0] if known and site == "" else None

    def assign(self, site: str, cases: Iterable[str]) -> dict[str, Entry]:
        """Return the entries of cases by name; those that are new get theirs in random order.

        None gets what is the name of another.
        """
        names = list(cases)
        found = {name: self.find(site, name) for name in names}
        for name, entry in found.items():
            if entry is not None and site and not entry.site:
                found[name] = self._settle(entry, site)
        new = [name for name in names if found[name] is None]
        secrets.SystemRandom().shuffle(new)
        last = max((int(item.pseudonym.rpartition("-")[2]) for item in self.entries), default=0)
        taken = {*names, *(item.case for item in self.entries)}
        free = (text for number in count(last + 1) if (text := f"case-{number:04d}") not in taken)
        for name, pseudonym in zip(new, free, strict=False):
            entry = Entry(site, name, pseudonym, secrets.token_hex(16))
            found[name] = entry
            self._new.append(entry)
            self.entries.append(entry)
        return {name: entry for name, entry in found.items() if entry is not None}

    def _settle(self, entry: Entry, site: str) -> Entry:
        """Return an entry of no site as one of the site that its case is of, as is now known."""
        settled = replace(entry, site=site)
        self.entries[self.entries.index(entry)] = settled
        if entry in self._new:
            self._new[self._new.index(entry)] = settled
        else:
            self._settled[entry.pseudonym] = settled
        return settled

    def of_pseudonym(self, pseudonym: str) -> Entry | None:
        """Return the entry that a pseudonym stands for, if there is one."""
        return next((item for item in self.entries if item.pseudonym == pseudonym), None)

    def save(self) -> None:
        """Add the new entries to the file, which only its owner may read.

        Raises:
            OutputError: it cannot be written, or another command has dealt out the same pseudonyms.
        """
        if not self._new and not self._settled:
            with suppress(OSError):
                self.path.chmod(0o600)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise OutputError(f"{self.path}: the key file cannot be written: {error.strerror}") from None
        with _held(self.path):
            there = _read(self.path)
            taken = {item.pseudonym for item in there} | {(item.site, item.case) for item in there}
            if any(item.pseudonym in taken or (item.site, item.case) in taken for item in self._new):
                raise OutputError(
                    f"{self.path}: another command has added to the key file meanwhile; run this one again"
                )
            with atomic_path(self.path) as temporary:
                handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "w", newline="", encoding="utf-8", errors="surrogateescape") as stream:
                    writer = csv.DictWriter(stream, COLUMNS)
                    writer.writeheader()
                    kept = (self._settled.get(item.pseudonym, item) for item in there)
                    writer.writerows(asdict(item) for item in (*kept, *self._new))
        self._new.clear()
        self._settled.clear()


def _read(path: Path) -> list[Entry]:
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as stream:
            rows: list[dict[str, Any]] = list(csv.DictReader(stream))
        entries = [Entry(**{name: row[name] for name in COLUMNS}) for row in rows]
        if not all(PATTERN.fullmatch(item.pseudonym) for item in entries):
            raise ValueError("a pseudonym is not like case-0001")
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        columns = ", ".join(COLUMNS)
        raise DataError(
            f"{path}: cannot be read as a key file with the columns {columns} ({error}); choose another --key"
        ) from None
    return entries


@contextmanager
def _held(path: Path) -> Iterator[None]:
    from filelock import Timeout

    guard = path.with_name(f".{path.name}.lock")
    try:
        lock = system_lock(guard, WAIT) or file_as_lock(guard.with_suffix(".lock-file"), WAIT)
    except Timeout:
        raise OutputError(
            f"{path}: another command has been writing it for {WAIT:.0f} s; try again"
        ) from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be locked for writing: {error}") from None
    try:
        yield
    finally:
        lock.release()


class Renamer:
    """Replaces names of masks, and in texts also those of their files.

    Args:
        key: says which is which; names that it does not know are added, and it is saved.
        names: of masks, none of them a pseudonym.
        folders: that they lie in.
        site: that they are of; "" where none is known.
    """

    def __init__(self, key: KeyFile, names: Iterable[str], folders: Sequence[Path], site: str = "") -> None:
        self._entries = key.assign(site, dict.fromkeys(names))
        key.save()
        parts: dict[str, set[str]] = {}
        for name, entry in self._entries.items():
            for part in (name, *name.split("/")):
                parts.setdefault(part, set()).add(entry.pseudonym)
        self._table = _replacements(parts) | {str(folder): "[masks]" for folder in folders}
        self._known = _any_of(self._table, end=r"(?![^\W_])")

    def name(self, name: str) -> str:
        """Return the pseudonym of a name."""
        return self._entries[name].pseudonym

    def text(self, text: str) -> str:
        """Return a text without names."""
        return self._known.sub(lambda found: self._table[found[0]], text)


@dataclass(frozen=True)
class Pseudonyms:
    """The names of a run's cases, where they are replaced.

    Attributes:
        key: the file that says which is which.
        cleaner: takes names out of texts.
    """

    key: KeyFile
    cleaner: Cleaner


class Cleaner:
    """Takes the names of cases, of their files and folders, and what DICOM headers say, out of texts.

    Args:
        cases: of a run, under their own names.
        entries: pseudonym of each by name.
        folder: that the names are relative to.
    """

    def __init__(self, cases: Sequence[Case], entries: Mapping[str, Entry], folder: Path) -> None:
        self._cases = {entries[case.name].pseudonym: case for case in cases}
        whole: dict[str, str] = {str(folder): "[images]", str(folder.resolve()): "[images]"}
        parts: dict[str, set[str]] = {}
        for pseudonym, case in self._cases.items():
            others = (*case.channels, *case.masks, case.region_mask)
            for path in (case.image, *(path for path in others if path is not None)):
                whole |= dict.fromkeys((str(path), str(path.resolve())), pseudonym)
                inside = path.relative_to(folder).parts if path.is_relative_to(folder) else (path.name,)
                for part in (*inside, *(item.split(".")[0] for item in inside)):
                    parts.setdefault(part, set()).add(pseudonym)
            for part in (case.name, *case.name.split("/")):
                parts.setdefault(part, set()).add(pseudonym)
        self._table = _replacements(parts) | whole
        self._known = _any_of(self._table)

    def text(self, text: str, more: Iterable[str] = ()) -> str:
        """Return a text without names; ``more``: further words that must not stand in it."""
        cleaned = self._known.sub(lambda found: self._table[found[0]], text)
        words = [word for word in more if word]
        return _any_of(words).sub(WITHHELD, cleaned) if words else cleaned

    def record(self, record: Any) -> Any:
        """Return the record of a case, its reason and notes without names."""
        texts = (record.reason, *record.notes)
        if not any(texts):
            return record
        case = self._cases[record.case]
        words = header_texts(case.image) if case.image.is_dir() else ()
        reason, *notes = (self.text(text, words) for text in texts)
        return record.model_copy(update={"reason": reason, "notes": tuple(notes)})


def _replacements(parts: Mapping[str, set[str]]) -> dict[str, str]:
    """Return what each part of a name is replaced by: the pseudonym of its owner, unless it has several."""
    return {text: min(owners) if len(owners) == 1 else WITHHELD for text, owners in parts.items()}


def _any_of(texts: Iterable[str], end: str = r"(?!\w)") -> re.Pattern[str]:
    """Return a pattern of any of these as a whole word, the longest first; ``end``: what ends a word.

    A name that is a number is no part of a decimal fraction.
    """
    ordered = sorted({text for text in texts if text}, key=len, reverse=True)
    words = [rf"(?<!\d\.){text}(?!\.\d)" if text.isdigit() else re.escape(text) for text in ordered]
    return re.compile(rf"(?<!\w)(?:{'|'.join(words)}){end}" if words else r"(?!)")
