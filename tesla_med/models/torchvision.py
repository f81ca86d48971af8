"""Tile classifiers of torchvision: MobileNetV2, ResNet-50 and ViT-B/16, with one head and any channels.

Weights trained on ImageNet are never fetched; ``state_dict`` keys are torchvision's below ``network``, so
that local ones can be loaded.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.config.models import Section
from tesla_med.config.paths import user_path
from tesla_med.errors import CheckpointError
from tesla_med.io.fetched import check_fetched
from tesla_med.models.base import MODELS, Network


class _Classifier(Network):
    """A network of torchvision that maps images (N, C, H, W) to logits (N, L)."""

    task = "classification"
    minimum = 64

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def logits(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to logits (N, L)."""
        output: Tensor = self.network(images)
        return output

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) in the model's range to logits (N, L); small images are enlarged first."""
        size = self._size(images.shape[-2], images.shape[-1])
        if size != tuple(images.shape[-2:]):
            images = functional.interpolate(images, size, mode="bilinear", align_corners=False)
        return self.logits(images)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        return max(height, self.minimum), max(width, self.minimum)


def _with_channels(layer: nn.Conv2d, channels: int) -> nn.Conv2d:
    """Return the first convolution for another number of channels."""
    if layer.in_channels == channels:
        return layer
    return nn.Conv2d(
        channels,
        layer.out_channels,
        cast("tuple[int, int]", layer.kernel_size),
        cast("tuple[int, int]", layer.stride),
        cast("tuple[int, int]", layer.padding),
        bias=layer.bias is not None,
    )


def _start_from(network: nn.Module, weights: str | None, head: str) -> None:
    """Load local ImageNet weights but for the head and a first layer of other channels.

    Raises:
        CheckpointError: no such file, or it does not fit.
    """
    if weights is None:
        return
    path = user_path(weights)
    check_fetched(path, CheckpointError)
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such file; leave out model.params.weights to start from random weights"
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    own = network.state_dict()
    fits = {
        name: value
        for name, value in state.items()
        if name in own and own[name].shape == value.shape and not name.startswith(head)
    }
    if len(fits) < len(own) // 2:
        raise CheckpointError(
            f"{path}: {len(fits)} of {len(own)} tensors fit this network; is the file for another network?"
        )
    network.load_state_dict(own | fits)


class MobileNetV2Params(Section):
    """Parameters of MobileNetV2."""

    width: float = Field(1.0, gt=0, description="multiplier of all widths")
    weights: str | None = Field(None, description="local file of torchvision's ImageNet weights")


@MODELS.register("mobilenet_v2")
class MobileNetV2(_Classifier):
    """MobileNetV2 (Sandler et al., CVPR 2018), the paper's network for tiles."""

    Params = MobileNetV2Params
    summary = "MobileNetV2 of torchvision, for tiles"
    example = {"width": 0.25}

    @classmethod
    def build(cls, params: Any, channels: int, classes: int) -> MobileNetV2:
        """Return a fresh network."""
        from torchvision.models import mobilenet_v2

        network = mobilenet_v2(weights=None, num_classes=classes, width_mult=params.width, dropout=0.0)
        network.features[0][0] = _with_channels(network.features[0][0], channels)
        _start_from(network, params.weights, "classifier")
        return cls(network)

    @property
    def head(self) -> nn.Module:
        """The last linear layer."""
        return cast("nn.Module", self.network.classifier[1])  # type: ignore[index]


class ResNet50Params(Section):
    """Parameters of ResNet-50."""

    width: int = Field(64, ge=1, description="of a group; 64 is the published network")
    depth: tuple[int, int, int, int] = Field((3, 4, 6, 3), description="blocks per stage")
    weights: str | None = Field(None, description="local file of torchvision's ImageNet weights")


@MODELS.register("resnet50")
class ResNet50(_Classifier):
    """ResNet-50 (He et al., CVPR 2016)."""

    Params = ResNet50Params
    summary = "ResNet-50 of torchvision, for tiles"
    example = {"width": 4, "depth": [1, 1, 1, 1]}

    @classmethod
    def build(cls, params: Any, channels: int, classes: int) -> ResNet50:
        """Return a fresh network."""
        from torchvision.models.resnet import Bottleneck, ResNet

        network = ResNet(Bottleneck, list(params.depth), num_classes=classes, width_per_group=params.width)
        network.conv1 = _with_channels(network.conv1, channels)
        _start_from(network, params.weights, "fc")
        return cls(network)

    @property
    def head(self) -> nn.Module:
        """The last linear layer."""
        return cast("nn.Module", self.network.fc)


class ViTParams(Section):
    """Parameters of the vision transformer."""

    image_size: int = Field(
        224, ge=16, multiple_of=16, description="pixels per side; images of other sizes are resized"
    )
    layers: int = Field(12, ge=1)
    heads: int = Field(12, ge=1)
    width: int = Field(768, ge=1, description="of a token; a multiple of heads")
    weights: str | None = Field(None, description="local file of torchvision's ImageNet weights")


@MODELS.register("vit_b_16")
class ViT(_Classifier):
    """ViT-B/16 (Dosovitskiy et al., ICLR 2021): no batch norm, so methods that need some say so."""

    Params = ViTParams
    summary = "ViT-B/16 of torchvision, for tiles"
    example = {"image_size": 32, "layers": 1, "heads": 2, "width": 32}

    def __init__(self, network: nn.Module, image_size: int) -> None:
        super().__init__(network)
        self.image_size = image_size

    @classmethod
    def build(cls, params: Any, channels: int, classes: int) -> ViT:
        """Return a fresh network."""
        from torchvision.models import VisionTransformer

        network = VisionTransformer(
            image_size=params.image_size,
            patch_size=16,
            num_layers=params.layers,
            num_heads=params.heads,
            hidden_dim=params.width,
            mlp_dim=4 * params.width,
            num_classes=classes,
        )
        nn.init.trunc_normal_(network.heads[-1].weight, std=0.02)  # zeros there, which nothing learns from
        network.conv_proj = _with_channels(network.conv_proj, channels)
        _start_from(network, params.weights, "heads")
        return cls(network, params.image_size)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        return self.image_size, self.image_size

    @property
    def head(self) -> nn.Module:
        """The last linear layer."""
        return cast("nn.Module", self.network.heads[-1])  # type: ignore[index]
