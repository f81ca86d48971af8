"""Randomise a batch of labelled slices as a :class:`~tesla_med.augment.families.Family` says.

Everything is done on the device of the images and for the whole batch. All numbers but the noise itself are
drawn on the CPU by one generator, so which images an operation touches is known without waiting for the
device, and only these are worked on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from tesla_med.augment import intensity, warp
from tesla_med.augment.families import Family

LEVELS = 512
"""Entries of the table of an intensity map, between which it is linear."""


class Draws:
    """Numbers of one batch, drawn on the CPU.

    Args:
        count: images of the batch.
        generator: on the CPU.
        device: where the images are.
    """

    def __init__(self, count: int, generator: torch.Generator, device: torch.device) -> None:
        self.count, self.generator, self.device = count, generator, device

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        """Return (count, *shape) from [low, high), on the CPU."""
        return low + (high - low) * torch.rand(self.count, *shape, generator=self.generator)

    def normal(self, *shape: int) -> Tensor:
        """Return (count, *shape) standard normal numbers, on the CPU."""
        return torch.randn(self.count, *shape, generator=self.generator)

    def chosen(self, probability: float) -> Tensor:
        """Return the indices of the images that an operation touches, on the CPU."""
        return (torch.rand(self.count, generator=self.generator) < probability).nonzero().flatten()

    def sent(self, values: Tensor) -> Tensor:
        """Return values on the device."""
        return values.to(self.device, non_blocking=True)


def randomise(
    images: Tensor, labels: Tensor, family: Family, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Vary images and labels alike in geometry, images in intensity.

    Args:
        images: (N, C, H, W) float32 in [0, 1]; the first spatial axis runs left-right.
        labels: (N, H, W) int64.
        family: what to do.
        generator: on the CPU. Noise comes from the device's own generator.

    Returns:
        Images in [0, 1] and labels of the same shapes.
    """
    draws = Draws(len(images), generator, images.device)
    images, labels = _moved(images, labels, family, draws)
    with _untuned():
        return _restyled(images, family, draws), labels


def restyle(images: Tensor, family: Family, generator: torch.Generator) -> Tensor:
    """Vary intensities only; arguments and result as of :func:`randomise`."""
    with _untuned():
        return _restyled(images, family, Draws(len(images), generator, images.device))


def _untuned() -> AbstractContextManager[None]:
    """Keep cuDNN from measuring its algorithms anew for every number of images that are touched."""
    result: AbstractContextManager[None] = torch.backends.cudnn.flags(benchmark=False)
    return result


def _restyled(images: Tensor, family: Family, draws: Draws) -> Tensor:
    images = mapped(images, _maps(family, draws))
    images = _touched(images, draws, family.convolution, _blended_convolutions)
    images = _touched(images, draws, family.random_filter, _random_filter)
    images = _field(images, family, draws)
    images = _clipped(images, family, draws)
    images = _resolution(images, family, draws)
    images = _noise(images, family, draws)
    return _finished(images, family, draws).clamp(0, 1)


# ------------------------------------------------------------ geometry


def _moved(images: Tensor, labels: Tensor, family: Family, draws: Draws) -> tuple[Tensor, Tensor]:
    height, width = images.shape[-2:]
    angle = draws.uniform(-1, 1) * math.radians(family.rotation)
    scale = torch.exp(draws.uniform(-1, 1) * family.zoom)
    mirrored = torch.where(draws.uniform(0, 1) < family.flip, -1.0, 1.0)
    shift = 2.0 * family.shift * draws.uniform(-1, 1, 2)
    cos, sin, ratio = torch.cos(angle) * scale, torch.sin(angle) * scale, width / height
    # the first spatial axis is the y of a sampling grid; angles are kept whatever the aspect
    theta = torch.stack(
        [cos, -sin / ratio, shift[:, 0], sin * ratio * mirrored, cos * mirrored, shift[:, 1]], dim=1
    ).view(-1, 2, 3)
    grid = warp.sampling_grid(draws.sent(theta), height, width)
    probability, strength = family.elastic
    if len(index := draws.chosen(probability)):
        control = draws.sent(strength * draws.normal(2, 6, 6)[index])
        where = draws.sent(index)
        field = functional.interpolate(control, (height, width), mode="bicubic", align_corners=True)
        grid = grid.index_add(0, where, field.permute(0, 2, 3, 1))
    moved = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    targets = functional.grid_sample(
        labels[:, None].to(images.dtype), grid, mode="nearest", padding_mode="border", align_corners=False
    )
    return moved, targets[:, 0].round().long()


