"""What reviewers decided on the masks of a run, in ``review.csv`` beside them.

Every decision is a row of its own that is never changed, so that two reviewers cannot overwrite each other
and nothing is lost. The last row of a reviewer counts. A row names the mask that it was made on by its hash:
after a rollback or another run it counts no more.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from tesla_med.errors import DataError, OutputError
from tesla_med.io.files import atomic_path
from tesla_med.io.locks import file_as_lock, system_lock

REVIEW = "review.csv"
WAIT = 10.0
"""Seconds that another reviewer may hold the file."""
Choice = Literal["accept", "reject", "source", "edit"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
IN_WORDS = {
    "accept": "accepted",
    "reject": "rejected",
    "source": "the source's mask to be taken instead",
    "edit": "needs editing",
}


@dataclass(frozen=True)
class Decision:
    """One decision of one reviewer on one mask.

    Attributes:
        case: name.
        decision: one of ``CHOICES``.
        comment: free text.
        reviewer: name.
        time: of the decision, UTC, ISO 8601.
        mask_sha256: of the file of the mask.
    """

    case: str
    decision: Choice
    comment: str
    reviewer: str
    time: str
    mask_sha256: str


COLUMNS = tuple(item.name for item in fields(Decision))


def decided(case: str, decision: Choice, comment: str, reviewer: str, mask_sha256: str) -> Decision:
    """Return a decision made now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Decision(case, decision, comment, reviewer, now, mask_sha256)


def read_decisions(out: Path) -> list[Decision]:
    """Return all decisions on a run in the order in which they were made; none if there is no file.

    Raises:
        DataError: the file is not as it was written.
    """
    path = out / REVIEW
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8", errors="surrogateescape") as stream:
            reader = csv.DictReader(stream)
            told: list[dict[str, Any]] = [{name: row[name] for name in COLUMNS} for row in reader]
            if list(reader.fieldnames or ()) != list(COLUMNS):
                raise ValueError(f"found {', '.join(reader.fieldnames or ())}")
        found = [Decision(**row) for row in told]
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        columns = ", ".join(COLUMNS)
        raise DataError(f"{path}: cannot be read as decisions with the columns {columns} ({error})") from None
    for item in found:
        if item.decision not in CHOICES:
            raise DataError(
                f"{path}: decision {item.decision!r} on {item.case}; known are {', '.join(CHOICES)}"
            )
    return found


def save_decision(out: Path, decision: Decision) -> None:
    """Add a decision to those of a run, whoever else is adding some.

    Raises:
        OutputError: the file is held by somebody for longer than ``WAIT``, or cannot be written.
        DataError: what is there cannot be read; it is left as it is.
    """
    from filelock import Timeout

    path, guard = out / REVIEW, out / f".{REVIEW}.lock"
    try:
        lock = system_lock(guard, WAIT) or file_as_lock(guard.with_suffix(".lock-file"), WAIT)
    except Timeout:
        text = f"{path}: another reviewer has been writing it for {WAIT:.0f} s; try again"
        raise OutputError(text) from None
    except OSError as error:
        raise OutputError(f"{path}: cannot be locked for writing: {error}") from None
    try:
        rows = [*read_decisions(out), decision]
        with (
            atomic_path(path) as temporary,
            temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as stream,
        ):
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    finally:
        lock.release()


def standing(decisions: Iterable[Decision], case: str, mask_sha256: str) -> dict[str, Decision]:
    """Return the decision that counts of each reviewer on one mask."""
    return {
        item.reviewer: item for item in decisions if item.case == case and item.mask_sha256 == mask_sha256
    }


def outcome(found: Sequence[Decision]) -> tuple[Choice | None, str]:
    """Return what reviewers agree on, and where they do not or nobody decided, None and why."""
    if not found:
        return None, "not reviewed"
    if len({item.decision for item in found}) > 1:
        said = "; ".join(f"{item.reviewer}: {IN_WORDS[item.decision]}" for item in found)
        return None, f"reviewers disagree ({said})"
    return found[0].decision, f"{IN_WORDS[found[0].decision]} by {', '.join(item.reviewer for item in found)}"
