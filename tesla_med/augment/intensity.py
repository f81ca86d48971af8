"""Intensity transforms of batches (n, C, H, W) in [0, 1], with one strength per image.

They are differentiable in image and strength unless said otherwise, and the caller clamps to [0, 1].
Equalize, posterize and sharpness agree with the released operations up to rounding.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

BIAS_DEGREE = 3
BIAS_TERMS = (BIAS_DEGREE + 1) * (BIAS_DEGREE + 2) // 2 - 1
_BLUR_RADIUS = 6


def straight_through(output: Tensor, magnitude: Tensor, images: Tensor | None = None) -> Tensor:
    """Return ``output`` with d(output)/d(magnitude) = 1 at every pixel (Sec. 3.3 of the paper).

    If ``images`` is given, the gradient with respect to it is also passed through unchanged.
    """
    strength = magnitude.view(-1, 1, 1, 1)
    result = output if images is None else output.detach() + (images - images.detach())
    return result + (strength - strength.detach())  # adds an exact 0, so that no value leaves [0, 1]


class _UnitRange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        result = images.clamp(0, 1)
        ctx.save_for_backward(images == result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (inside,) = ctx.saved_tensors
        passed: Tensor = gradients[0] * inside
        return passed


def unit_range(images: Tensor) -> Tensor:
    """Clamp to [0, 1] with a gradient of 1 on the closed range and 0 outside.

    Pixels that lie exactly on 0 or 1 get a gradient from ``clamp`` in some releases of PyTorch and none in
    others.
    """
    result: Tensor = _UnitRange.apply(images)
    return result


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Multiply by ``factor`` (n, 1, 1, 1)."""
    return images * factor


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance from each image's mean by ``factor`` (n, 1, 1, 1)."""
    mean = luminance(images).mean(dim=(1, 2, 3), keepdim=True)
    return mean + (images - mean) * factor


def saturation(images: Tensor, factor: Tensor) -> Tensor:
    """Scale the distance from grey; anything but three channels stays as it is."""
    if images.shape[1] != 3:
        return images
    grey = luminance(images)
    return grey + (images - grey) * factor


def luminance(images: Tensor) -> Tensor:
    """Return (n, 1, H, W), the ITU-R 601 luma of RGB and the channel mean of anything else."""
    if images.shape[1] != 3:
        return images.mean(dim=1, keepdim=True)
    weights = images.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a 3x3 smooth (centre 5, others 1, over 13; edges replicated), of which 1 is the identity."""
    padded = functional.pad(images, (1, 1, 1, 1), mode="replicate")
    smooth = (9.0 * functional.avg_pool2d(padded, 3, stride=1) + 4.0 * images) / 13.0
    return smooth + (images - smooth) * factor


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel of each image to [0, 1]; constant channels are left alone."""
    low = images.amin(dim=(2, 3), keepdim=True)
    high = images.amax(dim=(2, 3), keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (images - low) / spread.clamp_min(1e-12), images)


def equalize(images: Tensor) -> Tensor:
    """Flatten the histogram of each channel (256 bins, the integer rule of PIL), without gradient."""
    from kornia.enhance import equalize as flatten

    result: Tensor = flatten(images.detach().clamp(0, 1))
    return result


def posterize(images: Tensor, magnitude: Tensor) -> Tensor:
    """Keep floor(4 + 4 m) of the 8 bits of floor(255 x), without gradient."""
    bits = torch.floor(4.0 + 4.0 * magnitude.detach()).clamp(4, 8).view(-1, 1, 1, 1)
    width = torch.pow(2.0, 8.0 - bits)
    levels = torch.floor(images.detach() * 255.0)
    return torch.floor(levels / width) * width / 255.0


def solarize(images: Tensor, magnitude: Tensor) -> Tensor:
    """Invert what lies at or above the threshold m, without gradient; m = 1 is the identity."""
    threshold = magnitude.detach().view(-1, 1, 1, 1)
    still = images.detach()
    return torch.where((still >= threshold) & (threshold < 1.0), 1.0 - still, still)