# ------------------------------------------------------------ intensity maps


def _maps(family: Family, draws: Draws) -> Tensor:
    """Return the tables (N, LEVELS + 1) of the intensity maps of a batch, on the device."""
    levels = torch.linspace(0, 1, LEVELS + 1)
    table = levels.expand(draws.count, -1)
    for inverted, (probability, strength) in ((False, family.gamma), (True, family.inverted_gamma)):
        on = draws.uniform(0, 1)[:, None] < probability
        exponent = torch.exp(draws.uniform(-1, 1, 1) * strength)
        changed = 1 - (1 - table) ** exponent if inverted else table**exponent
        table = torch.where(on, changed, table)
    points, chosen = draws.uniform(0, 1, 2, 2), draws.chosen(family.bezier)
    falls = draws.uniform(0, 1) < family.inversion
    if len(chosen):
        table = table.clone()
        table[chosen] = interpolated(bezier(points[chosen]), table[chosen])
    table = torch.where(falls[:, None], 1 - table, table)
    return draws.sent(table)


def bezier(points: Tensor) -> Tensor:
    """Return tables (n, LEVELS + 1) of the cubic Bezier curves from (0, 0) to (1, 1).

    Args:
        points: (n, 2, 2) the two inner control points (x, y) in [0, 1], so that x rises along the curve.
    """
    t = torch.linspace(0, 1, LEVELS + 1)
    weights = torch.stack([3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t)])
    x, y = ((points[:, :, axis] @ weights) + t**3 for axis in (0, 1))
    levels = torch.linspace(0, 1, LEVELS + 1).expand(len(points), -1).contiguous()
    right = torch.searchsorted(x.contiguous(), levels).clamp(1, LEVELS)
    x0, x1 = x.gather(1, right - 1), x.gather(1, right)
    y0, y1 = y.gather(1, right - 1), y.gather(1, right)
    return (y0 + (y1 - y0) * ((levels - x0) / (x1 - x0).clamp_min(1e-9)).clamp(0, 1)).clamp(0, 1)


def interpolated(table: Tensor, values: Tensor) -> Tensor:
    """Return what tables (n, LEVELS + 1) give for values (n, M) in [0, 1], linear between entries."""
    place = values * LEVELS
    low = place.floor().clamp(0, LEVELS - 1)
    index = low.long()
    first = table.gather(1, index)
    return first + (table.gather(1, index + 1) - first) * (place - low)


def mapped(images: Tensor, table: Tensor) -> Tensor:
    """Return images (N, C, H, W) in [0, 1] sent through their own intensity maps (N, LEVELS + 1)."""
    return interpolated(table, images.flatten(1)).view_as(images)


# ------------------------------------------------------------ random convolutions


def _touched(images: Tensor, draws: Draws, probability: float, change: Callable[..., Tensor]) -> Tensor:
    """Return images of which ``change(chosen images, draws, index)`` replaced some."""
    index = draws.chosen(probability)
    if not len(index):
        return images
    where = draws.sent(index)
    return images.index_copy(0, where, change(images[where], draws, index))


