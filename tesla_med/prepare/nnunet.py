"""What nnU-Net v2 does to an image before its network sees it, and back: ported, so that masks are the same.

The order is: axes (z, y, x) and the transposition of the plans, crop to the box of what is not zero,
normalise, resample (Isensee et al., Nature Methods 2021, and nnunetv2 2.8). Back: log-probabilities are
resampled, which gives the same classes as resampling logits, as both differ by a constant of all classes at
each voxel; outside the crop there is background.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import Intensity, Preprocessing, Region
from tesla_med.config.nnunet import ChannelNorm, NnunetPreprocessing, Resampling
from tesla_med.errors import ConfigError, DataError
from tesla_med.io.nifti import axis_directions
from tesla_med.prepare.transforms import PreparedCase
from tesla_med.types import BoolArray, IntArray, Volume

if TYPE_CHECKING:
    import torch

MOST = 2**32
"""Voxels of the largest image that is made."""
THICK = 3.0
"""Ratio of spacings from which on the axis of the largest is resampled apart."""
LEAST = 1e-8
SLAB = 2**24
"""Values that are resampled at a time on the way back."""
Floats = npt.NDArray[np.floating[Any]]


@dataclass
class NnunetCase(PreparedCase):
    """One case as an nnU-Net sees it; ``images`` are (1, C, D, H, W), or (D, C, H, W) for one of slices."""

    config: NnunetPreprocessing = field(
        default_factory=lambda: NnunetPreprocessing(spacing=(1, 1), channels=(ChannelNorm(),))
    )
    regions: bool = False
    turned: tuple[tuple[int, ...], tuple[int, ...]] = ((0, 1, 2), ())
    before: tuple[int, ...] = ()
    box: tuple[slice, ...] = ()
    spacing: tuple[float, ...] = ()
    target: tuple[float, ...] = ()

    def restore(self, probs: torch.Tensor) -> npt.NDArray[np.float32]:
        """Bring class probabilities back to the native grid.

        Args:
            probs: (N, L, *spatial), summing to 1 over L, on any device.

        Returns:
            (L, I, J, K) float32 in file order, summing to 1 over L; outside of the crop background.

        Raises:
            AdaptationError: another shape than the images', or values that are not finite.
        """
        from tesla_med.losses import exclusive, overlapping

        probs = self._checked(probs)
        whole = probs[0] if self.config.dimensions == 3 else probs.movedim(0, 1)
        logs = whole.clamp_min(float(np.finfo(np.float32).tiny)).log_()
        if self.regions:
            logs = overlapping(logs[None])[0]
        inside = tuple(part.stop - part.start for part in self.box)
        order, flips = self.turned
        back = np.argsort(self.config.transpose)
        shape = [self.before[axis] for axis in back][::-1]
        native = np.zeros((self.num_classes, *(shape[axis] for axis in np.argsort(order))), np.float32)
        native[0] = 1.0
        # The same memory as the resampled classes have it: in RAS, reversed, transposed, inside of the crop.
        seen = np.flip(native.transpose(0, *(1 + axis for axis in order)), tuple(1 + axis for axis in flips))
        seen = seen.transpose(0, 3, 2, 1).transpose(0, *(1 + axis for axis in self.config.transpose))
        target = seen[(slice(None), *self.box)]
        for place, slab in slabs(logs, inside, self.target, self.spacing, self.config.logits):
            found = exclusive(slab[None])[0].exp() if self.regions else slab.softmax(dim=0)
            target[place] = found.numpy()
        return native


class NnunetPreprocessor:
    """Prepare volumes as the plans of an nnU-Net say.

    Args:
        preprocessing: has ``nnunet``; of the rest ``model_range`` alone counts.
        region: must be the whole field, as nnU-Net knows no other.
        num_classes: number L of classes, background included.
        regions: whether the classes come from overlapping regions.

    Raises:
        ConfigError: another region, or a change of preprocessing that means nothing here.
    """

    def __init__(
        self, preprocessing: Preprocessing, region: Region, num_classes: int, *, regions: bool
    ) -> None:
        if preprocessing.nnunet is None:
            raise ConfigError("preprocessing.nnunet is missing")
        if region.kind != "whole":
            raise ConfigError(
                f"a region of interest (site.region.kind = {region.kind}) means nothing to an nnU-Net, which "
                "looks at whole images; --set site.region.kind=whole"
            )
        self.preprocessing = preprocessing
        self.config = preprocessing.nnunet
        self.num_classes = num_classes
        self.regions = regions

    def scaled(self, candidates: Iterable[Intensity]) -> dict[str, Any]:
        """Return nothing: the plans say how intensities are normalised."""
        return {}

    def __call__(
        self, volume: Volume, region_mask: BoolArray | None = None, labels: IntArray | None = None
    ) -> NnunetCase:
        """Prepare one volume.

        Args:
            volume: the image on its native grid.
            region_mask: not used.
            labels: must be None; training is nnU-Net's.

        Raises:
            DataError: another number of channels, or intensities that the normalisation cannot take.
        """
        import torch

        if labels is not None:
            raise ConfigError("an nnU-Net is trained with nnU-Net; this pipeline adapts and predicts only")
        array, config = volume.array, self.config
        if len(array) != len(config.channels):
            raise DataError(f"{volume.path}: {len(array)} channels, the model needs {len(config.channels)}")
        order, flips = _to_ras(volume) if config.reorient else ((0, 1, 2), ())
        array = np.flip(array.transpose(0, *(1 + axis for axis in order)), tuple(1 + axis for axis in flips))
        array = array.transpose(0, 3, 2, 1).transpose(0, *(1 + axis for axis in config.transpose))
        stated = volume.stated or volume.spacing  # a half voxel is rounded as the header's digits have it
        sizes = [stated[axis] for axis in order][::-1]
        spacing = tuple(sizes[axis] for axis in config.transpose)
        nonzero = _filled(array)
        box = _box(nonzero)
        inside = (slice(None), *box)
        before, array, nonzero = array.shape[1:], array[inside], nonzero[box]
        array = np.stack(
            [
                normalise(values, norm, nonzero, f"{volume.path}: channel {index}")
                for index, (values, norm) in enumerate(zip(array, config.channels, strict=True))
            ]
        )
        target = (*spacing[: 3 - config.dimensions], *config.spacing)
        shape = new_shape(array.shape[1:], spacing, target)
        if math.prod(shape) > MOST:
            raise DataError(
                f"{volume.path}: at the model's voxel size of {_mm(target)} mm the image would have "
                f"{' x '.join(map(str, shape))} voxels; its own are {_mm(spacing)} mm, is that right?"
            )
        array = resample(array, shape, spacing, target, config.images)
        low, high = self.preprocessing.model_range
        scaled = torch.from_numpy(((array - low) / (high - low)).astype(np.float32))
        images = scaled[None] if config.dimensions == 3 else scaled.movedim(0, 1)
        depth = scaled.shape[1]
        case = NnunetCase(
            images=images.contiguous(),
            labels=None,
            slice_index=tuple(range(depth)),
            depth=depth,
            num_classes=self.num_classes,
            config=config,
            regions=self.regions,
        )
        return replace(case, turned=(order, flips), before=before, box=box, spacing=spacing, target=target)


def _mm(sizes: Sequence[float]) -> str:
    return " x ".join(f"{size:g}" for size in sizes)


def _to_ras(volume: Volume) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the file's axis that becomes each axis of RAS, and which of the latter are flipped."""
    directions = dict(enumerate(axis_directions(volume.affine)))
    order = tuple(sorted(directions, key=lambda axis: directions[axis][0]))
    return order, tuple(world for world, axis in enumerate(order) if directions[axis][1])


