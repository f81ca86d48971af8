"""Temperature scaling of probabilities, and a temperature chosen without labels.

p -> p^(1/T) / sum_c p_c^(1/T): T > 1 makes a model less confident, T < 1 more, and no voxel changes
its class. Fitting T takes labels, which a new site does not have. In their place stands how steady
the masks are when the style of the image changes (its contrast, its gamma): T is chosen so that the
mean confidence equals the share of voxels that keep their class.

This is an approximation. Agreement takes the place of accuracy, and it differs from it

* where all predictions agree on a wrong mask: agreement is high, T comes out too low and the model
  is made more confident of an error (no measure without labels can see this);
* where the style changes are weaker or stronger than the difference between source and site:
  agreement is then too high or too low, and so is the confidence that follows it;
* because one T serves all voxels: it moves the mean confidence and not its pattern.

A T at an end of its range says that the two could not be brought together; treat it with suspicion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from tesla_med.augment.warp import as_slices
from tesla_med.engine.outcome import Outcome
from tesla_med.engine.signals import stack
from tesla_med.errors import DataError
from tesla_med.models.base import predicted_class
from tesla_med.prepare.fill import hidden

GAMMAS = (0.7, 1.4)
"""Changes of contrast under which the mask should stay."""
LOWEST_TEMPERATURE = 0.5
HIGHEST_TEMPERATURE = 4.0
REGION_DILATION = 3
"""Pixels by which the region about all predicted foregrounds is dilated."""

_SMALLEST, _LARGEST = 1e-3, 1e3  # float32 neither overflows nor vanishes
_STEPS = 32
_FLAT = 1e-6
_TOLERANCE = 1e-2  # probabilities may come from bfloat16


@dataclass(frozen=True)
class TemperatureFit:
    """A temperature and what it was chosen from.

    Attributes:
        temperature: T in [``LOWEST_TEMPERATURE``, ``HIGHEST_TEMPERATURE``].
        agreement: mean share of pixels of the region that keep their class, in [0, 1]; None where
            the region is empty.
        confidence: mean highest probability over the region at T = 1, in [0, 1]; None where the
            region is empty.
        pixels: number of pixels in the region.
    """

    temperature: float
    agreement: float | None
    confidence: float | None
    pixels: int


def scale_temperature(probs: Tensor, temperature: float) -> Tensor:
    """Return softmax(ln p / T) over the classes, accumulated in float32.

    Probabilities of exactly 0 stay 0, and so exactly 1 stays 1. The most likely class of each pixel
    stays the most likely one, also where rounding would make it equal to another.

    Args:
        probs: (N, L, H, W) in [0, 1], summing to 1 over L; any floating dtype.
        temperature: T in [0.001, 1000]; 1 changes nothing but rounding.

    Returns:
        (N, L, H, W) float32 in [0, 1], summing to 1 over L.

    Raises:
        DataError: the shape is another, a value is no probability, the classes do not sum to 1,
            or T lies outside its range.
    """
    _check_probs(probs, "probabilities")
    if not _SMALLEST <= temperature <= _LARGEST:
        raise DataError(f"a temperature must lie in [{_SMALLEST:g}, {_LARGEST:g}], got {temperature:g}")
    scaled = _soften(_log(probs), temperature, dim=1)
    best = predicted_class(probs)[:, None]
    top = scaled.amax(dim=1, keepdim=True)
    lifted = torch.nextafter(top, torch.ones_like(top))  # equal to another class after rounding
    kept = predicted_class(scaled)[:, None] == best
    return scaled.scatter(1, best, torch.where(kept, scaled.gather(1, best), lifted))


def scale_volume(probs: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float32]:
    """Return (L, I, J, K) probabilities of a volume scaled by :func:`scale_temperature`.

    Raises:
        DataError: as :func:`scale_temperature`.
    """
    slices = torch.from_numpy(probs).permute(3, 0, 1, 2)
    scaled: npt.NDArray[np.float32] = scale_temperature(slices, temperature).permute(1, 2, 3, 0).numpy()
    return np.ascontiguousarray(scaled)


def style_region(masks: Sequence[Tensor], dilation: int = REGION_DILATION) -> Tensor:
    """Return the pixels near any predicted structure: all foregrounds united, dilated by a disc.

    Args:
        masks: (N, H, W) class indices of the same slices, at least one; 0 is background.
        dilation: radius of the disc in pixels, 0 for none.

    Returns:
        (N, H, W) bool.

    Raises:
        DataError: there is no mask, a mask is not three-dimensional, the shapes differ, or the
            dilation is negative.
    """
    _check_masks(masks)
    if dilation < 0:
        raise DataError(f"dilation must be at least 0 pixels, got {dilation}")
    union = torch.stack([mask != 0 for mask in masks]).any(dim=0)
    if dilation == 0 or not union.numel():
        return union
    steps = torch.arange(-dilation, dilation + 1, device=union.device)
    disc = (steps[:, None] ** 2 + steps**2 <= dilation**2).float()
    counts = functional.conv2d(union.float()[:, None], disc[None, None], padding=dilation)
    return counts[:, 0] > 0.5


def style_agreement(mask: Tensor, styled_masks: Sequence[Tensor], region: Tensor) -> float | None:
    """Return the share of the region's pixels that keep their class, averaged over style changes.

    Args:
        mask: (N, H, W) class indices of the images as they are.
        styled_masks: K >= 1 masks (N, H, W) of the same slices after a change of style.
        region: (N, H, W) bool.

    Returns:
        A number in [0, 1], or None where the region is empty.

    Raises:
        DataError: there is no styled mask, or the shapes differ.
    """
    if not len(styled_masks):
        raise DataError("expected the masks of at least one style change, got none")
    _check_masks([mask, *styled_masks, region])
    pixels = int(region.sum())
    if not pixels:
        return None
    kept = sum(int(((styled == mask) & region).sum()) for styled in styled_masks)
    return kept / (pixels * len(styled_masks))


def fit_temperature_to_masks(
    probs: Tensor, styled_masks: Sequence[Tensor], fill: Tensor | None = None
) -> TemperatureFit:
    """Choose T without labels: mean confidence over the region equals the agreement across styles.

    Confidence is the highest probability of a pixel, of the images as they are. It falls as T
    rises, so the T at which the two are equal is unique and found by bisection. Where it lies
    outside the range, the nearer end is taken. See the module's text for when the choice misleads.

    Args:
        probs: (N, L, H, W) in [0, 1], summing to 1 over L, of the images as they are.
        styled_masks: K >= 1 masks (N, H, W) of class indices 0 to L - 1, of the same slices and pixels,
            after a change of style (contrast, gamma) that leaves the anatomy in its place.
        fill: (N, H, W) bool, pixels that do not count; None for none.

    Returns:
        The temperature and what it was chosen from. T is 1 where nothing can be chosen: no
        foreground in any prediction, one class only, or probabilities of exactly 0 and 1, which no
        temperature changes.

    Raises:
        DataError: there is no mask, shapes do not fit, or values are no probabilities.
    """
    _check_probs(probs, "probabilities")
    mask = hidden(predicted_class(probs), fill)
    styled_masks = [hidden(styled, fill) for styled in styled_masks]
    region = style_region([mask, *styled_masks])
    if fill is not None:
        region &= ~fill.to(region.device)
    agreement = style_agreement(mask, styled_masks, region)
    if agreement is None:
        return TemperatureFit(1.0, None, None, 0)
    log_probs = _log(probs).movedim(1, -1)[region]
    confidence = float(_confidence(log_probs, 1.0))
    return TemperatureFit(_bisect(log_probs, agreement), agreement, confidence, len(log_probs))


def _bisect(log_probs: Tensor, target: float) -> float:
    """Return the T at which the mean confidence of (P, L) logarithms is ``target``, or an end."""
    highest = float(_confidence(log_probs, LOWEST_TEMPERATURE))
    lowest = float(_confidence(log_probs, HIGHEST_TEMPERATURE))
    if highest - lowest < _FLAT:
        return 1.0
    if target >= highest:
        return LOWEST_TEMPERATURE
    if target <= lowest:
        return HIGHEST_TEMPERATURE
    low = torch.tensor(LOWEST_TEMPERATURE, device=log_probs.device)
    high = torch.tensor(HIGHEST_TEMPERATURE, device=log_probs.device)
    for _ in range(_STEPS):  # tensors, so that no step waits for the device
        middle = (low + high) / 2
        over = _confidence(log_probs, middle) > target
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return float((low + high) / 2)


def _confidence(log_probs: Tensor, temperature: float | Tensor) -> Tensor:
    return _soften(log_probs, temperature, dim=-1).amax(dim=-1).mean()


def _soften(log_probs: Tensor, temperature: float | Tensor, dim: int) -> Tensor:
    return functional.softmax(log_probs / temperature, dim=dim)


def _log(probs: Tensor) -> Tensor:
    """Return float32 logarithms less the highest of the pixel; that of 0 is -inf, whose softmax is 0."""
    values: Tensor = probs.float().clamp(0.0, 1.0).log()
    return values - values.amax(dim=1, keepdim=True)


def _check_probs(probs: Tensor, what: str) -> None:
    if probs.dim() != 4:
        raise DataError(f"{what} must be (N, L, H, W), got shape {tuple(probs.shape)}")
    if probs.shape[1] < 1:
        raise DataError(f"{what} need at least one class, got shape {tuple(probs.shape)}")
    if not probs.numel():
        return
    values = probs.float()
    low, high = float(values.min()), float(values.max())
    error = float((values.sum(dim=1) - 1.0).abs().max())
    if not (low >= -_TOLERANCE and high <= 1.0 + _TOLERANCE):
        raise DataError(f"{what} must lie in [0, 1], got {low:g} to {high:g}; give probabilities, not logits")
    if not error <= _TOLERANCE:
        raise DataError(f"{what} must sum to 1 over the classes, got sums that differ by up to {error:g}")


def _check_masks(masks: Sequence[Tensor]) -> None:
    if not len(masks):
        raise DataError("expected at least one mask, got none")
    for mask in masks:
        if mask.dim() != 3 or mask.shape != masks[0].shape:
            raise DataError(
                f"masks must be (N, H, W) and of one shape, got {tuple(masks[0].shape)} and"
                f" {tuple(mask.shape)}"
            )


def recalibrated(outcome: Outcome, styled: Sequence[Tensor], fill: Tensor | None) -> Outcome:
    """Return an outcome with the temperature that fits masks of restyled images; see above.

    Args:
        outcome: of slices (N, L, H, W), or of a volume (1, L, D, H, W), whose slices count one by one.
        styled: masks of the restyled images, class indices (N, H, W) or (1, D, H, W).
        fill: (N, H, W) bool, pixels that do not count; None for none.
    """
    probs = outcome.probs if outcome.probs.dim() == 4 else as_slices(outcome.probs)
    found = fit_temperature_to_masks(probs, [stack(mask) for mask in styled], fill)
    signals = outcome.verdict.signals | {"temperature": found.temperature}
    verdict = replace(outcome.verdict, signals=signals)
    return replace(outcome, verdict=verdict, temperature=found.temperature)
