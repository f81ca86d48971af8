"""What TensorBoard shows of a watched folder: one point per case, over its number and its time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tesla_med.watch.history import BOARD, Seen

VERDICTS = ("adapted", "partial", "source", "not trusted")
"""Curves of shares: of all cases so far those with this verdict."""


class Board:
    """The events of a watch. They are written anew at every start, from what is kept of the cases.

    Args:
        out: output folder of the watch.
        seen: cases that are done.
    """

    def __init__(self, out: Path, seen: Sequence[Seen]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = out / BOARD
        for path in folder.glob("events.out.tfevents.*"):
            path.unlink(missing_ok=True)
        self._writer: Any = SummaryWriter(str(folder))
        self._counts = dict.fromkeys(VERDICTS, 0)
        self._all = 0
        for item in seen:
            self._add(item)
        self._writer.flush()

    def add(self, item: Seen) -> None:
        """Write the points of a case that is done."""
        self._add(item)
        self._writer.flush()

    def _add(self, item: Seen) -> None:
        when = datetime.fromisoformat(item.done).timestamp()
        values = {f"image/{name}": value for name, value in item.statistics.items()}
        if item.predicted_dice is not None:
            values["dice/predicted"] = item.predicted_dice
        if item.dice is not None:
            values["dice/reference"] = item.dice
        self._all += 1
        if item.verdict in self._counts:
            self._counts[item.verdict] += 1
        values |= {f"share/{name}": count / self._all for name, count in self._counts.items()}
        values["seconds"] = item.seconds
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, item.number, walltime=when)

    def close(self) -> None:
        """Close the file of events."""
        self._writer.close()
