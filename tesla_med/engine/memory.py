"""What to do when memory runs out: fewer images at once, then less on the device, then give up."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from tesla_med.errors import AdaptationError
from tesla_med.tta.base import TTAMethod

log = logging.getLogger(__name__)

SHARE_OF_A_PREDICTION = 100
"""Probabilities of a unit that fill less than this part of the device's memory stay there."""
_ONEDNN = "could not create a primitive"  # how oneDNN says it
_TEXTS = (
    *("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory"),
    _ONEDNN,
)


def free_device_memory() -> None:
    """Give back what networks and graphs that nobody uses any more hold on CUDA devices, if there are any.

    A method and its passes refer to each other, so they stay until Python looks for such cycles, which it
    does not do because a device is full.
    """
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def placed(images: Tensor, classes: int, device: torch.device) -> Tensor:
    """Return the images of a unit where all that is predicted from them will stay until its mask is made.

    That is the device, so that nothing is copied to and fro, unless such predictions are large: the images
    then stay where they are, and so do the probabilities.

    Args:
        images: (N, C, *spatial).
        classes: whose probabilities are predicted.
        device: of the networks.
    """
    if device.type != "cuda":
        return images
    prediction = images[:, :1].numel() * classes * images.element_size()
    whole = torch.cuda.get_device_properties(device).total_memory
    return images.to(device) if prediction < whole // SHARE_OF_A_PREDICTION else images


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that host or device memory ran out."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)


def _do_without_onednn() -> None:
    """Compute without oneDNN from now on.

    Once it had no memory for the code of a kernel it makes no other in that thread, however much memory
    there is by then: it keeps the error of its code generator and never clears it.
    """
    torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    log.warning("oneDNN fails after memory ran out: convolutions take 2 to 3 times as long from here on")


class Attempt:
    """One try at work that needs memory; as a context manager it swallows running out of memory.

    Attributes:
        limit: images at once; None: as many as the parameters say.
        note: what was done about memory, "" in the first try.
        failed: memory ran out.
    """

    def __init__(self, methods: Sequence[TTAMethod], limit: int | None, stitch: bool, note: str) -> None:
        self.methods = methods
        self.limit, self.stitch, self.note = limit, stitch, note
        self.failed = False

    def __enter__(self) -> None:
        for method in self.methods:
            method.use_less_memory(self.limit, stitch_on_cpu=self.stitch)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for method in self.methods:
            method.use_less_memory(None)
        self.failed = error is not None and is_out_of_memory(error)
        if self.failed and _ONEDNN in str(error):
            _do_without_onednn()
        return self.failed

    @contextmanager
    def again(self) -> Iterator[None]:
        """Limit the methods as in this try once more; running out of memory is an error."""
        self.__enter__()
        try:
            yield
        finally:
            for method in self.methods:
                method.use_less_memory(None)


def attempts(
    methods: Sequence[TTAMethod],
    restore: Callable[[], None],
    most: int,
    *,
    least: int = 1,
    noun: str = "slice",
    first: int | None = None,
) -> Iterator[Attempt]:
    """Yield one try after the other, each with half as many images at once, until one succeeds.

    After single images, single images with the results brought to the CPU one by one are tried::

        for attempt in attempts((method,), restore, 16):
            with attempt:
                return work()

    Args:
        methods: whose batches are made smaller; after each try they are as they were.
        restore: puts back everything that the work may have changed.
        most: images in the largest batch of the first try.
        least: the smallest batch that makes sense; only down to 1 are results brought to the CPU.
        noun: what a batch is made of.
        first: images at once in the first try; None: as many as the parameters say.

    Raises:
        AdaptationError: memory does not suffice for the smallest batch; says what was tried.
    """
    tried: list[str] = []
    for limit, stitch in _tries(most, least, first):
        words = _words(limit or most, stitch, noun)
        attempt = Attempt(methods, limit, stitch, f"memory ran out; done with {words}" if tried else "")
        yield attempt
        if not attempt.failed:
            return
        tried.append(words)
        log.warning("out of memory with %s", words)
        restore()
        free_device_memory()
    raise AdaptationError(
        f"out of memory; tried {', '.join(tried)}; "
        "use a device with more memory, --device cpu, or a smaller network"
    )


def _tries(most: int, least: int, first: int | None) -> Iterator[tuple[int | None, bool]]:
    yield first, False
    limit = most if first is None else first
    while limit > least:
        limit = max(limit // 2, least)
        yield limit, False
    if least == 1:
        yield 1, True


def _words(limit: int, stitch: bool, noun: str) -> str:
    text = f"{limit} {noun}{'' if limit == 1 else 's'} at once"
    return text + ", stitched on the CPU" if stitch else text
