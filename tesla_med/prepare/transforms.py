"""From a volume on its native grid to 2-D slices in [0, 1], and back, as MONAI transforms.

Oblique angles never enter: slices are those of the file, so voxel axes are turned to the
nearest world axes and resampled along themselves only. Everything is undone by MONAI's own
inverse, on probabilities; labels are drawn from them afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.models import Intensity, Preprocessing, Region
from tesla_med.errors import AdaptationError, DataError, GeometryError
from tesla_med.io.nifti import axis_affine, slice_axis
from tesla_med.prepare.fill import COINCIDE, ScaleWithoutFill, find_fill, remark, without_fill
from tesla_med.prepare.regions import crop_starts, crop_transforms
from tesla_med.types import BoolArray, IntArray, Volume

if TYPE_CHECKING:
    import torch

_KEYS = ("image", "label", "region", "fill")
MIDDLE, SMALL_SHARE = (0.1, 99.9), 0.1
"""Percentiles between which nearly all intensities lie, and the share of the range that is too little."""


@dataclass
class PreparedCase:
    """One case as the model sees it, and the way back.

    Attributes:
        images: (N, C, H, W) float32 in [0, 1], one entry for each kept slice.
        labels: (N, H, W) int64 class indices, or None.
        slice_index: which of the ``depth`` slices were kept, ascending.
        depth: number of slices after reorientation (and resampling, if any).
        notes: remarks for the report.
        fill: (I, J, K) bool on the native grid, true where there is fill; None for nowhere.
        hidden: (N, H, W) bool, the same in the slices.
    """

    images: torch.Tensor
    labels: torch.Tensor | None
    slice_index: tuple[int, ...]
    depth: int
    num_classes: int
    notes: list[str] = field(default_factory=list)
    fill: BoolArray | None = None
    hidden: torch.Tensor | None = None
    _transform: Any = field(default=None, repr=False)
    _traced: Any = field(default=None, repr=False)
    _shape: tuple[int, int, int] = (0, 0, 0)

    def restore(self, probs: torch.Tensor) -> npt.NDArray[np.float32]:
        """Bring class probabilities back to the native grid.

        Args:
            probs: (N, L, H, W) in [0, 1], summing to 1 over L, on any device.

        Returns:
            (L, I, J, K) float32 in file order, summing to 1 over L. Voxels that the model did
            not see, and fill, are background with probability 1.

        Raises:
            AdaptationError: another shape than the slices', or values that are not finite.
        """
        import torch
        from monai.data import MetaTensor

        probs = self._checked(probs)
        # Background is stored less 1, so that the zeros which the inverse pads with mean
        # background for certain.
        stack = torch.zeros((self.num_classes, *probs.shape[2:], self.depth))
        stack[..., list(self.slice_index)] = probs.permute(1, 2, 3, 0)
        stack[0, ..., list(self.slice_index)] -= 1.0
        traced = MetaTensor(
            stack, affine=self._traced.affine, applied_operations=list(self._traced.applied_operations)
        )
        native = self._transform.inverse({"image": traced})["image"].as_tensor()
        if tuple(native.shape[1:]) != self._shape:
            raise GeometryError(f"undoing gave shape {tuple(native.shape[1:])} instead of {self._shape}")
        native[0] += 1.0
        native = native.clamp_(0.0, 1.0)
        native /= native.sum(dim=0, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        restored = np.asarray(native.numpy(), np.float32)
        if self.fill is not None:
            restored[:, self.fill] = 0.0
            restored[0, self.fill] = 1.0
        return restored

    def _checked(self, probs: torch.Tensor) -> torch.Tensor:
        """Return probabilities (N, L, *spatial) in float32 on the CPU.

        Raises:
            AdaptationError: another shape than the images', or values that are not finite.
        """
        import torch

        expected = (self.images.shape[0], self.num_classes, *self.images.shape[2:])
        if tuple(probs.shape) != expected:
            raise AdaptationError(f"expected probabilities of shape {expected}, got {tuple(probs.shape)}")
        probs = probs.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(probs).all()):
            raise AdaptationError("the model's probabilities hold values that are not finite")
        return probs


class Preprocessor:
    """Prepare volumes as a pipeline and a site say.

    Args:
        preprocessing: orientation, intensity scaling, resampling.
        region: the part of the field the model sees.
        num_classes: number L of classes, background included.
    """

    def __init__(self, preprocessing: Preprocessing, region: Region, num_classes: int) -> None:
        self.preprocessing = preprocessing
        self.region = region
        self.num_classes = num_classes

    def scaled(self, candidates: Iterable[Intensity]) -> dict[str, Preprocessor]:
        """Return the same with other scalings than its own, by their names."""
        own = self.preprocessing
        return {
            str(item): Preprocessor(own.model_copy(update={"intensity": item}), self.region, self.num_classes)
            for item in candidates
            if item != own.intensity
        }

    def __call__(
        self, volume: Volume, region_mask: BoolArray | None = None, labels: IntArray | None = None
    ) -> PreparedCase:
        """Prepare one volume.

        Args:
            volume: the image on its native grid.
            region_mask: (I, J, K), for regions of kind ``mask``.
            labels: (I, J, K) class indices, for training and benchmarks only.

        Raises:
            DataError: the region needs a mask that is missing or empty.
            GeometryError: shapes differ, or the region cannot be placed in the image.
        """
        from monai.transforms import Compose

        orientation = self.preprocessing.orientation
        fill = find_fill(volume.array, self.preprocessing.fill, slice_axis(volume.affine, orientation))
        data = self._tensors(volume, region_mask, labels, fill)
        notes: list[str] = [] if fill is None else [remark(fill, volume.array)]
        first = [self._orient(data), *self._scale(volume, notes, fill)]
        data = Compose(first)(data)
        self._note_spacing(volume, notes)
        second = [*self._crop(data, volume), *self._resample(data)]
        transform = Compose([*first, *second])
        data = Compose(second)(data)
        return replace(self._slices(data, transform, volume, notes), fill=fill)

    def _tensors(
        self,
        volume: Volume,
        region_mask: BoolArray | None,
        labels: IntArray | None,
        fill: BoolArray | None,
    ) -> dict[str, Any]:
        import torch
        from monai.data import MetaTensor

        needed = region_mask if self.region.kind == "mask" else None
        if self.region.kind == "mask" and (needed is None or not np.any(needed)):
            raise DataError(
                f"{volume.path}: the region of interest comes from a mask and that is "
                f"{'missing' if needed is None else 'empty'}; add one, or choose another region: "
                "--set site.region.kind=square or point"
            )
        affine = torch.as_tensor(axis_affine(volume.affine))
        array = volume.array.copy() if fill is None else without_fill(volume.array, fill)
        data: dict[str, Any] = {"image": MetaTensor(torch.from_numpy(array), affine=affine)}
        for key, extra in (("label", labels), ("region", needed), ("fill", fill)):
            if extra is None:
                continue
            if extra.shape != volume.shape:
                raise GeometryError(
                    f"{volume.path}: shape {volume.shape}, but its {key} has shape {extra.shape}"
                )
            tensor = torch.from_numpy(np.array(extra, dtype=np.float32, order="C"))[None]
            data[key] = MetaTensor(tensor, affine=affine.clone())
        return data

    def _orient(self, data: dict[str, Any]) -> Any:
        from monai.transforms import Orientationd

        axes = (("L", "R"), ("P", "A"), ("I", "S"))
        return Orientationd(
            keys=_KEYS, axcodes=self.preprocessing.orientation, labels=axes, allow_missing_keys=True
        )

    def _scale(self, volume: Volume, notes: list[str], fill: BoolArray | None) -> list[Any]:
        """Return the steps of the scaling to [0, 1]; each channel has a range of its own, without fill."""
        from monai.transforms import ScaleIntensityd, ScaleIntensityRanged

        from tesla_med.prepare.bias import BiasCorrection
        from tesla_med.prepare.histogram import HistogramMatching

        intensity: Intensity = self.preprocessing.intensity
        corrected = intensity.bias_correction
        steps: list[Any] = [BiasCorrection()] if corrected else []
        if intensity.scaling == "histogram":
            return [*steps, HistogramMatching(intensity.quantiles)]
        if fill is not None:
            if intensity.scaling == "minmax":
                notes.extend(outlying(volume.array[:, ~fill]))
            return [*steps, ScaleWithoutFill(intensity, notes)]
        if len(volume.array) > 1 or corrected:
            if intensity.scaling == "percentile":
                return [*steps, ScaleWithoutFill(intensity, notes)]
            notes.extend(outlying(volume.array))
            return [*steps, ScaleIntensityd("image", minv=0.0, maxv=1.0, channel_wise=True)]
        if intensity.scaling == "percentile":
            low, high = np.percentile(volume.array, (intensity.lower, intensity.upper))
            if high > low:
                return [ScaleIntensityRanged("image", low, high, b_min=0.0, b_max=1.0, clip=True)]
            notes.append(COINCIDE)
        notes.extend(outlying(volume.array))
        return [ScaleIntensityd("image", minv=0.0, maxv=1.0)]

    def _note_spacing(self, volume: Volume, notes: list[str]) -> None:
        uses_mm = self.region.kind != "whole" or self.preprocessing.spacing is not None
        if volume.nominal_spacing and uses_mm:
            notes.append("the voxel size is nominal; lengths in mm are taken at face value for preprocessing")

    def _crop(self, data: dict[str, Any], volume: Volume) -> list[Any]:
        placed = crop_starts(self.region, data["image"], data.get("region"), volume)
        if placed is None:
            return []
        if "region" in data:  # a slice counts as part of the region even where the mask leaves the square
            data["region"][:] = (data["region"] > 0).any(dim=1, keepdim=True).any(dim=2, keepdim=True)
        starts, sizes = placed
        return crop_transforms(_KEYS, starts, sizes, data["image"].shape[1:])

    def _resample(self, data: dict[str, Any]) -> list[Any]:
        from monai.transforms import Resized, Spacingd

        steps: list[Any] = []
        if self.preprocessing.spacing is not None:
            steps.append(
                Spacingd(
                    _KEYS,
                    pixdim=self.preprocessing.spacing,
                    mode=("bilinear", "nearest", "nearest", "nearest"),
                    padding_mode="border",
                    allow_missing_keys=True,
                )
            )
        if self.preprocessing.size is not None:
            smooth = self.preprocessing.anti_aliasing
            steps.append(
                Resized(
                    _KEYS,
                    spatial_size=(*self.preprocessing.size, -1),
                    # the third axis keeps its size: bilinear
                    mode=("trilinear", "nearest", "nearest", "nearest"),
                    align_corners=(False, None, None, None),
                    anti_aliasing=(smooth, False, False, False),
                    allow_missing_keys=True,
                )
            )
        return steps

    def _slices(self, data: dict[str, Any], transform: Any, volume: Volume, notes: list[str]) -> PreparedCase:
        import torch

        image = data["image"]
        depth = int(image.shape[-1])
        kept = list(range(depth))
        if self.region.slices == "mask":
            kept = [k for k in kept if bool((data["region"][0, ..., k] > 0).any())]
            if not kept:
                raise DataError(f"{volume.path}: no slice of the region mask is left after resampling")
        images = image.as_tensor()[..., kept].permute(3, 0, 1, 2).contiguous().clamp_(0.0, 1.0)
        if not bool(torch.isfinite(images).all()):
            raise DataError(f"{volume.path}: intensities are too large to be scaled to [0, 1]")
        labels = data["label"].as_tensor()[0, ..., kept] if "label" in data else None
        fill = data["fill"].as_tensor()[0, ..., kept].permute(2, 0, 1) > 0.5 if "fill" in data else None
        return PreparedCase(
            images=images,
            labels=labels.permute(2, 0, 1).round().long().contiguous() if labels is not None else None,
            slice_index=tuple(kept),
            depth=depth,
            num_classes=self.num_classes,
            notes=notes,
            hidden=fill.contiguous() if fill is not None and bool(fill.any()) else None,
            _transform=transform,
            _traced=image,
            _shape=volume.shape,
        )


def outlying(array: npt.NDArray[Any]) -> Iterator[str]:
    """Yield a remark for each channel of (C, *spatial) whose range is set by a few outlying voxels."""
    for values in array:
        ends = float(values.min()), float(values.max())
        middle = [float(value) for value in np.percentile(values, MIDDLE)]
        share = (middle[1] - middle[0]) / max(ends[1] - ends[0], np.finfo(np.float64).tiny)
        if share < SMALL_SHARE and ends[1] > ends[0]:
            yield (
                f"a few outlying voxels set the intensity range, {ends[0]:g} to {ends[1]:g}: "
                f"99.8 % of all lie between {middle[0]:g} and {middle[1]:g}, {100 * share:.1f} % of it; "
                "--set preprocessing.intensity.scaling=percentile leaves them out"
            )
