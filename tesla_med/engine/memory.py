"""What to do when memory runs out: fewer slices at once, then less on the device, then give up."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from tesla_med.errors import AdaptationError
from tesla_med.tta.base import TTAMethod

log = logging.getLogger(__name__)
T = TypeVar("T")

LEAST_TILES = 8
"""Tiles that a batch must have to be learned from: fewer have neither statistics nor a class marginal."""
_TEXTS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def free_device_memory() -> None:
    """Give back what networks and graphs that nobody uses any more hold on CUDA devices, if there are any.

    A method and its passes refer to each other, so they stay until Python looks for such cycles, which it
    does not do because a device is full.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that host or device memory ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)


def with_less_memory(
    work: Callable[[], T],
    restore: Callable[[], None],
    methods: tuple[TTAMethod, ...],
    most: int,
    *,
    least: int = 1,
    noun: str = "slice",
) -> tuple[T, str]:
    """Do ``work``; whenever memory runs out, restore the state, halve the slices at once and try again.

    After single slices, single slices with the results brought to the CPU one by one are tried.

    Args:
        work: what needs memory.
        restore: puts back everything that ``work`` may have changed.
        methods: whose batches are made smaller; afterwards they are as they were.
        most: slices in the largest batch of the first try.
        least: the smallest batch that makes sense; only down to 1 are results brought to the CPU.
        noun: what a batch is made of.

    Returns:
        The result, and what was done for it, "" where the first try went well.

    Raises:
        AdaptationError: memory does not suffice for the smallest batch; says what was tried.
    """
    tried: list[str] = []
    try:
        for limit, stitch in _tries(most, least):
            for method in methods:
                method.use_less_memory(limit, stitch_on_cpu=stitch)
            try:
                result = work()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            else:
                return result, f"memory ran out, done with {_words(limit, stitch, noun)}" if tried else ""
            tried.append(_words(limit or most, stitch, noun))
            log.warning("out of memory with %s", tried[-1])
            restore()
            free_device_memory()
    finally:
        for method in methods:
            method.use_less_memory(None)
    raise AdaptationError(
        f"out of memory; tried {', '.join(tried)}; "
        "use a device with more memory, --device cpu, or a smaller network"
    )


def _tries(most: int, least: int) -> Iterator[tuple[int | None, bool]]:
    yield None, False
    limit = most
    while limit > least:
        limit = max(limit // 2, least)
        yield limit, False
    if least == 1:
        yield 1, True


def _words(limit: int | None, stitch: bool, noun: str) -> str:
    text = f"{limit} {noun}{'' if limit == 1 else 's'} at once"
    return text + ", stitched on the CPU" if stitch else text
