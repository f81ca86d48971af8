"""What a MONAI bundle does to an image before its network sees it, by MONAI's own transforms, and back.

Images are read by the readers of this package, so the transforms that read are left out. The way back is the
inverse of every transform that moves voxels, on probabilities; where the network saw nothing is background.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tesla_med.config.bundle import BundlePreprocessing, BundleStep
from tesla_med.config.models import Intensity, Preprocessing, Region
from tesla_med.errors import ConfigError, DataError, GeometryError
from tesla_med.prepare.bundle_code import transforms_of
from tesla_med.prepare.transforms import PreparedCase
from tesla_med.types import BoolArray, IntArray, Volume

if TYPE_CHECKING:
    import torch

AXES = (("L", "R"), ("P", "A"), ("I", "S"))
LEAST = 1e-7
"""Probabilities of regions are kept this far from 0 and 1, where their logits would be infinite."""


@dataclass
class BundleCase(PreparedCase):
    """One case as the network of a bundle sees it: (1, C, D, H, W), or slices (N, C, H, W).

    Attributes:
        slices: the axis of the prepared volume along which slices lie; None for volumes.
        regions: whether the classes come from overlapping regions.
        nearest: whether the way back takes the nearest voxel in place of interpolating.
        key: what the transforms call the image.
    """

    slices: int | None = None
    regions: bool = False
    nearest: bool = False
    key: str = "image"

    def restore(self, probs: torch.Tensor) -> npt.NDArray[np.float32]:
        """Bring class probabilities back to the native grid.

        Args:
            probs: (N, L, *spatial), summing to 1 over L, on any device.

        Returns:
            (L, I, J, K) float32 in file order, summing to 1 over L; where nothing was seen, background.

        Raises:
            AdaptationError: another shape than the images', or values that are not finite.
            GeometryError: undoing the preprocessing gives another grid.
        """
        import torch
        from monai.data import MetaTensor
        from monai.transforms.utils import convert_applied_interp_mode

        from tesla_med.losses import exclusive, overlapping

        probs = self._checked(probs)
        if self.regions:
            probs = overlapping(probs.clamp_min(torch.finfo(torch.float32).tiny).log()).sigmoid()
        whole = probs[0] if self.slices is None else probs.movedim(0, 1 + self.slices)
        operations = deepcopy(self._traced.applied_operations)  # undoing takes from it
        if self.nearest:
            operations = convert_applied_interp_mode(operations, mode="nearest", align_corners=None)
        traced = MetaTensor(whole.contiguous(), affine=self._traced.affine, applied_operations=operations)
        native = self._transform.inverse({self.key: traced})[self.key].as_tensor().float()
        if tuple(native.shape[1:]) != self._shape:
            raise GeometryError(f"undoing gave shape {tuple(native.shape[1:])} instead of {self._shape}")
        if self.regions:
            native = exclusive(native.clamp(LEAST, 1 - LEAST).logit()[None])[0].exp()
        else:
            # Where the inverse pads, all classes are zero. A voxel that mixes some of that with what was seen
            # keeps the classes' proportions, as MONAI's masks do; where there is nothing else is background.
            native = native.clamp_(0.0, 1.0)
            native[0, native.sum(dim=0) == 0] = 1.0
        native /= native.sum(dim=0, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return np.ascontiguousarray(native.numpy(), np.float32)


class BundlePreprocessor:
    """Prepare volumes as a MONAI bundle says.

    Args:
        preprocessing: has ``bundle``; of the rest ``model_range`` alone counts.
        region: must be the whole field.
        num_classes: number L of classes, background included.
        channels: number C of channels.
        regions: whether the classes come from overlapping regions.

    Raises:
        ConfigError: another region.
    """

    def __init__(
        self,
        preprocessing: Preprocessing,
        region: Region,
        num_classes: int,
        *,
        channels: int,
        regions: bool,
    ) -> None:
        if preprocessing.bundle is None:
            raise ConfigError("preprocessing.bundle is missing")
        if region.kind != "whole":
            raise ConfigError(
                f"a region of interest (site.region.kind = {region.kind}) means nothing to a MONAI bundle, "
                "whose own preprocessing says what is looked at; --set site.region.kind=whole"
            )
        self.preprocessing = preprocessing
        self.config: BundlePreprocessing = preprocessing.bundle
        self.num_classes, self.channels, self.regions = num_classes, channels, regions

    def scaled(self, candidates: Iterable[Intensity]) -> dict[str, Any]:
        """Return nothing: the bundle says how intensities are scaled."""
        return {}

    def __call__(
        self, volume: Volume, region_mask: BoolArray | None = None, labels: IntArray | None = None
    ) -> BundleCase:
        """Prepare one volume.

        Args:
            volume: the image on its native grid.
            region_mask: not used.
            labels: must be None; training is MONAI's.

        Raises:
            ConfigError: labels were given, or a transform does not take its arguments.
            DataError: another number of channels, or an image that the transforms cannot take.
        """
        import torch
        from monai.data import MetaTensor

        if labels is not None:
            raise ConfigError("a bundle is trained with MONAI; this pipeline adapts and predicts only")
        if len(volume.array) != self.channels:
            raise DataError(f"{volume.path}: {len(volume.array)} channels, the model needs {self.channels}")
        transform, key = self._transform()
        image = MetaTensor(torch.from_numpy(volume.array.copy()), affine=torch.as_tensor(volume.affine))
        try:
            traced = transform({key: image})[key]
        except (RuntimeError, ValueError, TypeError, KeyError) as error:
            reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
            raise DataError(
                f"{volume.path}: the preprocessing of the bundle cannot take it: {reason[0]}"
            ) from error
        array = traced.as_tensor().float()
        if array.dim() != 4 or len(array) != self.channels:
            raise DataError(
                f"{volume.path}: the preprocessing of the bundle gave the shape {tuple(array.shape)}; "
                f"expected {self.channels} channels and three axes"
            )
        low, high = self.preprocessing.model_range
        array = (array - low) / (high - low)
        axis = self.config.slices
        images = array[None] if axis is None else array.movedim(1 + axis, 0)
        depth = array.shape[1 if axis is None else 1 + axis]
        case = BundleCase(
            images=images.contiguous(),
            labels=None,
            slice_index=tuple(range(depth)),
            depth=depth,
            num_classes=self.num_classes,
            slices=axis,
            regions=self.regions,
            nearest=self.config.nearest,
            key=key,
        )
        return replace(case, _transform=transform, _traced=traced, _shape=volume.shape)

    def _transform(self) -> tuple[Any, str]:
        """Return everything that is done to an image, and its key."""
        from monai.transforms import Compose

        if self.config.code is None:
            return Compose([built(step) for step in self.config.steps]), "image"
        return transforms_of(self.config.code)


def built(step: BundleStep) -> Any:
    """Return a transform of MONAI for the key ``image``.

    Raises:
        ConfigError: it does not take the arguments.
    """
    from monai import transforms

    arguments = {key: _argument(key, value) for key, value in step.arguments.items()}
    if step.name == "CropForegroundd":
        arguments["source_key"] = "image"
    if step.name == "Orientationd":
        arguments.setdefault("labels", AXES)
    try:
        return getattr(transforms, step.name)(keys="image", **arguments)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"preprocessing.bundle: {step.name} does not take its arguments: {error}") from None


def _argument(key: str, value: Any) -> Any:
    """Return an argument as MONAI takes it: functions and data types, which configurations name."""
    import torch

    if key == "select_fn" and isinstance(value, Mapping):
        return _Above(float(value["above"]))
    if key == "dtype" and isinstance(value, str):
        found = getattr(torch, value, None)
        if not isinstance(found, torch.dtype):
            raise ConfigError(f"preprocessing.bundle: {value!r} is not a data type of torch")
        return found
    return value


class _Above:
    """Whether values are above a threshold, for what counts as foreground."""

    def __init__(self, least: float) -> None:
        self.least = least

    def __call__(self, image: Any) -> Any:
        return image > self.least
