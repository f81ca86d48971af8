"""Units of too few images to be adapted to."""

from __future__ import annotations

from tesla_med.engine.driver import Driver
from tesla_med.models.base import norm_layers

WARM_UP = "statistics_warm_up"
"""Parameter of methods whose statistics are means over all images so far."""


def too_few(driver: Driver, count: int) -> str:
    """Return why a unit of so many images is not adapted to, in words; "" where it is.

    Normalised by statistics of a few tiles, each is of any class. Smaller batches that were asked for are not
    too small, and neither is any for a network without batch norm, or for means over all images so far.
    """
    method = driver.method
    least = min(driver.least, method.params.batch_slices or driver.least)
    own = bool(norm_layers(method.model)) and not getattr(method.params, WARM_UP, False)
    if not (driver.case_by_case and own and count < least):
        return ""
    noun = f"{driver.noun} is" if count == 1 else f"{driver.noun}s are"
    return f"{count} {noun} too few to adapt to; the source model's result is kept"
