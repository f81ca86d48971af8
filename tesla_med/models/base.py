"""What every network shares: the head, padding to a legal size, the registry."""

from __future__ import annotations

import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.config.files import validate
from tesla_med.config.models import PipelineConfig, Section
from tesla_med.errors import ConfigError
from tesla_med.losses import binary, exclusive
from tesla_med.registry import Registry

MALLOC_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 2**30
"""Blocks up to this size are taken from what is kept, and this much is kept at the end of the heap."""


class Network(nn.Module, ABC):
    """A network with a named head, for segmentation unless ``task`` says ``classification``.

    Subclasses set ``Params`` (a frozen parameter model) and ``divisor``, the size that H and W
    must divide by; other sizes are padded by edge replication and the logits cropped back.
    ``example`` holds parameters of a small instance.
    """

    Params: ClassVar[type[Section]]
    summary: ClassVar[str]
    example: ClassVar[dict[str, Any]] = {}
    task: ClassVar[Literal["segmentation", "classification"]] = "segmentation"
    divisor: int = 1
    minimum: int = 1

    @classmethod
    @abstractmethod
    def build(cls, params: Any, channels: int, classes: int) -> Network:
        """Return a new network for ``channels`` inputs and ``classes`` outputs."""

    @property
    @abstractmethod
    def head(self) -> nn.Module:
        """The last layer, from features to logits; frozen by methods that keep the classifier."""

    regions: bool = False
    """Whether the outputs are overlapping regions and not classes."""
    apart: bool = False
    """Whether ``forward`` asks of each region whether a voxel is in it: logits (N, 2, R, *spatial)."""

    def classes_of(self, outputs: Tensor, *, apart: bool = False) -> Tensor:
        """Return logits of classes from outputs (N, L or R, *spatial), or binary ones of regions."""
        if not self.regions:
            return outputs
        return binary(outputs) if apart else exclusive(outputs)

    patch: tuple[int, ...] | None = None
    """Size of what is learned from at once, where whole images are too large; None: whole images."""

    def whole(self, images: Tensor) -> Tensor:
        """Predict whole images (N, C, *spatial) in the model's range: logits (N, L, *spatial), float32."""
        output: Tensor = self(images)
        return output

    @property
    def encoder(self) -> Sequence[nn.Module]:
        """The parts that turn images into features; empty where a network does not tell them apart."""
        return ()

    @abstractmethod
    def logits(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) with legal H and W to logits (N, L, H, W)."""

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) in the model's range, any size, to logits (N, L, H, W)."""
        height, width = images.shape[-2:]
        pad = [self._missing(height), self._missing(width)]
        if not any(pad):
            return self.logits(images)
        padded = functional.pad(images, (0, pad[1], 0, pad[0]), mode="replicate")
        return self.logits(padded)[..., :height, :width]

    def _missing(self, size: int) -> int:
        legal = max(-(-size // self.divisor) * self.divisor, self.minimum)
        return legal - size


MODELS: Registry[type[Network]] = Registry("model", "tesla_med.models", "tesla_med.models")


def build_model(pipeline: PipelineConfig, params: Mapping[str, Any] | None = None) -> Network:
    """Return the network that ``pipeline.model`` names, with fresh weights.

    Raises:
        ConfigError: unknown model name, a model of another task, or parameters that do not fit it.
    """
    network = MODELS.get(pipeline.model.name)
    if (network.task == "classification") != pipeline.whole_images:
        raise ConfigError(
            f"model {pipeline.model.name!r} is for {network.task}, and pipeline {pipeline.name!r} for "
            f"{pipeline.task}"
        )
    given = pipeline.model.params if params is None else params
    checked = validate(network.Params, given, f"model.params of {pipeline.model.name!r}")
    return network.build(checked, pipeline.channels, len(pipeline.classes))


def norm_layers(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the batch-normalisation layers in module order."""
    return [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]


def to_model_range(images: Tensor, model_range: tuple[float, float]) -> Tensor:
    """Map images in [0, 1] to the range that the network was trained on."""
    low, high = model_range
    return images * (high - low) + low


def predicted_class(scores: Tensor) -> Tensor:
    """Return the index (N, *spatial) of the largest of (N, L, *spatial) scores; of equal ones the first.

    The same as ``scores.argmax(1)``, which takes ten times as long over the channels of images on a CPU.
    """
    return scores.max(dim=1).indices


def parameter_count(model: nn.Module) -> int:
    """Return the number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def default_device(name: str) -> torch.device:
    """Return the device for ``auto``, ``cpu`` or ``cuda`` (``cuda:N`` too).

    Where that is the CPU, memory that is freed stays with the process (:func:`keep_freed_memory`).

    Raises:
        ConfigError: a name that is not a device, or CUDA asked for where there is none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cpu" and not name.startswith("cuda"):
        raise ConfigError(f"unknown device {name!r}. Known: auto, cpu, cuda.")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for but no CUDA device is available; use --device cpu")
    if name == "cpu":
        keep_freed_memory()
    return torch.device(name)


@lru_cache(maxsize=1)
def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next pass; return whether it does. Done once per process.

    By itself it gives large blocks back at once, and the activations of every pass are mapped and zeroed page
    by page again: a quarter of the time of an adaptation on the CPU. Other C libraries are left alone, and so
    is whoever has set ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or ``GLIBC_TUNABLES``.
    """
    if any(name in os.environ for name in MALLOC_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no C library that has it
        return False
    return all(mallopt(option, KEPT_BYTES) == 1 for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD))


def device_name(device: torch.device) -> str:
    """Return the device for the record, the GPU's model included."""
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return device.type