def normalise(values: Floats, norm: ChannelNorm, nonzero: BoolArray, where: str) -> Floats:
    """Return one channel (D, H, W), cropped to what is not zero, with its intensities normalised.

    Raises:
        DataError: RGB values outside of 0 to 255.
    """
    values = values.astype(np.float32)
    if norm.scheme == "zscore" and norm.masked:
        inside = values[nonzero]
        values[nonzero] = (inside - inside.mean()) / max(inside.std(), LEAST)
        return values
    if norm.scheme == "zscore":
        return np.asarray((values - values.mean()) / max(values.std(), LEAST), np.float32)
    if norm.scheme == "ct":
        return np.asarray(
            (values.clip(norm.lower, norm.upper) - norm.mean) / max(norm.std, LEAST), np.float32
        )
    if norm.scheme == "rescale":
        values = values - values.min()
        return np.asarray(values / max(values.max(), LEAST), np.float32)
    if norm.scheme == "rgb":
        if values.min() < 0 or values.max() > 255:
            raise DataError(
                f"{where}: {values.min():g} to {values.max():g}, but the model needs RGB of 0 to 255"
            )
        return np.asarray(values / 255.0, np.float32)
    return values


def _filled(array: Floats) -> BoolArray:
    """Return where any channel of (C, D, H, W) is not zero, and what that encloses."""
    from scipy.ndimage import binary_fill_holes

    found: BoolArray = binary_fill_holes((array != 0).any(axis=0))
    return found


def _box(mask: BoolArray) -> tuple[slice, ...]:
    """Return the smallest box around a (D, H, W) mask; the whole where it is empty."""
    if not mask.any():
        return tuple(slice(0, size) for size in mask.shape)
    box = []
    for axis in range(mask.ndim):
        there = np.flatnonzero(mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)))
        box.append(slice(int(there[0]), int(there[-1]) + 1))
    return tuple(box)


def new_shape(shape: Sequence[int], spacing: Sequence[float], target: Sequence[float]) -> tuple[int, ...]:
    """Return the shape of a (D, H, W) grid at another spacing, in mm."""
    return tuple(
        max(round(float(old / new * size)), 1) for size, old, new in zip(shape, spacing, target, strict=True)
    )


