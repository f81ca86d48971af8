"""Figures of the guard in words."""

from __future__ import annotations

DIGITS = (2, 3, 4)
"""After the point, as few of these as show that two figures differ."""


def trusted_against(ours: float, other: float, name: str) -> str:
    """Return how a mask is trusted beside another one, as the rest of a sentence.

    Args:
        ours: the trust in the mask that is taken, no less than the other's.
        other: the trust in the other mask.
        name: of the other mask.
    """
    for digits in DIGITS:
        first, second = f"{ours:.{digits}f}", f"{other:.{digits}f}"
        if first != second:
            return f"is trusted more than {name} ({first} against {second})"
    return f"is trusted as much as {name} ({ours:.{DIGITS[0]}f})"
