"""What the command line shows: tables, a progress bar, one JSON object. Used by ``cli`` alone."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tesla_med.types import Progress


class _Once(logging.Filter):
    """Lets a warning of configuration or files through once: the cells of a comparison give the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.split(".")[1:2] not in (["config"], ["io"], ["plan"], ["tasks"]):
            return True
        text = record.getMessage()
        new = text not in self._said
        self._said.add(text)
        return new


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

    def __post_init__(self) -> None:
        """Send the package's log to standard error at the level asked for."""
        level = logging.ERROR if self.quiet else logging.INFO if self.verbose else logging.WARNING
        handler = logging.StreamHandler(sys.stderr)
        handler.addFilter(_Once())
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
        """Show a bar on standard error while the block runs."""
        if not self.talks or not sys.stderr.isatty():
            yield lambda *_: None
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
                if stage not in tasks:
                    tasks[stage] = bar.add_task(stage, total=total)
                bar.update(tasks[stage], completed=done, total=total)

            yield show


def _rich(stream: Any) -> Any:
    from rich.console import Console

    width = None if stream.isatty() else 120
    return Console(file=stream, width=width, highlight=False, markup=False)


def _is_figure(text: str) -> bool:
    stripped = text.strip().lstrip("+-")
    return not stripped or stripped in ("-", "n/a") or stripped.replace(".", "", 1).rstrip("%").isdigit()
