"""Which settings differ from those of before, in words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MOST = 5
"""Differences that are spelled out."""
_LONGEST = 60
"""Letters of a value that are shown."""
_NOT_SET: Any = object()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return each setting that differs, by its path and with both values, and how many more do.

    Args:
        before: plain values, as JSON holds them, which may be nested.
        now: the same of now; what one of the two lacks at the top counts as null.
    """
    found = [
        f"{path}: {_short(old)} then, {_short(new)} now"
        for key in sorted({*before, *now})
        for path, old, new in _leaves(before.get(key), now.get(key), key)
    ]
    more = len(found) - MOST
    return found if more <= 0 else [*found[:MOST], f"and {more} more"]


def _leaves(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            yield from _leaves(old.get(key, _NOT_SET), new.get(key, _NOT_SET), f"{path}.{key}")
    elif _are_tables(old) and _are_tables(new) and len(old) == len(new):
        for index, pair in enumerate(zip(old, new, strict=True)):
            yield from _leaves(*pair, f"{path}.{index}")
    else:
        yield path, old, new


def _are_tables(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _short(value: Any) -> str:
    text = "not set" if value is _NOT_SET else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
