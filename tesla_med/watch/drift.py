"""Has a site drifted away from what was seen at first? A test over the figures of its images.

The first cases are the reference period. Whenever a case is done, the last ones are compared with them in
every figure by the two-sided Mann-Whitney test, and the p values are corrected by Holm's method over the
figures. A figure has drifted where its corrected p value is below ``ALPHA``, which is small because there is
a look after every case: ``benchmarks/drift.py`` measures how often a stream without drift is called one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tesla_med.compare.statistics import holm

ALPHA = 0.0005
"""Bound of the corrected p value of a look."""
REFERENCE = 40
"""Cases of the reference period."""
WINDOW = 20
"""Latest cases that are compared with it."""
LEAST = 10
"""Fewer cases than these tell nothing at this bound."""
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Drift:
    """A figure that is not what it was.

    Attributes:
        name: of the figure.
        first: index of the case after which it was noticed, of those that follow each other up to ``last``.
        last: index of the last case after which it was still so.
        before: median over the reference period.
        now: median over the window at ``last``.
        p: corrected p value at ``last``.
        present: whether it is so after the latest case of all.
    """

    name: str
    first: int
    last: int
    before: float
    now: float
    p: float
    present: bool


def find_drifts(
    figures: Mapping[str, Sequence[float | None]],
    reference: int = REFERENCE,
    window: int = WINDOW,
    alpha: float = ALPHA,
) -> list[Drift]:
    """Return every drift in the figures of the cases of a site, the latest first.

    Args:
        figures: by name one value per case in the order in which they came, None where there is none.
        reference: cases of the reference period.
        window: latest cases, compared with the reference after every case.
        alpha: bound of the corrected p value.
    """
    tests = {name: _tests(values, reference, window) for name, values in figures.items()}
    count = max((len(values) for values in figures.values()), default=0)
    open_: dict[str, Drift] = {}
    found: list[Drift] = []
    for index in range(count):
        known = {name: float(p[index]) for name, (p, _) in tests.items() if np.isfinite(p[index])}
        corrected = holm(known)
        for name in figures:
            p = corrected.get(name)
            if p is not None and p < alpha:
                first = open_[name].first if name in open_ else index
                before = _median(_known(figures[name])[:reference])
                now = float(tests[name][1][index])
                open_[name] = Drift(name, first, index, before, now, p, present=True)
            elif name in open_ and name in known:
                found.append(replace(open_.pop(name), present=False))
    return sorted([*found, *open_.values()], key=lambda item: (-item.last, item.first, item.name))


def _tests(values: Sequence[float | None], reference: int, window: int) -> tuple[Doubles, Doubles]:
    """Return the p value of a figure and the median of the window after every case, NaN where none is."""
    from scipy.stats import mannwhitneyu

    p, middle = np.full(len(values), np.nan), np.full(len(values), np.nan)
    places = [index for index, value in enumerate(values) if value is not None]
    known = np.array(_known(values), np.float64)
    if len(known) < reference + window:
        return p, middle
    first = known[:reference]
    windows = np.lib.stride_tricks.sliding_window_view(known[reference:], window)
    at = places[reference + window - 1 :]
    told = ~((windows == first[0]).all(axis=1) & (first == first[0]).all())  # all equal: no test, no drift
    tested = np.ones(len(windows))
    if told.any():
        repeated = np.broadcast_to(first, (int(told.sum()), reference))
        tested[told] = mannwhitneyu(windows[told], repeated, axis=1, method="asymptotic").pvalue
    p[at], middle[at] = tested, np.median(windows, axis=1)
    return p, middle


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))
