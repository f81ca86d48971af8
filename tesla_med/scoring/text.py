"""Figures as text."""

from __future__ import annotations

NOT_APPLICABLE = "n/a"


def percent(value: float | None) -> str:
    """Return a share in percent with one decimal, or n/a."""
    return NOT_APPLICABLE if value is None else f"{100 * value:.1f}"


def change(before: float | None, after: float | None) -> str:
    """Return the difference of two shares in points with its sign, or n/a."""
    return NOT_APPLICABLE if before is None or after is None else f"{100 * (after - before):+.1f}"


def decimals(value: float | None, places: int) -> str:
    """Return a number with so many decimals, or n/a."""
    return NOT_APPLICABLE if value is None else f"{value:.{places}f}"


def some(names: list[str] | tuple[str, ...], limit: int = 5) -> str:
    """Return the first of many names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def metric_title(metric: str) -> str:
    """Return how a headline metric is called in sentences and tables."""
    return {"dice": "Dice", "accuracy": "accuracy"}.get(metric, metric)


def counted(count: int, word: str) -> str:
    """Return a number with a noun, in the singular or the plural."""
    return f"{count} {word}" if count == 1 else f"{count} {plural(word)}"


def plural(word: str) -> str:
    """Return the plural of a regular noun."""
    return word + ("es" if word.endswith(("ch", "s", "x")) else "s")
