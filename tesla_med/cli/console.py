"""What the command line shows: tables, a progress bar, one JSON object. Used by ``cli`` alone."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tesla_med.scoring.text import gathered
from tesla_med.types import PASSES, UPDATES_OF, Progress


class _Once(logging.Filter):
    """Lets a warning through once: the cells of a comparison, and the passes over a site, give the same."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        text = record.getMessage()
        new = text not in self.said
        self.said.add(text)
        return new


EVERY_SECONDS = 10.0
"""Between two lines of progress on many small things."""
EACH = ("cases", "cells", PASSES)
"""Stages of which every step is a line of its own where there is no terminal."""


NAMED_SECONDS = 60.0
"""Between two lines on the updates of one case, or of one pass over a site."""


class _Lines:
    """Progress as lines, where there is no terminal: how much is done, how long it took, what is left."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._stages: dict[str, list[float]] = {}
        self._begun, self._said = 0.0, 0.0
        self._names: list[str] = []

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        _, updates, name = stage.partition(UPDATES_OF)
        if updates:
            self._update(name, done, total, now)
            return
        if stage not in self._stages:
            self._stages[stage] = [now, float(done), now, float(done)]
            self._names.clear()
            return
        begun, first, last, before = self._stages[stage]
        ends = done >= total and last > begun  # what was told of is told of to its end
        if done <= before or (stage not in EACH and not ends and now - last < EVERY_SECONDS):
            return
        self._stages[stage][2:] = [now, float(done)]
        left = (now - begun) / (done - first) * (total - done)
        rest = f", about {duration(left)} left" if done < total else f", {duration(now - begun)} in all"
        name = f"{self._names.pop(0)}, " if stage == "cases" and self._names else ""
        self._write(f"{stage} {done}/{total}: {name}{now - last:.1f} s{rest}")

    def _update(self, name: str, done: int, total: int, now: float) -> None:
        """Write a line on the updates of something that takes long, now and then."""
        if done == 0:
            self._begun, self._said = now, now
            self._names.append(name)  # a case ends when the next has begun
        elif now - self._said >= NAMED_SECONDS:
            self._said = now
            spent = now - self._begun
            rest = f", about {duration(spent / done * (total - done))} left" if done < total else ""
            self._write(f"{name}: update {done}{f'/{total}' if rest else ''}, {duration(spent)}{rest}")

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


def duration(seconds: float) -> str:
    """Return a time span in words that are as exact as they need to be."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Screen:
    """How much to say, and how.

    Attributes:
        quiet: nothing but errors and results asked for as JSON.
        verbose: details of the work, on standard error.
        as_json: one JSON object on standard output instead of text.
    """

    quiet: bool = False
    verbose: bool = False
    as_json: bool = False
    _once: _Once = field(default_factory=_Once, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Send the package's log to standard error at the level asked for."""
        level = logging.ERROR if self.quiet else logging.INFO if self.verbose else logging.WARNING
        handler = logging.StreamHandler(sys.stderr)
        handler.addFilter(self._once)
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger = logging.getLogger("tesla_med")
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False

    @property
    def talks(self) -> bool:
        """Whether text for people goes to standard output."""
        return not (self.quiet or self.as_json)

    def say(self, text: str = "") -> None:
        """Print a line for people."""
        if self.talks:
            sys.stdout.write(f"{text}\n")

    def note(self, text: str) -> None:
        """Print a remark on the whole for people, unless it was said as a warning."""
        if text not in self._once.said:
            self.say(f"Note: {text}")

    def aside(self, text: str) -> None:
        """Print a line on standard error, where progress is shown."""
        if not self.quiet:
            sys.stderr.write(f"{text}\n")

    def remark(self, text: str) -> None:
        """Print a remark on standard error."""
        self.aside(f"Remark: {text}")

    def remarks(self, found: Iterable[tuple[str, str]], noun: str = "case") -> None:
        """Print remarks on single items on standard error, equal ones as one line with their number."""
        for line in gathered(found, noun):
            self.remark(line)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None = None) -> None:
        """Print a table for people; columns that hold figures are aligned right."""
        if not self.talks:
            return
        from rich.table import Table

        table = Table(title=title, title_justify="left", header_style="bold")
        for index, name in enumerate(columns):
            figures = bool(rows) and all(_is_figure(row[index]) for row in rows)
            table.add_column(name, justify="right" if figures else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        _rich(sys.stdout).print(table)

    def result(self, content: Mapping[str, Any]) -> None:
        """Print the JSON object where it was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(content, indent=2, default=str) + "\n")

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """Show a bar on standard error while the block runs; where that is no terminal, lines."""
        if self.quiet:
            yield lambda *_: None
            return
        if not sys.stderr.isatty():
            yield _Lines(sys.stderr)
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=_rich(sys.stderr), transient=True) as bar:
            tasks: dict[str, Any] = {}

            def show(stage: str, done: int, total: int) -> None:
                key, updates, _ = stage.partition(UPDATES_OF)  # one bar for all units, one after the other
                key += updates
                if key not in tasks:
                    tasks[key] = bar.add_task(stage, total=total)
                elif updates and done == 0:
                    bar.reset(tasks[key])
                shown = total > 0 or not updates
                bar.update(tasks[key], description=stage, completed=done, total=total, visible=shown)

            yield show


def _rich(stream: Any) -> Any:
    from rich.console import Console

    width = None if stream.isatty() else 120
    return Console(file=stream, width=width, highlight=False, markup=False)


def _is_figure(text: str) -> bool:
    stripped = text.strip().lstrip("+-")
    return not stripped or stripped in ("-", "n/a") or stripped.replace(".", "", 1).rstrip("%").isdigit()
