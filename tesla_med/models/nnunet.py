"""The networks of nnU-Net v2, with the names of its weights, predicting in tiles as it does.

Plain convolutional U-Net (Isensee et al., Nature Methods 2021) and the one with a residual encoder (Isensee
et al., nnU-Net Revisited, MICCAI 2024), in two or three dimensions. Several folds are an ensemble: the mean
of their logits. Overlapping regions become classes that exclude each other
(see :func:`tesla_med.losses.exclusive`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.config.models import Section
from tesla_med.config.nnunet import STAGES
from tesla_med.errors import ConfigError
from tesla_med.models.base import MODELS, Network
from tesla_med.models.tiling import tiled

Widths = tuple[Annotated[int, Field(ge=1, le=4096)], ...]
Counts = tuple[Annotated[int, Field(ge=1, le=64)], ...]
Sizes = tuple[Annotated[int, Field(ge=1, le=64)], ...]
Patch = tuple[Annotated[int, Field(ge=1, le=4096)], ...]


class NnunetParams(Section):
    """Parameters of an nnU-Net; lists have an entry for each stage of the encoder, from the finest."""

    kind: Literal["PlainConvUNet", "ResidualEncoderUNet"] = "PlainConvUNet"
    features: Widths = Field(min_length=2, max_length=STAGES)
    kernels: tuple[Sizes, ...] = Field(description="sides of the kernels, which gives the number of axes")
    strides: tuple[Sizes, ...] = Field(description="by which a stage shrinks what it gets")
    blocks: Counts = Field(description="convolutions, or residual blocks, of each stage")
    decoder_blocks: Counts = Field(description="convolutions of each stage of the decoder, from the coarsest")
    bias: bool = True
    norm: Literal["InstanceNorm", "BatchNorm"] | None = "InstanceNorm"
    norm_options: dict[str, float | bool] = {}
    activation: Literal["LeakyReLU", "ReLU", "ELU", "GELU", "SiLU", "PReLU"] | None = "LeakyReLU"
    activation_options: dict[str, float | bool | str] = {}
    activation_first: bool = Field(False, description="activation before norm")
    stem: int | None = Field(
        None, ge=1, le=4096, description="features before the first stage of a residual encoder"
    )
    regions: bool = Field(False, description="outputs are overlapping regions, not classes")
    folds: int = Field(1, ge=1, description="networks whose logits are averaged")
    patch: Patch | None = Field(None, description="size of the tiles of a prediction; null: whole images")
    mirror: tuple[Annotated[int, Field(ge=0, le=2)], ...] = Field(
        (), description="spatial axes over which the tiles of a prediction are mirrored too"
    )

    @model_validator(mode="after")
    def _consistent(self) -> NnunetParams:
        stages = len(self.features)
        lengths = {len(self.kernels), len(self.strides), len(self.blocks), len(self.decoder_blocks) + 1}
        if lengths != {stages}:
            raise ValueError(f"features of {stages} stages, but other lists have {sorted(lengths)}")
        axes = {len(item) for item in (*self.kernels, *self.strides, *([self.patch] if self.patch else []))}
        if axes not in ({2}, {3}):
            raise ValueError(
                f"kernels, strides and patch must all have two or three axes, not {sorted(axes)}"
            )
        if any(side % 2 == 0 for kernel in self.kernels for side in kernel):
            raise ValueError("sides of kernels must be odd")
        if self.mirror and max(self.mirror) >= self.axes:
            raise ValueError(f"mirror {self.mirror} names an axis that images of {self.axes} axes lack")
        return self

    @property
    def axes(self) -> int:
        """Number of spatial axes, 2 or 3."""
        return len(self.kernels[0])


class _Block(nn.Module):
    """A convolution with its norm and activation."""

    def __init__(
        self,
        p: NnunetParams,
        channels: tuple[int, int],
        kernel: Sequence[int],
        stride: Sequence[int],
        *,
        bias: bool | None = None,
        activation: bool = True,
    ) -> None:
        super().__init__()
        padding = [(side - 1) // 2 for side in kernel]
        layers = vars(nn)
        convolution = layers[f"Conv{p.axes}d"]
        self.conv = convolution(*channels, kernel, stride, padding, bias=p.bias if bias is None else bias)
        if p.norm is not None:
            self.norm = layers[f"{p.norm}{p.axes}d"](channels[1], **p.norm_options)
        if p.activation is not None and activation:
            self.nonlin = layers[p.activation](**p.activation_options)
        second = ("nonlin", "norm") if p.activation_first else ("norm", "nonlin")
        self._order = [name for name in second if hasattr(self, name)]

    def forward(self, features: Tensor) -> Tensor:
        features = self.conv(features)
        for name in self._order:
            features = getattr(self, name)(features)
        return features


class _Repeated(nn.Module):
    """Blocks one after the other, of which the first changes channels and size."""

    block: ClassVar[Callable[..., nn.Module]]
    name: ClassVar[str]
    """Under which nnU-Net has them."""

    def __init__(
        self,
        p: NnunetParams,
        count: int,
        channels: tuple[int, int],
        kernel: Sequence[int],
        stride: Sequence[int],
    ) -> None:
        super().__init__()
        make, ones = type(self).block, [1] * p.axes
        rest = [make(p, (channels[1], channels[1]), kernel, ones) for _ in range(count - 1)]
        self.add_module(self.name, nn.Sequential(make(p, channels, kernel, stride), *rest))

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = getattr(self, self.name)(features)
        return output


class _Stack(_Repeated):
    block = _Block
    name = "convs"


class _Residual(nn.Module):
    """Two convolutions beside a shortcut that averages where it shrinks (ResNet-D, He et al. 2019)."""

    def __init__(
        self, p: NnunetParams, channels: tuple[int, int], kernel: Sequence[int], stride: Sequence[int]
    ) -> None:
        super().__init__()
        ones = [1] * p.axes
        self.conv1 = _Block(p, channels, kernel, stride)
        self.conv2 = _Block(p, (channels[1], channels[1]), kernel, ones, activation=False)
        self.nonlin2 = (
            nn.Identity() if p.activation is None else vars(nn)[p.activation](**p.activation_options)
        )
        skip: list[nn.Module] = []
        if any(step != 1 for step in stride):
            skip.append(vars(nn)[f"AvgPool{p.axes}d"](tuple(stride), tuple(stride)))
        if channels[0] != channels[1]:
            skip.append(_Block(p, channels, ones, ones, bias=False, activation=False))
        self.skip = nn.Sequential(*skip)

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.nonlin2(self.conv2(self.conv1(features)) + self.skip(features))
        return output


class _Residuals(_Repeated):
    block = _Residual
    name = "blocks"


class _Encoder(nn.Module):
    def __init__(self, p: NnunetParams, channels: int) -> None:
        super().__init__()
        self.stem: nn.Module | None = None
        residual = p.kind == "ResidualEncoderUNet"
        if residual:
            stem = p.stem or p.features[0]
            self.stem = _Stack(p, 1, (channels, stem), p.kernels[0], [1] * p.axes)
            channels = stem
        stages: list[nn.Module] = []
        for width, kernel, stride, count in zip(p.features, p.kernels, p.strides, p.blocks, strict=True):
            stage = (_Residuals if residual else _Stack)(p, count, (channels, width), kernel, stride)
            stages.append(stage if residual else nn.Sequential(stage))
            channels = width
        self.stages = nn.Sequential(*stages)

    def forward(self, images: Tensor) -> list[Tensor]:
        features = images if self.stem is None else self.stem(images)
        found = []
        for stage in self.stages:
            features = stage(features)
            found.append(features)
        return found


class _Decoder(nn.Module):
    """Upwards again; ``seg_layers`` of the coarser stages, used in training only, are kept as they came."""

    def __init__(self, p: NnunetParams, outputs: int) -> None:
        super().__init__()
        layers = vars(nn)
        ups, stages, heads = [], [], []
        for stage in range(1, len(p.features)):
            below, beside = p.features[-stage], p.features[-stage - 1]
            stride = p.strides[-stage]
            ups.append(layers[f"ConvTranspose{p.axes}d"](below, beside, stride, stride, bias=p.bias))
            count, kernel = p.decoder_blocks[stage - 1], p.kernels[-stage - 1]
            stages.append(_Stack(p, count, (2 * beside, beside), kernel, [1] * p.axes))
            heads.append(layers[f"Conv{p.axes}d"](beside, outputs, 1, 1, 0, bias=True))
        self.stages = nn.ModuleList(stages)
        self.transpconvs = nn.ModuleList(ups)
        self.seg_layers = nn.ModuleList(heads)

    def forward(self, skips: list[Tensor]) -> Tensor:
        features = skips[-1]
        for up, stage, skip in zip(self.transpconvs, self.stages, skips[-2::-1], strict=True):
            features = stage(torch.cat([up(features), skip], dim=1))
        output: Tensor = self.seg_layers[-1](features)
        return output


class _Fold(nn.Module):
    def __init__(self, p: NnunetParams, channels: int, outputs: int) -> None:
        super().__init__()
        self.encoder = _Encoder(p, channels)
        self.decoder = _Decoder(p, outputs)

    @property
    def head(self) -> nn.Module:
        return self.decoder.seg_layers[-1]

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.decoder(self.encoder(images))
        return output


@MODELS.register("nnunet")
class Nnunet(Network):
    """An nnU-Net, or an ensemble of its folds; see the module's docstring.

    ``forward`` takes patches and whole images alike, as adaptation needs it; ``whole`` predicts in tiles.
    """

    Params = NnunetParams
    summary = "nnU-Net v2: plain and residual-encoder U-Nets in two or three dimensions"
    example = {
        "features": [4, 8],
        "kernels": [[3, 3], [3, 3]],
        "strides": [[1, 1], [2, 2]],
        "blocks": [1, 1],
        "decoder_blocks": [1],
        "norm": "BatchNorm",
    }

    def __init__(self, params: NnunetParams, channels: int, outputs: int) -> None:
        super().__init__()
        self.regions = params.regions
        self.patch = params.patch
        self.mirror = params.mirror
        steps = [math.prod(stride[axis] for stride in params.strides) for axis in range(params.axes)]
        self.divisors = steps
        self.folds = nn.ModuleList(_Fold(params, channels, outputs) for _ in range(params.folds))
        for fold in self._folds():
            fold.decoder.seg_layers[:-1].requires_grad_(False)  # of deep supervision: they take no part

    @classmethod
    def build(cls, params: NnunetParams, channels: int, classes: int) -> Nnunet:
        """Return a new network.

        Raises:
            ConfigError: options of a layer that torch does not know.
        """
        try:
            return cls(params, channels, classes - 1 if params.regions else classes)
        except TypeError as error:
            raise ConfigError(f"model.params of nnunet: {error}") from None

    @property
    def head(self) -> nn.Module:
        """The last layer of every fold."""
        heads = [fold.head for fold in self._folds()]
        return heads[0] if len(heads) == 1 else nn.ModuleList(heads)

    @property
    def encoder(self) -> Sequence[nn.Module]:
        """The encoder of every fold."""
        return [fold.encoder for fold in self._folds()]

    def _folds(self) -> list[_Fold]:
        return [fold for fold in self.folds if isinstance(fold, _Fold)]

    def logits(self, images: Tensor) -> Tensor:
        """Map (N, C, *spatial) with sizes that divide by the strides to logits (N, L, *spatial)."""
        return self.classes_of(self._outputs(images), apart=self.apart)

    def _outputs(self, images: Tensor) -> Tensor:
        """Return the mean outputs of all folds."""
        first, *others = [fold(images) for fold in self.folds]
        mean: Tensor = sum(others, first) / len(self.folds) if others else first
        return mean

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, *spatial) of any size to logits (N, L, *spatial), in one piece."""
        return self._fitted(self.logits, images)

    def _fitted(self, network: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        """Return what a network that needs sizes which divide by the strides makes of images of any size."""
        shape = images.shape[2:]
        missing = [
            max(-(-size // step), 2) * step - size for size, step in zip(shape, self.divisors, strict=True)
        ]
        if not any(missing):
            return network(images)
        pads = [item for pad in reversed(missing) for item in (0, pad)]
        found = network(functional.pad(images, pads, mode="replicate"))
        inside: Any = (..., *(slice(size) for size in shape))
        return found[inside]

    def whole(self, images: Tensor) -> Tensor:
        """Predict whole images (N, C, *spatial) in tiles of the patch, as nnU-Net does; keeps no gradient.

        Several folds, and regions, are averaged as outputs of the network before they become classes.
        """
        if self.patch is None:
            return self.classes_of(self._fitted(self._outputs, images).float())
        found = tiled(lambda patches: self._outputs(patches).float(), images, self.patch, self.mirror)
        return self.classes_of(found.float())


# ------------------------------------------------------------ names of weights


def own_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of one nnU-Net network without the second and third names that it has for each."""
    return {
        name: value
        for name, value in state.items()
        if ".all_modules." not in name and not name.startswith("decoder.encoder.")
    }


def our_name(name: str, value: Tensor, own: Mapping[str, Tensor]) -> str:
    """Return our name of a weight of an nnU-Net network.

    Args:
        name: theirs.
        value: the weight, whose shape tells norm and activation apart.
        own: weights by our names.

    Raises:
        KeyError: none of ours fits.
    """
    if name.startswith("decoder.encoder."):
        name = name.removeprefix("decoder.")
    block, marker, rest = name.partition(".all_modules.")
    if marker:
        leaf = rest.partition(".")[2]
        possible = [f"{block}.{layer}.{leaf}" for layer in ("conv", "norm", "nonlin")]
        possible = possible[:1] if rest.startswith("0.") else possible[1:]
        name = next((item for item in possible if item in own and own[item].shape == value.shape), name)
    if name not in own:
        raise KeyError(name)
    return name
