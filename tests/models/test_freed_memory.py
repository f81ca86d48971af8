"""On the CPU freed memory stays with the process, unless somebody has said what is to be done with it."""

from __future__ import annotations

import ctypes
import platform

import pytest

from tesla_med.models import base


class Library:
    """A C library that writes down what it is asked for."""

    def __init__(self, answer=1):
        self.asked, self.answer = [], answer

    def mallopt(self, option, value):
        self.asked.append((option, value))
        return self.answer


@pytest.fixture
def library(monkeypatch):
    made = Library()
    for name in base.MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: made)
    base.keep_freed_memory.cache_clear()
    yield made
    base.keep_freed_memory.cache_clear()


def test_the_cpu_keeps_it_once_per_process(library):
    for _ in range(2):
        assert base.default_device("cpu").type == "cpu"
    assert sorted(library.asked) == [(-3, 2**30), (-1, 2**30)]
    assert base.keep_freed_memory()


@pytest.mark.parametrize("name", base.MALLOC_VARIABLES)
def test_what_a_user_has_set_stays(name, library, monkeypatch):
    monkeypatch.setenv(name, "1")
    assert not base.keep_freed_memory()
    assert library.asked == []


def test_other_libraries_are_left_alone(library, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert not base.keep_freed_memory()
    library.answer = 0
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    base.keep_freed_memory.cache_clear()
    assert not base.keep_freed_memory()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_glibc_has_it(monkeypatch):
    for name in base.MALLOC_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    base.keep_freed_memory.cache_clear()
    assert base.keep_freed_memory()
