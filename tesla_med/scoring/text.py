"""Figures as text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])", re.IGNORECASE)
"""A number that is no part of a word, such as a name."""
NOT_APPLICABLE = "n/a"


def percent(value: float | None) -> str:
    """Return a share in percent with one decimal, or n/a."""
    return NOT_APPLICABLE if value is None else f"{100 * value:.1f}"


def change(before: float | None, after: float | None) -> str:
    """Return the difference of two shares in points with its sign, or n/a."""
    return points(None if before is None or after is None else after - before)


def points(value: float | None) -> str:
    """Return a difference in [-1, 1] in points with its sign, or n/a."""
    return NOT_APPLICABLE if value is None else f"{100 * value:+.1f}"


def decimals(value: float | None, places: int) -> str:
    """Return a number with so many decimals, or n/a."""
    return NOT_APPLICABLE if value is None else f"{value:.{places}f}"


def some(names: Sequence[str], limit: int = 5) -> str:
    """Return the first of many names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def gathered(remarks: Iterable[tuple[str, str]], noun: str = "case") -> list[str]:
    """Return remarks on items as few lines: those that differ in their numbers alone become one.

    Such a line gives the number of items and the remark on the worst of them: the one whose first number
    is farthest, as a ratio, from the numbers that all have in common, or else the largest.

    Args:
        remarks: name of an item, and what is said of it.
        noun: what the items are, in the singular.
    """
    groups: dict[str, dict[tuple[str, str], None]] = {}
    for name, text in remarks:
        groups.setdefault(NUMBER.sub("#", text), {})[name, text] = None
    lines = []
    for found in map(list, groups.values()):
        texts = {text for _, text in found}
        if len(found) == 1:
            lines.append(": ".join(found[0]))
        elif len(texts) == 1:
            names = some([name for name, _ in found], 10)
            lines.append(f"{counted(len(found), noun)}: {found[0][1]} ({names})")
        else:
            name, text = _worst(found)
            lines.append(f"{counted(len({name for name, _ in found}), noun)}, the worst is {name}: {text}")
    return lines


def _worst(remarks: Sequence[tuple[str, str]]) -> tuple[str, str]:
    numbers = [[abs(float(item)) for item in NUMBER.findall(text)] for _, text in remarks]
    columns = list(zip(*numbers, strict=True))
    own = next(place for place, column in enumerate(columns) if len(set(column)) > 1)
    common = [column[0] for column in columns if len(set(column)) == 1 and column[0] > 0]

    def distance(place: int) -> float:
        value = max(columns[own][place], 1e-9)
        return min((abs(math.log(value / item)) for item in common), default=value)

    return remarks[max(range(len(remarks)), key=distance)]


def metric_title(metric: str) -> str:
    """Return how a headline metric is called in sentences and tables."""
    return {"dice": "Dice", "accuracy": "accuracy"}.get(metric, metric)


def counted(count: int, word: str) -> str:
    """Return a number with a noun, in the singular or the plural."""
    return f"{count} {word}" if count == 1 else f"{count} {plural(word)}"


def some_of(text: str, part: int, whole: int, word: str) -> tuple[str, ...]:
    """Return the remark that a text holds for a part of the whole; nothing where the part is 0."""
    return (f"{text}: {part} of {counted(whole, word)}",) if part else ()


def plural(word: str) -> str:
    """Return the plural of a regular noun."""
    return word + ("es" if word.endswith(("ch", "s", "x")) else "s")