def gamma(images: Tensor, exponent: Tensor) -> Tensor:
    """Raise to the power ``exponent`` (n, 1, 1, 1)."""
    return images.clamp_min(1e-6) ** exponent


def bias_field(images: Tensor, amplitude: Tensor, draw: Tensor | None) -> Tensor:
    """Multiply by exp(amplitude * p), where p is a cubic polynomial whose largest absolute value is 1.

    Args:
        images: (n, C, H, W).
        amplitude: (n,) log amplitude.
        draw: (n, BIAS_TERMS) coefficients; None for no field.
    """
    if draw is None:
        return images
    height, width = images.shape[-2:]
    rows = torch.linspace(-1, 1, height, device=images.device, dtype=images.dtype)
    columns = torch.linspace(-1, 1, width, device=images.device, dtype=images.dtype)
    powers = [(i, j) for i in range(BIAS_DEGREE + 1) for j in range(BIAS_DEGREE + 1 - i) if i + j > 0]
    basis = torch.stack([rows[:, None] ** i * columns[None, :] ** j for i, j in powers])
    field = torch.einsum("nt,thw->nhw", draw, basis)
    field = field / field.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-6)
    return images * torch.exp(amplitude.view(-1, 1, 1, 1) * field[:, None])


def gaussian_blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Blur each image by its own ``sigma`` (n,) pixels, up to 2; edges reflected."""
    count, channels, height, width = images.shape
    radius = min(_BLUR_RADIUS, height - 1, width - 1)
    steps = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    variance = (sigma**2).view(-1, 1).clamp_min(1e-4)
    kernel = torch.exp(-0.5 * steps**2 / variance)
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(channels, dim=0)
    flat = images.reshape(1, count * channels, height, width)
    padded = functional.pad(flat, (radius, radius, radius, radius), mode="reflect")
    rows = functional.conv2d(padded, kernel[:, None, :, None], groups=count * channels)
    both = functional.conv2d(rows, kernel[:, None, None, :], groups=count * channels)
    return both.view_as(images)


def rician_noise(images: Tensor, sigma: Tensor, draw: Tensor | None) -> Tensor:
    """Return the magnitude of the image plus complex normal noise of ``sigma`` (n,).

    Args:
        images: (n, C, H, W).
        sigma: (n,) standard deviation of either part.
        draw: (n, 2, C, H, W) standard normal; None for no noise.
    """
    if draw is None:
        return images
    strength = sigma.view(-1, 1, 1, 1)
    real = images + strength * draw[:, 0]
    return torch.sqrt(real**2 + (strength * draw[:, 1]) ** 2 + 1e-12)


def ghosting(images: Tensor, strength: Tensor) -> Tensor:
    """Add ``strength`` (n,) times the image shifted by half the field along H, as an N/2 ghost."""
    ghost = torch.roll(images, shifts=images.shape[-2] // 2, dims=-2)
    return images + strength.view(-1, 1, 1, 1) * ghost


def spike(images: Tensor, amplitude: Tensor, draw: Tensor | None) -> Tensor:
    """Add the plane wave of a k-space spike; ``draw`` (n, 3) gives its two frequencies and its phase."""
    if draw is None:
        return images
    height, width = images.shape[-2:]
    rows = torch.linspace(0, 2 * math.pi, height, device=images.device).view(1, -1, 1)
    columns = torch.linspace(0, 2 * math.pi, width, device=images.device).view(1, 1, -1)
    frequency = (8.0 * draw[:, :2]).round()
    phase = frequency[:, :1, None] * rows + frequency[:, 1:2, None] * columns + draw[:, 2].view(-1, 1, 1)
    return images + amplitude.view(-1, 1, 1, 1) * torch.cos(phase)[:, None]
