"""The network of a MONAI bundle, in two or three dimensions, predicting with the bundle's own inference.

It is built from the class name and the plain arguments of the bundle, or loaded from its TorchScript.
Overlapping regions, which a bundle has where its outputs go through a sigmoid, become classes that exclude
each other (see :func:`tesla_med.losses.exclusive`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional

from tesla_med.config.bundle import NETWORKS
from tesla_med.config.models import Section
from tesla_med.errors import AdaptationError, CheckpointError, ConfigError
from tesla_med.models.base import MODELS, Network
from tesla_med.models.bundle_files import load_script
from tesla_med.prepare.trusted import run_key

LARGE = 2**15
"""Side of a window along an axis that is taken whole: larger than any image."""
FIXED = frozenset(("UNETR", "SegResNetVAE"))
"""Networks that take images of one size only, that of their window."""
STEP = 32
"""By which the sizes of most networks must divide, where nothing tells."""
_Side = Annotated[int, Field(ge=1)] | None
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)


class BundleParams(Section):
    """Parameters of the network of a MONAI bundle; one of ``class_name``, ``script`` and ``code`` counts."""

    class_name: str | None = Field(None, description="name in monai.networks.nets")
    arguments: dict[str, Any] = Field({}, description="what the class takes, as the bundle says")
    script: str | None = Field(None, description="file of a TorchScript to take in its place")
    code: str | None = Field(None, description="folder of a bundle whose own code makes the network")
    code_of_inferer: str | None = Field(None, description="the same of its inference")
    axes: Literal[2, 3] = 2
    regions: bool = Field(False, description="outputs are overlapping regions, not classes")
    order: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        None, description="outputs in the order of the classes; null: as they come"
    )
    roi: tuple[_Side, ...] | None = Field(None, description="window of a prediction; null: whole images")
    overlap: float | tuple[float, ...] = 0.25
    mode: Literal["constant", "gaussian"] = "constant"
    sigma_scale: float | tuple[float, ...] = 0.125
    padding_mode: Literal["constant", "reflect", "replicate", "circular"] = "constant"
    cval: float = 0.0
    sw_batch_size: int = Field(1, ge=1, description="windows at once")

    @field_validator("class_name")
    @classmethod
    def _on_the_list(cls, value: str | None) -> str | None:
        if value is not None and value not in NETWORKS:
            raise ValueError(f"network {value!r} is not one of {', '.join(sorted(NETWORKS))}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> BundleParams:
        if self.class_name is None and self.script is None and self.code is None:
            raise ValueError("class_name is missing")
        if self.roi is not None and len(self.roi) != self.axes:
            raise ValueError(f"roi {self.roi} for images of {self.axes} axes")
        return self


@MODELS.register("bundle")
class BundleNetwork(Network):
    """The network of a MONAI bundle; see the module's docstring.

    ``forward`` takes patches and whole images alike, as adaptation needs it; ``whole`` predicts as the bundle
    does.
    """

    Params = BundleParams
    summary = "the network of a MONAI bundle in two or three dimensions"
    example = {
        "class_name": "UNet",
        "arguments": {"spatial_dims": 2, "channels": [4, 8, 16], "strides": [2, 2], "norm": "batch"},
    }

    def __init__(self, network: nn.Module, params: BundleParams, outputs: int, inferer: Any = None) -> None:
        super().__init__()
        self.network = network
        self.regions = params.regions
        self.params = params
        self.outputs = outputs
        self.inferer = inferer
        self.fixed = params.script is None and params.class_name in FIXED and params.roi is not None
        self.steps = _steps(params)
        if params.roi is not None:
            self.patch = tuple(LARGE if side is None else side for side in params.roi)

    @classmethod
    def build(cls, params: BundleParams, channels: int, classes: int) -> BundleNetwork:
        """Return a new network, with the weights that its TorchScript holds or its code gives it.

        Raises:
            ConfigError: arguments that the class does not take, or other channels than the pipeline's.
            CheckpointError: the TorchScript cannot be loaded, nobody trusts the code, a package is missing,
                or sizes of the network mean nothing.
        """
        outputs = classes - 1 if params.regions else classes
        if params.order is not None and sorted(params.order) != list(range(outputs)):
            raise ConfigError(
                f"model.params.order {list(params.order)}: expected each of {outputs} outputs once"
            )
        inferer = None if params.code_of_inferer is None else run_key(params.code_of_inferer, "inferer")
        if params.script is not None:
            network: nn.Module = load_script(Path(params.script))
        elif params.code is not None:
            made = run_key(params.code, "network")
            if not isinstance(made, nn.Module):
                raise CheckpointError(f"{params.code}: network is {type(made).__name__}, not a network")
            network = made
        else:
            network = _of_class(params, channels, outputs)
        return cls(network.to(torch.float32), params, outputs, inferer)

    @property
    def head(self) -> nn.Module:
        """The layer with one output a class that comes last; heads of deep supervision do not count."""
        self._check_adaptable()
        network: nn.Module = self.network
        found: list[nn.Module] = [
            module
            for name, module in network.named_modules()
            if "supervision" not in name and _outputs(module) == self.outputs
        ]
        if not found:
            raise ConfigError(
                f"{type(self.network).__name__} has no layer with {self.outputs} outputs, so no head"
            )
        return found[-1]

    def requires_grad_(self, requires_grad: bool = True) -> BundleNetwork:
        """Say whether the parameters are learned.

        Raises:
            AdaptationError: the network is a TorchScript.
        """
        self._check_adaptable()
        super().requires_grad_(requires_grad)
        return self

    def _check_adaptable(self) -> None:
        if self.params.script is not None:
            raise AdaptationError(
                f"{self.params.script}: a TorchScript can be predicted with but not adapted, since what can "
                "be learned of it cannot be chosen; give the bundle's models/model.pt and a network of MONAI"
            )

    def logits(self, images: Tensor) -> Tensor:
        """Map (N, C, *spatial) of legal sizes to logits (N, L, *spatial)."""
        return self.classes_of(self._outputs(images), apart=self.apart)

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, *spatial) of any size to logits (N, L, *spatial), in one piece where it can be."""
        padded = self._padded(images)
        if self.fixed and tuple(padded.shape[2:]) != self.patch:
            found = self.classes_of(self._windows(padded), apart=self.apart)
        else:
            found = self.logits(padded)
        return _cut(found, images)

    def _padded(self, images: Tensor) -> Tensor:
        """Return images whose sizes the network divides, their border repeated."""
        if images.dim() != self.params.axes + 2:
            raise AdaptationError(
                "the bundle's own code takes slices out of volumes; it can be predicted with but not adapted"
            )
        missing = [
            max(-(-size // step), 1 if self.fixed else 2) * step - size
            for size, step in zip(images.shape[2:], self.steps, strict=True)
        ]
        pads = [item for pad in reversed(missing) for item in (0, pad)]
        return functional.pad(images, pads, mode="replicate") if any(missing) else images

    @torch.no_grad()
    def whole(self, images: Tensor) -> Tensor:
        """Predict whole images (N, C, *spatial) as the bundle does; keeps no gradient."""
        if self.inferer is not None:
            outputs = self._ordered(_first(self.inferer(images, self.network), images.dim() - 2))
        elif self.params.roi is not None:
            outputs = self._windows(images)
        else:
            try:
                outputs = self._outputs(images)
            except torch.cuda.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError):  # a size that the network does not take
                return self._classes(images)
            if outputs.shape[2:] != images.shape[2:]:
                return self._classes(images)
        return self.classes_of(outputs.float())

    def _classes(self, images: Tensor) -> Tensor:
        """Return ``forward`` with classes that exclude each other."""
        apart, self.apart = self.apart, False
        try:
            return self.forward(images).float()
        finally:
            self.apart = apart

    def _windows(self, images: Tensor) -> Tensor:
        """Return the outputs of whole images, in windows."""
        from monai.inferers import sliding_window_inference

        params = self.params
        assert params.roi is not None  # noqa: S101 - who has none is not asked
        found: Any = sliding_window_inference(
            images,
            [side or -1 for side in params.roi],
            params.sw_batch_size,
            self._outputs if all(params.roi) else self._of_any_size,
            overlap=params.overlap,
            mode=params.mode,
            sigma_scale=params.sigma_scale,
            padding_mode=params.padding_mode,
            cval=params.cval,
        )
        outputs: Tensor = found
        return outputs

    def _of_any_size(self, images: Tensor) -> Tensor:
        """Return the outputs of windows that may have a size that the network does not divide."""
        try:
            outputs = self._outputs(images)
        except torch.cuda.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):
            return _cut(self._outputs(self._padded(images)), images)
        if all(side >= size for side, size in zip(outputs.shape[2:], images.shape[2:], strict=True)):
            return _cut(outputs, images)
        return _cut(self._outputs(self._padded(images)), images)

    def _outputs(self, images: Tensor) -> Tensor:
        return self._ordered(_first(self.network(images), self.params.axes))

    def _ordered(self, outputs: Tensor) -> Tensor:
        if outputs.shape[1] != self.outputs:
            raise ConfigError(f"the network has {outputs.shape[1]} outputs; the bundle says {self.outputs}")
        return outputs if self.params.order is None else outputs[:, list(self.params.order)]


