"""State of a run whose cases depend on each other, kept so that a killed run goes on where it was.

A cursor says what is done and names the file that holds the method's state at that point. The state is
written first, under a new name, then the cursor, then older states go: whenever a run is killed, the
cursor and the state it names belong together.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tesla_med.io.files import atomic_path

CURSOR = "cursor.pt"


def copied_to_host(state: Any) -> Any:
    """Return nested mappings and sequences with every tensor on the CPU."""
    import torch

    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, Mapping):
        return {key: copied_to_host(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied_to_host(value) for value in state)
    return state


@dataclass(frozen=True)
class Saved:
    """What was kept: see :meth:`StateStore.save`."""

    cursor: dict[str, Any]
    state: dict[str, Any]


@dataclass(frozen=True)
class StateStore:
    """The folder that holds cursor and state."""

    folder: Path

    def save(self, cursor: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> None:
        """Keep a cursor, and with it a new state or the one kept before.

        Args:
            cursor: numbers, texts, tensors, lists and dicts.
            state: of the method; None where it is the one of the last call that gave one.

        Raises:
            OutputError: it cannot be written.
        """
        number = self._number()
        if state is not None:
            number += 1
            self._write(self._state(number), dict(state))
        self._write(self.folder / CURSOR, {"number": number, "cursor": dict(cursor)})
        if state is not None:
            for path in self.folder.glob("state-*.pt"):
                if path != self._state(number):
                    with suppress(OSError):
                        path.unlink()

    def load(self) -> Saved | None:
        """Return what was kept last, or None where there is nothing that can be read."""
        content = self._read(self.folder / CURSOR)
        state = self._read(self._state(content["number"])) if content is not None else None
        return Saved(content["cursor"], state) if content is not None and state is not None else None

    def clear(self) -> None:
        """Remove everything."""
        for path in [*self.folder.glob("state-*.pt"), self.folder / CURSOR]:
            with suppress(OSError):
                path.unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _number(self) -> int:
        content = self._read(self.folder / CURSOR)
        return int(content["number"]) if content is not None else 0

    def _state(self, number: int) -> Path:
        return self.folder / f"state-{number}.pt"

    def _write(self, path: Path, content: dict[str, Any]) -> None:
        import torch

        with atomic_path(path) as temporary, temporary.open("wb") as stream:
            torch.save(content, stream)  # a stream, not a name, which would be written into the file

    def _read(self, path: Path) -> dict[str, Any] | None:
        import torch

        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
            return None
        return content if isinstance(content, dict) else None
