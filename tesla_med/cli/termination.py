"""A request to end, such as a scheduler of jobs sends, ends a command as Ctrl-C does, and neither is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def terminated_as_interrupted() -> Iterator[Callable[[], bool]]:
    """Let SIGTERM end the block as Ctrl-C does; in threads other than the main one nothing changes.

    Yields:
        A function that says whether there was either. Python drops an exception that is raised while an
        object is destroyed, an interrupt too: a block that ends of itself may have been asked to end.
        A signal that is ignored, as Ctrl-C is in the background of a shell, stays so.
    """
    asked = threading.Event()

    def interrupt(number: int, frame: Any) -> None:
        asked.set()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
