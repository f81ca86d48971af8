"""One small registry: names to classes or functions, with clear errors."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from tesla_med.errors import ConfigError

T = TypeVar("T")
log = logging.getLogger(__name__)


class Registry(Generic[T]):
    """Map from a name to an object, filled by importing every module of a package.

    Args:
        kind: what one entry is called in messages, for example ``"method"``.
        package: dotted package whose modules register entries when imported; it is
            imported on first use, so that creating a registry costs nothing.
        entry_points: group of entry points by which other distributions add entries; each names a module
            or an object of one, and importing it registers.
    """

    def __init__(self, kind: str, package: str | None = None, entry_points: str | None = None) -> None:
        self.kind = kind
        self._package = package
        self._group = entry_points
        self._entries: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores its argument under ``name``.

        Raises:
            ConfigError: the name is taken.
        """

        def decorate(entry: T) -> T:
            if name in self._entries:
                raise ConfigError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return decorate

    def get(self, name: str) -> T:
        """Return the entry called ``name``.

        Raises:
            ConfigError: no such entry; the message lists the known names.
        """
        self._load()
        try:
            return self._entries[name]
        except KeyError:
            raise ConfigError(unknown_name(self.kind, name, self.names())) from None

    def names(self) -> list[str]:
        """Return every known name, sorted."""
        self._load()
        return sorted(self._entries)

    def items(self) -> Iterator[tuple[str, T]]:
        """Yield (name, entry) in name order."""
        for name in self.names():
            yield name, self._entries[name]

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        package = importlib.import_module(self._package) if self._package else None
        for module in pkgutil.iter_modules(package.__path__) if package else ():
            if not module.name.startswith("_"):
                importlib.import_module(f"{self._package}.{module.name}")
        for entry in importlib.metadata.entry_points(group=self._group) if self._group else ():
            try:
                entry.load()
            except Exception as error:  # what does not concern a run must not stop it
                log.warning("%s %r of %s cannot be loaded: %s", self.kind, entry.name, entry.value, error)


def unknown_name(kind: str, name: str, known: list[str]) -> str:
    """Return the message for an unknown name, with the closest known one suggested."""
    close = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(known) or 'none'}."