def axis_apart(spacing: Sequence[float], target: Sequence[float], separate: bool | None) -> int | None:
    """Return the axis that is resampled apart from the others, or None.

    Args:
        spacing: of the grid, in mm.
        target: of the new grid.
        separate: what the plans say; None: where a spacing is more than ``THICK`` times another.
    """
    chosen = None
    if separate is None:
        chosen = next((item for item in (spacing, target) if max(item) / min(item) > THICK), None)
    elif separate:
        chosen = spacing
    if chosen is None:
        return None
    thickest = [axis for axis, size in enumerate(chosen) if size == max(chosen)]
    return thickest[0] if len(thickest) == 1 else None


def resample(
    array: Floats, shape: Sequence[int], spacing: Sequence[float], target: Sequence[float], how: Resampling
) -> npt.NDArray[np.float32]:
    """Return (C, D, H, W) on a grid of another shape, by splines, edges extended.

    Args:
        array: what is resampled.
        shape: of the new grid, (D, H, W).
        spacing: of the old grid, in mm.
        target: of the new grid, in mm.
        how: orders of the splines.
    """
    if tuple(array.shape[1:]) == tuple(shape):
        return np.asarray(array, np.float32)
    axis = axis_apart(spacing, target, how.separate_z)
    result = np.empty((len(array), *shape), np.float32)
    for index, values in enumerate(array):  # one channel at a time: double precision needs memory
        result[index] = _resized(values, tuple(shape), axis, how)
    return result


def slabs(
    logits: torch.Tensor,
    shape: Sequence[int],
    spacing: Sequence[float],
    target: Sequence[float],
    how: Resampling,
    most: int = SLAB,
) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
    """Yield (L, D, H, W) on a grid of another shape part by part, so that little memory is needed.

    Linear interpolation, which is what nnU-Net does to logits, needs two slices for one; under other orders
    the whole is the only part.

    Args:
        logits: (L, D, H, W) float32 on the CPU.
        shape: of the new grid, (D, H, W).
        spacing: of the old grid, in mm.
        target: of the new grid, in mm.
        how: orders of the splines.
        most: values of a part, at least one slice.

    Yields:
        Where the part lies, and its values.
    """
    import torch
    from torch.nn import functional

    old = tuple(logits.shape[1:])
    axis = axis_apart(spacing, target, how.separate_z)
    if old == tuple(shape) or how.order != 1 or (axis is not None and how.order_z > 1):
        whole = resample(logits.numpy(), shape, spacing, target, how)
        yield (slice(None),) * 4, torch.from_numpy(whole)
        return
    lead = 0 if axis is None else axis
    stack = logits.movedim(1 + lead, 1)
    plane = [size for other, size in enumerate(shape) if other != lead]
    positions = stack.shape[1] / shape[lead] * (np.arange(shape[lead]) + 0.5) - 0.5
    nearest = axis is not None and how.order_z == 0 and stack.shape[1] != shape[lead]
    if nearest:
        positions = _nearest(positions, stack.shape[1])
    positions = positions.clip(0, stack.shape[1] - 1)
    lower = torch.from_numpy(np.floor(positions).astype(int))
    upper = (lower + 1).clamp_max(stack.shape[1] - 1)
    weights = torch.from_numpy((positions - lower.numpy()).astype(np.float32))
    step = max(most // (len(logits) * math.prod(plane)), 1)
    for start in range(0, shape[lead], step):
        part = slice(start, min(start + step, shape[lead]))
        rows = stack[:, lower[part]]
        if bool((weights[part] > 0).any()):
            rows = rows.lerp(stack[:, upper[part]], weights[part][:, None, None])
        found = functional.interpolate(rows, plane, mode="bilinear", align_corners=False)
        place = [slice(None)] * 4
        place[1 + lead] = part
        yield tuple(place), found.movedim(1, 1 + lead)


def _nearest(positions: Floats, count: int) -> Floats:
    """Return the numbers of the nearest slices, chosen by the library that nnU-Net asks, ties included."""
    from scipy.ndimage import map_coordinates

    found: Floats = map_coordinates(
        np.arange(count, dtype=float), np.asarray(positions)[None], order=0, mode="nearest"
    )
    return found


def _resized(values: Floats, shape: tuple[int, ...], axis: int | None, how: Resampling) -> Floats:
    from scipy.ndimage import map_coordinates
    from skimage.transform import resize

    options = {"mode": "edge", "anti_aliasing": False, "preserve_range": True}
    values = values.astype(np.float64)
    if axis is None:
        return np.asarray(resize(values, shape, how.order, **options))
    plane = tuple(size for other, size in enumerate(shape) if other != axis)
    slices = [resize(item, plane, how.order, **options) for item in np.moveaxis(values, axis, 0)]
    stack = np.stack(slices, axis=axis)
    if stack.shape[axis] == shape[axis]:
        return stack
    ratio = stack.shape[axis] / shape[axis]
    positions = ratio * (np.arange(shape[axis]) + 0.5) - 0.5
    if how.order_z == 0:
        return np.asarray(np.take(stack, _nearest(positions, stack.shape[axis]).astype(int), axis=axis))
    grid = list(np.meshgrid(*[np.arange(size, dtype=float) for size in shape], indexing="ij"))
    grid[axis] = np.moveaxis(np.broadcast_to(positions, (*plane, shape[axis])), -1, axis)
    return np.asarray(map_coordinates(stack, np.array(grid), order=how.order_z, mode="nearest"))
