"""Fill: voxels of one value, joined to the border, that hold no measurement.

Scanners and tools fill what they did not measure with one value: the corners outside a round field of view,
what a turned or resampled volume leaves empty, air that was masked. Such voxels are a state and not a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import FillConfig, Intensity
from tesla_med.types import BoolArray

if TYPE_CHECKING:
    from torch import Tensor

_CORE = 3
"""Side in voxels of the squares that fill is made of; what is thinner everywhere is chance."""
_SOLID = 0.5
"""Share of a patch that such squares cover, below which it is chance: noise holds zeros too."""


def find_fill(array: npt.NDArray[Any], config: FillConfig, slice_axis: int = 2) -> BoolArray | None:
    """Return where a volume holds fill, (I, J, K); None where fill is not looked for or there is too little.

    The fill value is the most frequent one on the border of the slices, in every channel its own. A voxel is
    fill if all channels hold their fill value there and a path of such voxels within the slice joins it to
    the border. Patches that are mostly thin, as zeros among noise are, do not count; nor does what leaves a
    single value: then there is nothing to measure beside it.

    Args:
        array: (C, I, J, K) intensities.
        config: whether fill is looked for, and from which size on it counts.
        slice_axis: the axis of (I, J, K) from slice to slice.
    """
    if not config.enabled:
        return None
    slices = np.moveaxis(array, slice_axis + 1, 1)
    same = np.logical_and.reduce([channel == _border_value(channel) for channel in slices])
    least = config.least_share * same.size
    if np.count_nonzero(same) < least:
        return None
    found = np.stack([_joined_to_border(plane) for plane in same])
    if np.count_nonzero(found) < least or found.all():
        return None
    result: BoolArray = np.moveaxis(found, 0, slice_axis)
    rest = array[:, ~result]
    return None if (rest.min(axis=1) == rest.max(axis=1)).all() else result


def _border_value(slices: npt.NDArray[Any]) -> Any:
    """Return the most frequent value on the border of (N, H, W) slices, the smaller of equals."""
    sides = (slices[:, 0], slices[:, -1], slices[:, :, 0], slices[:, :, -1])
    values, counts = np.unique(np.concatenate([side.ravel() for side in sides]), return_counts=True)
    return values[counts.argmax()]


def _joined_to_border(plane: BoolArray) -> BoolArray:
    """Return which voxels of an (H, W) plane belong to solid patches that touch its border."""
    from scipy import ndimage

    labels, count = ndimage.label(plane)
    if not count:
        return plane
    square = np.ones((_CORE, _CORE), dtype=np.bool_)
    padded = np.pad(plane, _CORE, mode="edge")  # beyond the border fill goes on
    solid = ndimage.binary_opening(padded, square)[_CORE:-_CORE, _CORE:-_CORE]
    touching = np.zeros(count + 1, dtype=np.bool_)
    for side in (labels[0], labels[-1], labels[:, 0], labels[:, -1]):
        touching[side] = True
    touching[0] = False
    sizes = np.bincount(labels.ravel(), minlength=count + 1)
    cores = np.bincount(labels[solid & plane], minlength=count + 1)
    result: BoolArray = (touching & (cores >= _SOLID * sizes))[labels]
    return result


def remark(fill: BoolArray, array: npt.NDArray[Any]) -> str:
    """Return what a user is told of the fill of a (C, I, J, K) volume."""
    first = np.argwhere(fill)[0]
    value = ", ".join(f"{float(channel[tuple(first)]):g}" for channel in array)
    count = int(np.count_nonzero(fill))
    return (
        f"fill: {count} voxels ({100 * count / fill.size:.1f} %) joined to the border are {value}: no "
        "measurement, kept out of the intensity range, of adaptation, of calibration and of the mask"
    )


def without_fill(array: npt.NDArray[Any], fill: BoolArray) -> npt.NDArray[Any]:
    """Return (C, I, J, K) with the smallest other value of each channel in place of fill."""
    lowest = array[:, ~fill].min(axis=1)
    return np.where(fill, lowest[:, None, None, None], array)


COINCIDE = "the intensity percentiles coincide; scaled by smallest and largest value instead"


class ScaleWithoutFill:
    """Step of a MONAI pipeline that scales each channel to [0, 1] by the voxels that are no fill.

    Args:
        intensity: by extremes or by percentiles.
        notes: get a remark on a channel whose percentiles coincide, which is scaled by its extremes.
    """

    def __init__(self, intensity: Intensity, notes: list[str]) -> None:
        self.notes = notes
        extremes = intensity.scaling == "minmax"
        self.percentiles = (0.0, 100.0) if extremes else (intensity.lower, intensity.upper)

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the data with ``image``, (C, I, J, K), scaled; ``fill``, if any, does not count."""
        image = data["image"]
        counted: Any = data["fill"].as_tensor()[0] < 0.5 if "fill" in data else ...
        changed = image.clone()
        for index, channel in enumerate(image.as_tensor()):
            values = channel[counted].numpy()
            low, high = np.percentile(values, self.percentiles)
            if high <= low:
                low, high = float(values.min()), float(values.max())
                if self.percentiles != (0.0, 100.0) and COINCIDE not in self.notes:
                    self.notes.append(COINCIDE)
            span = float(high - low) or 1.0
            changed[index] = ((channel - float(low)) / span).clamp(0.0, 1.0)
        return {**data, "image": changed}


def hidden(mask: Tensor, fill: Tensor | None) -> Tensor:
    """Return class indices (N, H, W) with background where there is fill."""
    return mask if fill is None else mask.masked_fill(fill.to(mask.device), 0)


def packed(images: Tensor, fill: Tensor | None) -> Tensor:
    """Return images (N, C, H, W) with one more channel, 1 where pixels count and 0 where there is fill.

    Whatever draws, joins and splits images then does the same to the fill. Without fill they stay the same.
    """
    import torch

    if fill is None:
        return images
    return torch.cat([images, (~fill)[:, None].to(images)], dim=1)


def unpacked(batch: Tensor, channels: int | None) -> tuple[Tensor, Tensor | None]:
    """Return the images in what :func:`packed` made, and the weight (N, H, W) of their pixels, or None.

    Args:
        batch: (N, C, *spatial), or one channel more.
        channels: number C of channels; None: there is no fill.
    """
    if channels is None or batch.shape[1] == channels:
        return batch, None
    return batch[:, :channels].contiguous(), batch[:, channels].contiguous()
