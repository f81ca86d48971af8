"""The 2-D U-Net of the TeSLA release, of any width (64 there) and with any of three norms (batch there).

Two (3x3 convolution, batch norm, ReLU) a level; encoder widths 1, 2, 4, 8, 8 times ``width`` with
2x2 max pooling between; decoder: bilinear upsampling with aligned corners, the skip first in the
concatenation, halved middle width; 1x1 head. State dict keys are those of the release.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.config.models import Section
from tesla_med.models.base import MODELS, Network

Norm = Literal["batch", "instance", "group"]
GROUPS = 8
"""Groups of channels of a group norm, if they divide the channels."""


class UNetParams(Section):
    """Parameters of the U-Net."""

    width: int = Field(64, ge=1, description="channels of the first level")
    norm: Norm = Field(
        "batch", description="what features are normalised by: the batch, each image, or groups of channels"
    )


class _ShiftedBatchNorm(nn.BatchNorm2d):
    """Batch norm of ``features + shift`` that never forms the sum.

    The convolutions before the norms have biases. Batch statistics take a bias out again, and
    running ones can be shifted instead, so adding it to every pixel is a pass over memory for nothing.
    Running statistics come out as if it had been added.
    """

    def forward(self, features: Tensor, shift: Tensor | None = None) -> Tensor:
        if shift is None or self.running_mean is None:
            return super().forward(features)
        # Backward never reads the running mean of a training pass, so moving it below is no harm: .data
        shifted = self.running_mean.data if self.training else self.running_mean - shift.detach()
        # Batch statistics leave the bias no say, so its gradient is zero; it is there all the same.
        offset = self.bias + 0.0 * shift if torch.is_grad_enabled() and shift.requires_grad else self.bias
        momentum = 0.1 if self.momentum is None else self.momentum
        output = functional.batch_norm(
            features,
            shifted,
            self.running_var,
            self.weight,
            offset,
            self.training,
            momentum,
            self.eps,
        )
        if self.training and momentum:
            self.running_mean.add_(shift.detach(), alpha=momentum)
        return output


def _make_norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return _ShiftedBatchNorm(channels)
    if kind == "instance":
        return nn.InstanceNorm2d(channels, affine=True)
    return nn.GroupNorm(math.gcd(GROUPS, channels), channels)


class _DoubleConv(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: Norm, middle: int | None = None) -> None:
        super().__init__()
        middle = middle or outputs
        self.double_conv = nn.Sequential(
            nn.Conv2d(inputs, middle, 3, padding=1),
            _make_norm(norm, middle),
            nn.ReLU(inplace=True),
            nn.Conv2d(middle, outputs, 3, padding=1),
            _make_norm(norm, outputs),
            nn.ReLU(inplace=True),
        )

    def forward(self, features: Tensor) -> Tensor:
        layers = self.double_conv
        features = layers[2](_normalised(features, layers[0], layers[1]))
        return layers[5](_normalised(features, layers[3], layers[4]))  # type: ignore[no-any-return]


def _normalised(features: Tensor, conv: nn.Module, norm: nn.Module) -> Tensor:
    """Convolve and normalise; with running statistics and gradients the bias has one, so it is added."""
    assert isinstance(conv, nn.Conv2d)  # noqa: S101 - for the type checker
    if not isinstance(norm, _ShiftedBatchNorm) or (torch.is_grad_enabled() and not norm.training):
        return norm(conv(features))  # type: ignore[no-any-return]
    plain = functional.conv2d(features, conv.weight, None, padding=1)
    return norm(plain, conv.bias)  # type: ignore[no-any-return]


class _Down(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), _DoubleConv(inputs, outputs, norm))

    def forward(self, features: Tensor) -> Tensor:
        return self.maxpool_conv(features)  # type: ignore[no-any-return]


class _Up(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: Norm) -> None:
        super().__init__()
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv = _DoubleConv(inputs, outputs, norm, inputs // 2)

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):  # which would make float32 of bfloat16
            upsampled = self.up(features)
        return self.conv(torch.cat([skip, upsampled], dim=1))  # type: ignore[no-any-return]


class _Out(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, classes, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.conv(features)  # type: ignore[no-any-return]


@MODELS.register("unet")
class UNet(Network):
    """U-Net in the layout of the TeSLA release; see the module's docstring."""

    Params = UNetParams
    summary = "2-D U-Net in the layout of the TeSLA release, any width"
    example = {"width": 4}
    divisor = 16
    minimum = 32  # two pixels a side at the bottom, so that batch statistics exist

    def __init__(self, channels: int, classes: int, width: int = 64, norm: Norm = "batch") -> None:
        super().__init__()
        self.inc = _DoubleConv(channels, width, norm)
        self.down1 = _Down(width, 2 * width, norm)
        self.down2 = _Down(2 * width, 4 * width, norm)
        self.down3 = _Down(4 * width, 8 * width, norm)
        self.down4 = _Down(8 * width, 8 * width, norm)
        self.up1 = _Up(16 * width, 4 * width, norm)
        self.up2 = _Up(8 * width, 2 * width, norm)
        self.up3 = _Up(4 * width, width, norm)
        self.up4 = _Up(2 * width, width, norm)
        self.outc = _Out(width, classes)

    @classmethod
    def build(cls, params: UNetParams, channels: int, classes: int) -> UNet:
        """Return a new U-Net."""
        return cls(channels, classes, params.width, params.norm)

    @property
    def encoder(self) -> Sequence[nn.Module]:
        """The way down."""
        return (self.inc, self.down1, self.down2, self.down3, self.down4)

    @property
    def head(self) -> nn.Module:
        """The 1x1 convolution from features to logits."""
        return self.outc

    def logits(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W), H and W multiples of 16, to logits (N, L, H, W)."""
        level1 = self.inc(images)
        level2 = self.down1(level1)
        level3 = self.down2(level2)
        level4 = self.down3(level3)
        level5 = self.down4(level4)
        features = self.up1(level5, level4)
        features = self.up2(features, level3)
        features = self.up3(features, level2)
        features = self.up4(features, level1)
        return self.outc(features)  # type: ignore[no-any-return]
