"""Moments that a test chooses: Ctrl-C while a file gets its name, and a clock on which everything is slow."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

_WATCHES = []


def _renamed(event, arguments):
    if event == "os.rename":
        for watch in tuple(_WATCHES):
            watch(Path(os.fsdecode(arguments[1])).as_posix())


sys.addaudithook(_renamed)  # a hook cannot be removed: it does nothing unless a test watches


@contextmanager
def ctrl_c(part, count=1):
    """Send Ctrl-C the ``count``-th time that a file whose path holds ``part`` is put in place."""
    seen = []

    def watch(path):
        if part in path:
            seen.append(path)
            if len(seen) == count:
                signal.raise_signal(signal.SIGINT)

    _WATCHES.append(watch)
    try:
        yield
    finally:
        _WATCHES.remove(watch)
    assert len(seen) >= count, f"no file was put in place {count} times whose path holds {part}"


def slow_clock(monkeypatch, seconds):
    """Let every look at the clock take so many seconds."""
    for name in ("monotonic", "perf_counter"):
        ticks = itertools.count(getattr(time, name)(), seconds)
        monkeypatch.setattr(time, name, lambda ticks=ticks: next(ticks))
