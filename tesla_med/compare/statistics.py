"""Means, intervals and tests of a comparison, as functions of arrays.

A *sample* is the values of one site, one per case: of a case that was run under several seeds, the mean
over them. Cases are the units that are resampled and tested, and sites are strata: they are fixed, and
cases stay in theirs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

AVERAGE = "average"
"""Stands for all sites where a site is named."""
RESAMPLES = 2000
BCA_LIMIT = 5000
"""Cases up to which an interval is corrected for bias and skew, at a cost that grows with their square."""
ROUNDING = 1e-9
"""Differences below this are those of sums in another order."""
Doubles = npt.NDArray[np.float64]
Key = tuple[str, str]
"""Row and protocol."""
Name = TypeVar("Name", bound=Hashable)


def average(*samples: Doubles, axis: int = -1) -> Any:
    """Return the mean over sites of the means over their cases.

    Args:
        samples: one per site, (..., n) along ``axis``; sites may differ in n.
        axis: of the cases.
    """
    return np.mean([sample.mean(axis=axis) for sample in samples], axis=0)


def interval(*samples: Doubles) -> tuple[float | None, float | None]:
    """Return the 95 % bootstrap interval (BCa) of :func:`average`; cases are resampled within their site.

    The draws are the same every time. Where all values of each site are the same the interval is a point.
    Above ``BCA_LIMIT`` cases it is the plain percentile interval, which for the mean of so many is the same.

    Args:
        samples: (n,) values, one array per site.

    Returns:
        Lower and upper end; (None, None) without a site, or where one has fewer than two cases.
    """
    if not samples or min(map(len, samples)) < 2:
        return None, None
    if all(np.ptp(sample) == 0 for sample in samples):
        return float(average(*samples)), float(average(*samples))
    from scipy import stats

    size = sum(map(len, samples))
    bounds = (math.nan, math.nan)
    for method in ("BCa", "percentile") if size <= BCA_LIMIT else ("percentile",):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = stats.bootstrap(
                samples,
                average,
                n_resamples=RESAMPLES,
                batch=max(1, 2_000_000 // size),
                vectorized=True,
                method=method,
                rng=np.random.default_rng(0),
            ).confidence_interval
        bounds = (float(found.low), float(found.high))
        if all(math.isfinite(bound) for bound in bounds):
            break
    return bounds


def wilcoxon(differences: Doubles) -> float | None:
    """Return the two-sided p of Wilcoxon's signed-rank test of (n,) differences.

    None where fewer than two differ from 0.
    """
    from scipy import stats

    return float(stats.wilcoxon(differences).pvalue) if np.count_nonzero(differences) >= 2 else None


def mcnemar(differences: Doubles) -> float | None:
    """Return the two-sided p of McNemar's exact test of (n,) differences of paired outcomes, 1 or 0.

    A binomial test of the pairs that differ, won against lost. Over several seeds an outcome is the share
    of seeds that were right, and a pair is won or lost by the sign of its difference. None where no pair
    differs.
    """
    from scipy import stats

    won, lost = int((differences > 0).sum()), int((differences < 0).sum())
    return float(stats.binomtest(won, won + lost).pvalue) if won + lost else None


def holm(values: Mapping[Name, float | None]) -> dict[Name, float | None]:
    """Return Holm's step-down correction of the p values of one family.

    What is None, a test that could not be made, stays None and does not count.
    """
    known = sorted(((p, name) for name, p in values.items() if p is not None), key=lambda item: item[0])
    result: dict[Name, float | None] = dict.fromkeys(values)
    largest = 0.0
    for index, (p, name) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(known) - index)))
        result[name] = largest
    return result
