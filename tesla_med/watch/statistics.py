"""What an image looks like, in a few figures that change when a scanner or its protocol does."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from tesla_med.types import Volume

NAMES = ("p05", "p50", "p95", "contrast", "noise", "body", "in_plane_mm", "slice_mm", "slices")
"""Of the figures, in their order."""
IN_WORDS = {
    "p05": "intensity, 5th percentile of the body",
    "p50": "intensity, median of the body",
    "p95": "intensity, 95th percentile of the body",
    "contrast": "contrast: (p95 - p05) / (p95 + p05)",
    "noise": "noise: standard deviation / median of the body",
    "body": "body: share of the voxels",
    "in_plane_mm": "voxel size in the plane, mm",
    "slice_mm": "distance of slices, mm",
    "slices": "number of slices",
    "predicted_dice": "predicted Dice",
}
_MASK_SCALE = 6.0
"""Standard deviation of Immerkaer's operator on noise of standard deviation 1."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
Floats = npt.NDArray[np.float32]


def image_statistics(volume: Volume) -> dict[str, float]:
    """Return figures of the first channel of an image by ``NAMES``, those that are finite.

    The body is what is brighter than Otsu's threshold. Slices are cut across the axis with the largest
    voxels, the last of several. Noise is estimated by Immerkaer's operator (J. Immerkaer, Fast Noise Variance
    Estimation, 1996) in the plane, with the median absolute deviation over the body in place of the mean, so
    that edges count little.
    """
    image = volume.array[0]
    across = max(range(3), key=lambda axis: (round(volume.spacing[axis], 4), axis))
    within = [volume.spacing[axis] for axis in range(3) if axis != across]
    found = {
        "in_plane_mm": round(math.sqrt(within[0] * within[1]), 4),
        "slice_mm": round(volume.spacing[across], 4),
        "slices": float(image.shape[across]),
    }
    if not volume.blank:
        found |= _of_intensities(np.moveaxis(image, across, 2))
    return {name: float(found[name]) for name in NAMES if name in found and math.isfinite(found[name])}


def _of_intensities(image: Floats) -> dict[str, float]:
    """Return the figures of intensities (I, J, K), slices along the last axis, not all equal."""
    from skimage.filters import threshold_otsu

    body = image > threshold_otsu(image.ravel())
    low, middle, high = np.percentile(image[body], (5, 50, 95))
    noise = _noise(image, body)
    return {
        "p05": float(low),
        "p50": float(middle),
        "p95": float(high),
        "contrast": float((high - low) / (high + low)) if high + low else math.nan,
        "noise": noise / abs(float(middle)) if middle else math.nan,
        "body": float(body.mean()),
    }


def _noise(image: Floats, body: npt.NDArray[np.bool_]) -> float:
    """Return the standard deviation of the noise; NaN where no voxel has its 8 neighbours in the body."""
    if min(image.shape[:2]) < 3:
        return math.nan
    rows = image[:-2] - 2 * image[1:-1] + image[2:]
    answer = rows[:, :-2] - 2 * rows[:, 1:-1] + rows[:, 2:]
    inside = body[:-2] & body[1:-1] & body[2:]
    inside = inside[:, :-2] & inside[:, 1:-1] & inside[:, 2:]
    if not inside.any():
        return math.nan
    return float(np.median(np.abs(answer[inside]))) * _NORMAL / _MASK_SCALE