def _of_class(params: BundleParams, channels: int, outputs: int) -> nn.Module:
    import inspect

    from monai.networks import nets

    assert params.class_name is not None  # noqa: S101 - checked with the parameters
    network_class = getattr(nets, params.class_name)
    takes = inspect.signature(network_class.__init__).parameters
    given = {"spatial_dims": params.axes, "in_channels": channels, "out_channels": outputs}
    arguments = {key: value for key, value in given.items() if key in takes} | params.arguments
    for key, value in given.items():
        if arguments.get(key, value) != value:
            raise ConfigError(f"model.params.arguments.{key} is {arguments[key]}, expected {value}")
    try:
        built: nn.Module = network_class(**arguments)
    except (TypeError, ValueError, AssertionError, KeyError, AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"monai.networks.nets.{params.class_name} does not take these arguments: {error}"
        ) from error
    except ImportError as error:
        raise CheckpointError(
            f"monai.networks.nets.{params.class_name} needs a package that is not installed: {_reason(error)}"
        ) from error
    except (RuntimeError, IndexError, ArithmeticError, MemoryError) as error:
        raise CheckpointError(
            f"monai.networks.nets.{params.class_name} cannot be built with these arguments: {_reason(error)}"
        ) from error
    return built


def _reason(error: Exception) -> str:
    """Return what an error says; of a package that is missing how it is installed."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if not isinstance(error, ImportError):
        return lines[0]
    patterns = (r"No module named '(\w+)", r"from (\w+)", r"import (\w+)")
    found = [match[1] for pattern in patterns if (match := re.search(pattern, str(error))) is not None]
    return f"{lines[0]}; pip install {found[0]}" if found else lines[0]


def _cut(outputs: Tensor, images: Tensor) -> Tensor:
    """Return outputs without what lies beyond the images."""
    inside: Any = (..., *(slice(size) for size in images.shape[2:]))
    found: Tensor = outputs[inside]
    return found


def _first(found: Any, axes: int) -> Tensor:
    """Return the prediction of a network among what it returns: the first, at full size."""
    if isinstance(found, Mapping):
        found = next(iter(found.values()))
    if isinstance(found, Sequence):
        found = found[0]
    outputs: Tensor = found.as_tensor() if hasattr(found, "as_tensor") else found
    return outputs[:, 0] if outputs.dim() == axes + 3 else outputs  # DynUNet in training stacks its heads


def _outputs(module: nn.Module) -> int | None:
    """Return the number of outputs of a layer; None where it is no convolution and no linear layer."""
    if not isinstance(module, _CONVOLUTIONS):
        return None
    return int(getattr(module, "out_channels", getattr(module, "out_features", 0)))


def _steps(params: BundleParams) -> list[int]:
    """Return what the sizes must divide by, an entry for each axis."""
    roi = params.roi or (None,) * params.axes
    if params.class_name in FIXED and all(roi):
        return [side or STEP for side in roi]
    strides = params.arguments.get("strides")
    if params.class_name in ("UNet", "Unet", "AttentionUnet", "DynUNet", "DynUnet") and strides:
        each = [item if isinstance(item, Sequence) else [item] * params.axes for item in strides]
        sides = [side for item in each for side in item]
        if any(len(item) != params.axes for item in each) or not all(_is_size(side) for side in sides):
            raise CheckpointError(
                f"model.params.arguments.strides {strides} of {params.axes} axes mean nothing"
            )
        return [math.prod(item[axis] for item in each) for axis in range(params.axes)]
    return [STEP if side is None else math.gcd(side, STEP) for side in roi]


def _is_size(side: Any) -> bool:
    return isinstance(side, int) and side >= 1