def _blended_convolutions(images: Tensor, draws: Draws, index: Tensor) -> Tensor:
    """Return two GIN copies of each image, blended by a smooth random field (IPA), in [0, 1]."""
    first, second = (_shallow_network(images, draws, index) for _ in range(2))
    height, width = images.shape[-2:]
    control = draws.sent(draws.normal(1, max(2, height // 48), max(2, width // 48))[index])
    field = functional.interpolate(control, (height, width), mode="bicubic", align_corners=True).exp()
    share = rescaled(field)
    return rescaled(share * first + (1 - share) * second)


def _shallow_network(images: Tensor, draws: Draws, index: Tensor) -> Tensor:
    """Return GIN of images (n, C, H, W): four random layers, mixed with the input, its norm restored."""
    count, channels, height, width = images.shape
    widths = (channels, 2, 2, 2, channels)
    made = images
    for layer, (before, after) in enumerate(pairwise(widths)):
        kernel = draws.normal(after, before, 3, 3)[index]
        single = draws.uniform(0, 1)[index] < 0.5
        centre = torch.zeros(3, 3)
        centre[1, 1] = 1.0
        kernel = torch.where(single.view(-1, 1, 1, 1, 1), kernel * centre, kernel)
        shift = draws.sent(draws.normal(after, 1)[index])
        patches = functional.unfold(made, 3, padding=1)  # a product each: faster than grouped convolutions
        made = torch.baddbmm(shift, draws.sent(kernel.flatten(2)), patches).view(count, -1, height, width)
        if layer < 3:
            made = functional.leaky_relu(made, 0.01)
    share = draws.sent(draws.uniform(0, 1, 1, 1, 1)[index])
    mixed = share * made + (1 - share) * images
    norms = (item.flatten(1).norm(dim=1).view(-1, 1, 1, 1) for item in (images, mixed))
    before_norm, after_norm = norms
    restored: Tensor = mixed * (before_norm / after_norm.clamp_min(1e-5))
    return restored


def _random_filter(images: Tensor, draws: Draws, index: Tensor) -> Tensor:
    """Return RandConv of images (n, C, H, W): kernel 1, 3, 5 or 7, mixed with the input, moments restored."""
    count, channels, height, width = images.shape
    kernels = draws.normal(channels, channels, 7, 7)[index]
    radius = (4 * draws.uniform(0, 1)[index]).long().clamp(0, 3)
    offset = torch.maximum(*torch.meshgrid(*[(torch.arange(7) - 3).abs()] * 2, indexing="ij"))
    inside = (offset <= radius.view(-1, 1, 1)).float()
    scale = (channels * inside.sum(dim=(1, 2))).rsqrt()
    kernels = kernels * (inside * scale.view(-1, 1, 1))[:, None, None]
    weight = draws.sent(kernels.flatten(0, 1))
    flat = functional.pad(images.reshape(1, -1, height, width), (3, 3, 3, 3), mode="replicate")
    made = functional.conv2d(flat, weight, groups=count).view_as(images)
    share = draws.sent(draws.uniform(0, 1, 1, 1, 1)[index])
    mixed = share * made + (1 - share) * images
    spread, centre = torch.std_mean(images, dim=(2, 3), keepdim=True)
    own_spread, own_centre = torch.std_mean(mixed, dim=(2, 3), keepdim=True)
    return rescaled((mixed - own_centre) / own_spread.clamp_min(1e-5) * spread + centre)


def rescaled(images: Tensor) -> Tensor:
    """Return images (n, C, H, W) with each image's range stretched to [0, 1]."""
    low, high = images.amin(dim=(1, 2, 3), keepdim=True), images.amax(dim=(1, 2, 3), keepdim=True)
    return (images - low) / (high - low).clamp_min(1e-6)


# ------------------------------------------------------------ coils and range


def _field(images: Tensor, family: Family, draws: Draws) -> Tensor:
    height, width = images.shape[-2:]
    probability, strength = family.bias

    def biased(chosen: Tensor, draws: Draws, index: Tensor) -> Tensor:
        control = draws.sent((draws.uniform(0, strength, 1, 1, 1) * draws.normal(1, 3, 3))[index])
        field = functional.interpolate(control, (height, width), mode="bicubic", align_corners=True).exp()
        return rescaled(chosen * field)

    images = _touched(images, draws, probability, biased)
    probability, gain = family.hot_spot

    def lit(chosen: Tensor, draws: Draws, index: Tensor) -> Tensor:
        centre = draws.sent(draws.uniform(-0.7, 0.7, 2)[index])
        size = draws.sent(draws.uniform(0.15, 0.5, 1)[index])
        return rescaled(
            chosen * hot_spot(height, width, centre, size, draws.sent(draws.uniform(0, gain, 1)[index]))
        )

    return _touched(images, draws, probability, lit)


def hot_spot(height: int, width: int, centre: Tensor, size: Tensor, gain: Tensor) -> Tensor:
    """Return 1 + gain exp(-r^2 / 2 size^2) as (n, 1, H, W), the field of a receive coil beside the object.

    Args:
        height: H.
        width: W.
        centre: (n, 2) in half fields, [-1, 1].
        size: (n, 1) in half fields.
        gain: (n, 1).
    """
    rows = torch.linspace(-1, 1, height, device=centre.device)[None, :, None] - centre[:, 0, None, None]
    columns = torch.linspace(-1, 1, width, device=centre.device)[None, None, :] - centre[:, 1, None, None]
    distance = rows.square() + columns.square()
    spot = 1 + gain[:, :, None] * torch.exp(-0.5 * distance / size[:, :, None].square())
    return spot[:, None]


def _clipped(images: Tensor, family: Family, draws: Draws) -> Tensor:
    """Return images some of which had both ends of their histogram cut off."""
    probability, most = family.clipping
    index = draws.chosen(probability)
    cut = draws.uniform(0, most / 100, 2)[index]
    if not len(index):
        return images
    where = draws.sent(index)
    chosen = images[where]
    # the histogram of every fourth row and column tells the percentiles well enough
    ordered = chosen[..., ::4, ::4].flatten(1).sort(dim=1).values
    last = ordered.shape[1] - 1
    place = draws.sent(torch.stack([cut[:, 0] * last, (1 - cut[:, 1]) * last], dim=1).round().long())
    low, high = (ordered.gather(1, place)[:, side].view(-1, 1, 1, 1) for side in (0, 1))
    stretched = ((chosen - low) / (high - low).clamp_min(1e-3)).clamp(0, 1)
    return images.index_copy(0, where, stretched)


# ------------------------------------------------------------ resolution, noise, display range


def _resolution(images: Tensor, family: Family, draws: Draws) -> Tensor:
    def blurred(chosen: Tensor, draws: Draws, index: Tensor) -> Tensor:
        most = family.blur[1]
        return intensity.gaussian_blur(chosen, draws.sent(draws.uniform(min(0.3, most), most)[index]))

    def sharpened(chosen: Tensor, draws: Draws, index: Tensor) -> Tensor:
        factor = draws.sent(draws.uniform(0, family.sharpen[1], 1, 1, 1)[index])
        smooth = intensity.gaussian_blur(chosen, torch.ones(len(index), device=chosen.device))
        return (chosen + factor * (chosen - smooth)).clamp(0, 1)

    def coarsened(chosen: Tensor, draws: Draws, index: Tensor) -> Tensor:
        share = float(draws.uniform(family.coarse[1], 1)[0])
        size = [max(8, round(share * side)) for side in chosen.shape[-2:]]
        small = functional.interpolate(chosen, size, mode="bilinear", antialias=True)
        return functional.interpolate(small, chosen.shape[-2:], mode="bilinear", align_corners=False)

    images = _touched(images, draws, family.blur[0], blurred)
    images = _touched(images, draws, family.sharpen[0], sharpened)
    return _touched(images, draws, family.coarse[0], coarsened)


def _noise(images: Tensor, family: Family, draws: Draws) -> Tensor:
    probability, most = family.noise
    on = draws.uniform(0, 1) < probability
    level = torch.where(on, draws.uniform(0, most), 0.0)
    if not bool(on.any()):
        return images
    noise = torch.randn(images.shape, device=images.device)
    return images + draws.sent(level).view(-1, 1, 1, 1) * noise


def _finished(images: Tensor, family: Family, draws: Draws) -> Tensor:
    factor = draws.sent(torch.exp(draws.uniform(-1, 1, 1, 1, 1) * family.contrast))
    offset = draws.sent(draws.uniform(-1, 1, 1, 1, 1) * family.brightness)
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    return (images - mean) * factor + mean + offset
