"""A limit on the size of files, which stands for a full disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

LIMIT = 40 * 1024


@contextmanager
def limited() -> Iterator[None]:
    """Let no file become larger than ``LIMIT`` bytes; Python ignores SIGXFSZ, so writing gives EFBIG."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
