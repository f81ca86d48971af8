"""What was done so far, one small file per case, and the table of all of it.

A file is written when everything else of its case is complete, so a case without one is taken up again: what
a killed attempt left in the case's run is gone on with. Nothing else has to be remembered.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tesla_med.errors import OutputError
from tesla_med.io.files import TEMPORARY, write_json, write_text
from tesla_med.io.locks import in_folder
from tesla_med.io.tables import to_csv
from tesla_med.records import CaseResult, OfMask
from tesla_med.runs.folder import changed_settings
from tesla_med.types import Status, Used

CASES, DONE, SETTINGS, TABLE, PAGE, BOARD = (
    *("cases", ".done", "watch.json", "history.csv", "watch.html"),
    "tensorboard",
)
WHERE = "where"
"""Names the folder that is looked through, in the settings."""
OWN = (CASES, DONE, SETTINGS, TABLE, PAGE, BOARD)
"""What lies in the output folder of ``watch``."""


class Seen(OfMask):
    """One case that is done.

    Attributes:
        number: of the case in the order in which they were done, from 0.
        case: its name.
        done: when, UTC, ISO 8601.
        state: of its files; see :func:`tesla_med.watch.inbox.state_of`.
        input_sha256: of its image.
        status: as in the record of the run.
        used: which model made the mask; None where the case failed.
        trusted: whether the guard trusts the mask; None where there is none.
        reason: of the guard, in words.
        seconds: that the run took.
        predicted_dice: mean over the classes, without labels; None where none is predicted.
        dice: mean over the classes; None without a reference.
        statistics: of the image, by name; see :func:`tesla_med.watch.statistics.image_statistics`.
        notes: remarks on the case.
    """

    number: int
    case: str
    done: str
    state: str
    input_sha256: str
    status: Status
    used: Used | None
    trusted: bool | None = True
    reason: str = ""
    seconds: float = 0.0
    predicted_dice: float | None = None
    dice: float | None = None
    statistics: dict[str, float] = {}
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """What became of the case, in a word or two."""
        if self.trusted is False:
            return "not trusted"
        return self.used or "" if self.status == "ok" else self.status


@dataclass(frozen=True)
class History:
    """The output folder of ``watch``.

    Args:
        out: the folder.
    """

    out: Path

    def run(self, name: str) -> Path:
        """Return the output folder of the run on a case."""
        return self.out / CASES / name

    def done(self, name: str) -> Path:
        """Return the file that says what became of a case."""
        return self.out / DONE / f"{name}.json"

    def open(self, settings: dict[str, Any], about: dict[str, Any]) -> None:
        """Make the folder ready, and keep what cases are done with.

        Args:
            settings: that decide what the results are; they stay the same over the life of the folder.
            about: what else a reader may want to know.

        Raises:
            OutputError: the folder holds something else or was begun with other settings, or cannot be
                written.
        """
        path, where = self.out / SETTINGS, {}
        if not path.is_file():
            if others := sorted(item.name for item in in_folder(self.out) if item.name not in OWN):
                raise OutputError(
                    f"{self.out}: holds files that are not of tesla-med watch ({', '.join(others[:5])}); "
                    "choose another --out"
                )
        else:
            content = self._content()
            where = {key: content[key] for key in (WHERE,) if key in content}
            if changed := changed_settings(content["settings"], settings):
                raise OutputError(
                    f"{self.out}: not gone on with, its settings differ ({'; '.join(changed)}); "
                    "use the same, or another --out"
                )
        write_json(path, {**about, **where, "settings": settings})

    def _content(self) -> dict[str, Any]:
        """Return what is kept of the settings."""
        path = self.out / SETTINGS
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return {**content, "settings": content["settings"]}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OutputError(
                f"{path}: cannot be read ({error}); put it back or choose another --out"
            ) from None

    def where(self, watched: Path) -> Path | None:
        """Return the folder that was looked through in one of this name; None where none was.

        Raises:
            OutputError: the settings cannot be read.
        """
        known = self._content().get(WHERE)
        if not isinstance(known, dict) or known.get("watched") != watched.resolve().name:
            return None
        return watched / str(known.get("in_it", "."))

    def keep_where(self, watched: Path, top: Path) -> None:
        """Keep which folder is looked through, so that another call looks through the same.

        Raises:
            OutputError: the settings cannot be read or written.
        """
        known = {"watched": watched.resolve().name, "in_it": top.relative_to(watched).as_posix()}
        write_json(self.out / SETTINGS, self._content() | {WHERE: known})

    def read(self) -> list[Seen]:
        """Return every case that is done, in the order in which they were.

        Raises:
            OutputError: a file of this folder cannot be read.
        """
        found = []
        for path in (self.out / DONE).rglob("*.json"):
            if path.name.startswith(TEMPORARY):
                path.unlink(missing_ok=True)  # what a killed watch was writing; nobody else writes here
                continue
            try:
                found.append(Seen.model_validate_json(path.read_bytes()))
            except (OSError, ValidationError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is damaged"
                remedy = "put it back, or remove it and the case is looked at again"
                raise OutputError(f"{path}: cannot be read: {why}; {remedy}") from None
        return sorted(found, key=lambda item: (item.number, item.case))

    def keep(self, item: Seen) -> None:
        """Keep what became of a case.

        Raises:
            OutputError: it cannot be written.
        """
        write_json(self.done(item.case), item.model_dump(mode="json"))

    def write_table(self, seen: Sequence[Seen]) -> Path:
        """Write ``history.csv``, one row per case.

        Raises:
            OutputError: it cannot be written.
        """
        from tesla_med.watch.statistics import NAMES

        rows = [
            {
                **item.model_dump(include=set(COLUMNS)),
                "run": self.run(item.case).relative_to(self.out).as_posix(),
            }
            | {name: item.statistics.get(name) for name in NAMES}
            for item in seen
        ]
        write_text(self.out / TABLE, to_csv((*COLUMNS, "run", *NAMES), rows))
        return self.out / TABLE


COLUMNS = (
    *("number", "case", "done", "status", "used", "trusted", "predicted_dice", "dice", "seconds"),
    *("reason", "input_sha256"),
)


def seen_of(number: int, state: str, done: str, record: CaseResult, statistics: dict[str, float]) -> Seen:
    """Return what is kept of a finished run on one case."""
    return Seen(
        number=number,
        case=record.case,
        done=done,
        state=state,
        input_sha256=record.input_sha256,
        status=record.status,
        used=record.used,
        trusted=record.trusted,
        reason=record.reason,
        seconds=round(record.seconds, 3),
        predicted_dice=record.predicted_dice,
        dice=record.mean_dice,
        statistics=statistics,
        notes=record.notes,
    )
