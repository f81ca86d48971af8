"""An interrupt that waits until a step is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold back a first Ctrl-C, or SIGTERM, inside the block; a second one interrupts at once.

    Yields:
        A function that says whether there was one. In threads other than the main one, where Python allows
        no handlers, nothing is held back.
    """
    asked = threading.Event()

    def note(number: int, frame: Any) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
