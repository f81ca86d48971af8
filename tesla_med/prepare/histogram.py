"""Matching of intensities to the histogram of the images that a network was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tesla_med.errors import DataError

COUNT = 101
"""Quantiles that describe a histogram, evenly spaced from the smallest to the largest value."""
_BINS = 1024


class HistogramMatching:
    """Step of a MONAI pipeline that matches each channel of the image; positions stay.

    Args:
        quantiles: evenly spaced ones in [0, 1] of each channel, rising.
    """

    def __init__(self, quantiles: Sequence[Sequence[float]]) -> None:
        self.quantiles = quantiles

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the data with ``image``, (C, I, J, K), matched; where there is ``fill`` does not count.

        Raises:
            DataError: another number of channels than of quantiles.
        """
        image = data["image"]
        if len(image) != len(self.quantiles):
            raise DataError(
                f"the histogram to be matched has {len(self.quantiles)} channels, not {len(image)}"
            )
        changed = image.clone()
        counted = data["fill"].as_tensor()[0] < 0.5 if "fill" in data else None
        for index, target in enumerate(self.quantiles):
            changed[index] = matched(image[index].as_tensor(), target, counted)
        return {**data, "image": changed}


def matched(values: Tensor, target: Sequence[float], counted: Tensor | None = None) -> Tensor:
    """Return values mapped by a rising map under which their quantiles are those of the target.

    Args:
        values: of any shape.
        target: evenly spaced quantiles, rising.
        counted: of the same shape, whose quantiles they are; None for all.
    """
    array = values.numpy().astype(np.float64)
    seen = array if counted is None else array[counted.numpy()]
    own = np.quantile(seen, np.linspace(0.0, 1.0, len(target)))
    places, first, counts = np.unique(own, return_index=True, return_counts=True)
    middle = np.asarray(target)[first + (counts - 1) // 2]  # of equal quantiles the one in the middle
    return torch.from_numpy(np.interp(array, places, middle)).to(values)


class Histogram:
    """Counts of values in [0, 1] by channel, from which quantiles are taken."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None

    def add(self, images: Tensor, fill: Tensor | None = None) -> None:
        """Count the values of (N, C, *spatial) images in [0, 1], but not where (N, *spatial) ``fill`` is."""
        channels = images.transpose(0, 1).flatten(1).float().cpu()
        if fill is not None:
            channels = channels[:, ~fill.flatten()]
        counts = torch.stack([torch.histc(channel, _BINS, 0.0, 1.0) for channel in channels]).double()
        self.counts = counts if self.counts is None else self.counts + counts

    def quantiles(self) -> tuple[tuple[float, ...], ...]:
        """Return ``COUNT`` evenly spaced quantiles of each channel, to the width of a bin."""
        if self.counts is None:
            return ()
        edges = np.linspace(0.0, 1.0, _BINS + 1)
        result = []
        for counts in self.counts.numpy():
            below = np.concatenate([[0.0], np.cumsum(counts)]) / counts.sum()
            result.append(tuple(np.interp(np.linspace(0.0, 1.0, COUNT), below, edges).round(6).tolist()))
        return tuple(result)
