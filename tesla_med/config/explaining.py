"""What is wrong with a configuration, in words that a user can act on."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from tesla_med.config.models import Section
from tesla_med.registry import unknown_name

QUOTE = (
    "unquoted, YAML reads NO, yes, on and off as true or false, 01 as the number 1 and 2024-01-01 as a date: "
    "put texts in quotes, '01'"
)
_WITHOUT_POINT = re.compile(r"[+-]?\d+[eE][+-]?\d+")
"""A number that YAML takes for text."""
_NUMBERS = {2: "two", 3: "three", 4: "four"}


def explained(model: type[Section], item: Any) -> str:
    """Return in words what is wrong with one key of a configuration.

    Args:
        model: of the configuration.
        item: an error as pydantic tells it.
    """
    key = ".".join(str(part) for part in item["loc"]) or "the whole"
    if item["type"] == "extra_forbidden":
        return unknown_name("key", key, _keys_at(model, item["loc"][:-1]))
    if (words := _tuple_in_words(model, item)) is not None:
        return words
    if item["type"] == "missing":
        return f"key {key!r} is missing"
    text = item["msg"].removeprefix("Value error, ")
    got = item.get("input")
    if item["type"] in ("string_type", "invalid_key") and not isinstance(got, list | dict | None):
        return f"key {key!r}: {text}, got {got!r}; {QUOTE}"
    if item["type"] in ("int_parsing", "float_parsing") and _WITHOUT_POINT.fullmatch(str(got)):
        return f"key {key!r}: {text}, got {got!r}; YAML reads it as text, write {float(got):g}"
    return f"key {key!r}: {text}, got {got!r}" if not isinstance(got, dict) else f"key {key!r}: {text}"


def _tuple_in_words(model: type[Section], item: Any) -> str | None:
    """Return what was expected of a list of values and what came; None where something else is wrong."""
    location = item["loc"]
    if item["type"] == "missing" and isinstance(location[-1], int):
        location = location[:-1]  # of the list, not of the value that it lacks
    elif item["type"] not in ("tuple_type", "too_long"):
        return None
    field = _field_at(model, location)
    count = 0 if field is None else len(_fixed_parts(field.annotation))
    if field is not None and count:
        sample = _sample(field, count)
        what = f"{_NUMBERS.get(count, count)} {'values' if sample is None else 'numbers'}"
        what += "" if sample is None else f", as in {json.dumps(sample, separators=(',', ':'))}"
    elif item["type"] == "tuple_type":
        what = "a list in brackets"
    else:
        return None
    return f"key {'.'.join(map(str, location))!r}: expected {what}, got {item['input']!r}"


def _field_at(model: type[Section], location: tuple[Any, ...]) -> FieldInfo | None:
    """Return what is declared of a key; None where that cannot be told."""
    section: type[Section] | None = model
    field = None
    for part in location:
        if not isinstance(part, int):
            if section is None or part not in section.model_fields:
                return None
            field = section.model_fields[part]
            section = _section_in(field.annotation)
    return field


def _sample(field: FieldInfo, count: int) -> list[Any] | None:
    """Return so many numbers that a field takes: its default, or made up; None where it takes no numbers."""
    if isinstance(field.default, tuple):
        return list(field.default)
    real = _fits(field.annotation, [1.5] * count)
    samples = [[1.0] * count if real else [128] * count, [*range(count)]]
    return next((values for values in samples if _fits(field.annotation, values)), None)


def _fixed_parts(annotation: Any) -> tuple[Any, ...]:
    """Return the parts of a tuple of fixed length, which may be optional; none of anything else."""
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        return () if Ellipsis in parts else parts
    return next(filter(None, map(_fixed_parts, get_args(annotation))), ())


def _fits(annotation: Any, values: Any) -> bool:
    with suppress(ValidationError):
        TypeAdapter(annotation).validate_python(values)
        return True
    return False


def _keys_at(model: type[Section], location: tuple[Any, ...]) -> list[str]:
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        if current is None or part not in current.model_fields:
            return []
        current = _section_in(current.model_fields[part].annotation)
    return sorted(current.model_fields) if current is not None else []


def _section_in(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _section_in(inner)
        if found is not None:
            return found
    return None
