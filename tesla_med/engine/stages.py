"""Where the time of a run goes: stages by name, timed while somebody watches and free otherwise.

A stage that begins inside another takes its time from that one, so that stages add up. What other threads
do beside the passes (reading ahead, finishing the case before) is counted apart.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

_watching: list[Watch] = []
_NOTHING = nullcontext()


def stage(name: str) -> AbstractContextManager[None]:
    """Return a block that is timed under ``name`` where somebody watches."""
    return _watching[-1].timed(name) if _watching else _NOTHING


class Watch:
    """Seconds by stage of what runs inside the block.

    Args:
        synchronise: waits for the device; called at both ends of every stage of the thread that watches.

    Attributes:
        seconds: of each stage in the thread that watches.
        beside: of each stage in other threads.
    """

    def __init__(self, synchronise: Callable[[], object] = lambda: None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.beside: dict[str, float] = defaultdict(float)
        self._synchronise = synchronise
        self._own = threading.get_ident()
        self._inner = threading.local()
        self._lock = threading.Lock()

    def __enter__(self) -> Watch:
        _watching.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _watching.remove(self)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block."""
        own = threading.get_ident() == self._own
        before = getattr(self._inner, "seconds", 0.0)
        self._inner.seconds = 0.0
        start = self._now(own)
        try:
            yield
        finally:
            passed = self._now(own) - start
            with self._lock:
                (self.seconds if own else self.beside)[name] += passed - self._inner.seconds
            self._inner.seconds = before + passed

    def _now(self, own: bool) -> float:
        if own:
            self._synchronise()
        return time.perf_counter()
