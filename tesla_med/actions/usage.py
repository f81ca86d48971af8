"""How much memory the process takes, and how much some work needs on top of it."""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from types import TracebackType

import torch

EVERY_SECONDS = 0.005
"""Between two looks at the memory of the process."""
_STATM = Path("/proc/self/statm")


def highest() -> int:
    """Return the highest memory of the process so far in bytes; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found if sys.platform == "darwin" else found << 10


def resident() -> int:
    """Return the memory of the process in bytes; its highest so far where only that is known."""
    try:
        pages = int(_STATM.read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return highest()
    import resource

    return pages * resource.getpagesize()


def release() -> None:
    """Give memory that nobody uses any more back to the system, where its allocator can be told to (glibc).

    What an allocator keeps is used again by what comes next, which then seems to need nothing.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


class Peak:
    """Notes by how much memory grows while a block runs: of the process, on a GPU that of tensors.

    Attributes:
        grown: bytes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.grown, self._ended = device, 0, threading.Event()

    def __enter__(self) -> Peak:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
            return self
        release()
        self._before = resident()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.device.type == "cuda":
            self.grown = torch.cuda.max_memory_allocated(self.device) - self._before
            return
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_SECONDS):
            self.grown = max(self.grown, resident() - self._before)
