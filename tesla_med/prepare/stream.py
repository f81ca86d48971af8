"""Units one after the other: read ahead, finished behind, and kept between several passes over a site."""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from tesla_med.errors import DataError, TeslaMedError
from tesla_med.prepare.fill import packed
from tesla_med.types import Failure, Progress, Ref, Unit

log = logging.getLogger(__name__)
Key = TypeVar("Key")
Value = TypeVar("Value")

SWITCH_SECONDS = 1e-3
SLICE_CACHE_BYTES = 2 << 30
"""Prepared images kept in memory between the passes over a site; older ones are read again."""


def ahead(keys: Sequence[Key], load: Callable[[Key], Value], count: int = 1) -> Iterator[Value]:
    """Yield what ``load`` makes of every key in order, while as many threads load the ``count`` next ones."""
    with ThreadPoolExecutor(count, thread_name_prefix="read-ahead") as pool:
        coming = [pool.submit(load, key) for key in keys[:count]]
        for position in range(len(keys)):
            ready = coming.pop(0).result()
            if position + count < len(keys):
                coming.append(pool.submit(load, keys[position + count]))
            yield ready


def read_ahead(refs: Sequence[Ref], load: Callable[[Ref], Unit], count: int = 1) -> Iterator[Unit | Failure]:
    """Yield every unit in order, reading the next ones while the present one is worked on.

    What cannot be used comes as a :class:`Failure`, whatever the reason, so that the others go on.
    """

    def attempt(ref: Ref) -> Unit | Failure:
        try:
            return load(ref)
        except Exception as error:
            return Failure(ref, error)

    return ahead(refs, attempt, count)


class Behind:
    """Carries work that was begun to its end in a thread, in order, while the next is begun.

    While it is open threads take turns at Python more often than usual: one that launches work on a device
    many times a second does not wait for one that draws (half as many launches as alone, else a fifth).

    As a context manager it waits for the last piece. Errors come out where the next piece is given, or at the
    end; where the block itself raises, the piece that is being done is completed.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="behind")
        self._last: Future[None] | None = None
        self._usual = sys.getswitchinterval()

    def __enter__(self) -> Behind:
        sys.setswitchinterval(min(SWITCH_SECONDS, self._usual))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._pool.shutdown()
            sys.setswitchinterval(self._usual)

    def __call__(self, work: Iterator[None]) -> None:
        """Go on with an iterator in the thread, once the piece before is done: no more than one waits."""
        self._wait()
        self._last = self._pool.submit(next, work, None)

    def _wait(self) -> None:
        last, self._last = self._last, None
        if last is not None:
            last.result()


class Told:
    """Progress of a run whose items are finished in another thread: all of it is told in that of the run.

    Args:
        progress: what is told.
        stage: its name for the items.
        total: number of items.
    """

    def __init__(self, progress: Progress, stage: str, total: int) -> None:
        self._progress, self._stage, self._total = progress, stage, total
        self._done: deque[int] = deque()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Tell of the items that were finished meanwhile, then of this."""
        while self._done:
            self.items(self._done.popleft())
        self._progress(stage, done, total)

    def items(self, done: int) -> None:
        """Tell at once how many items are done."""
        self._progress(self._stage, done, self._total)

    def later(self, done: int) -> None:
        """Tell it at the next call; may be called in another thread."""
        self._done.append(done)


def named_error(name: str, error: Exception) -> TeslaMedError:
    """Return ``error`` if it speaks for itself, else one that names the file and the kind of error."""
    if isinstance(error, TeslaMedError):
        return error
    log.info("%s", name, exc_info=error)
    text = f"{name}: unexpected {type(error).__name__}: {str(error) or 'no details'}"
    if isinstance(error, MemoryError):
        text = f"{name}: not enough memory for this case ({error})"
    named = DataError(f"{text}; --verbose shows where it happened")
    named.__cause__ = error
    return named


class SiteImages:
    """The images of all units of a site, for methods that pass over it several times.

    Those of units with fill have one more channel; see :func:`tesla_med.prepare.fill.packed`.

    Args:
        refs: the units in order.
        load: reads and prepares one.
        change: what is done to every unit after it was read, one at a time.
        joined: whether a batch may hold images of several units.
        limit: bytes of prepared images kept between passes.
        count: units read ahead.

    Attributes:
        channels: of the images, fill not counted; None before the first is read.
    """

    def __init__(
        self,
        refs: Sequence[Ref],
        load: Callable[[Ref], Unit],
        change: Callable[[Unit], Unit] = lambda unit: unit,
        *,
        joined: bool = True,
        limit: int = SLICE_CACHE_BYTES,
        count: int = 1,
    ) -> None:
        self._change = change
        self.refs = tuple(refs)
        self.joined = joined
        self._load = load
        self._limit = limit
        self._count = count
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0
        self.channels: int | None = None
        self.failures: dict[str, Failure] = {}

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the images (N, C, *spatial) of each unit that can be read and has any."""
        missing = [ref for ref in self.refs if ref.name not in self._kept and ref.name not in self.failures]
        fresh = read_ahead(missing, self._load, self._count)
        for ref in self.refs:
            if ref.name in self._kept:
                yield self._kept[ref.name]
            elif ref.name not in self.failures:
                images = self._take(next(fresh))
                if images is not None:
                    yield images

    def _take(self, loaded: Unit | Failure) -> Tensor | None:
        if isinstance(loaded, Failure):
            self.failures[loaded.ref.name] = loaded
            log.warning("%s: left out of the passes: %s", loaded.ref.name, loaded.error)
            return None
        unit = self._change(loaded)
        if unit.images is None:
            return None
        self.channels = unit.images.shape[1]
        images = packed(unit.images, unit.fill)
        size = images.numel() * images.element_size()
        if self._bytes + size <= self._limit:
            self._kept[loaded.ref.name] = images
            self._bytes += size
        return images

    def batches(self, size: int) -> Iterator[Tensor]:
        """Yield batches of ``size`` images in order, across the borders of units of one shape.

        Images of different shapes are never joined; the last batch of each shape may be smaller.
        """
        held: dict[torch.Size, list[Tensor]] = {}
        for images in self:
            waiting = held.setdefault(images.shape[1:], [])
            waiting.append(images)
            count = sum(len(part) for part in waiting)
            if count >= size:
                joined = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
                whole = count - count % size
                yield from torch.split(joined[:whole], size)
                waiting[:] = [joined[whole:]] if whole < count else []
        yield from (torch.cat(waiting) for waiting in held.values() if waiting)
