"""Any 2-D MONAI network by class name.

Example in a pipeline::

    model:
      name: monai
      params:
        class_name: UNet
        arguments: {channels: [16, 32, 64], strides: [2, 2], norm: batch}

``spatial_dims``, ``in_channels`` and ``out_channels`` come from the pipeline. MONAI's default
norm of several networks is an instance norm without parameters: nothing a method could adapt
there; ask for ``norm: batch`` (a method that needs more says so before it runs).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from tesla_med.config.models import Section
from tesla_med.errors import ConfigError
from tesla_med.models.base import MODELS, Network
from tesla_med.registry import unknown_name


class MonaiParams(Section):
    """Parameters of a MONAI network."""

    class_name: str
    arguments: dict[str, Any] = {}
    divisor: int = Field(16, ge=1, description="H and W are padded to a multiple of this")


@MODELS.register("monai")
class MonaiNetwork(Network):
    """A network of ``monai.networks.nets``, padded to legal sizes; see the module's docstring."""

    Params = MonaiParams
    summary = "any 2-D network of monai.networks.nets by class name"
    example = {
        "class_name": "UNet",
        "arguments": {"channels": [4, 8, 16], "strides": [2, 2], "norm": "batch"},
        "divisor": 4,
    }

    def __init__(self, network: nn.Module, divisor: int, classes: int) -> None:
        super().__init__()
        self.network = network
        self.divisor = divisor
        self.minimum = 2 * divisor
        self.classes = classes

    @classmethod
    def build(cls, params: MonaiParams, channels: int, classes: int) -> MonaiNetwork:
        """Return a new MONAI network.

        Raises:
            ConfigError: unknown class, arguments that it does not take, or a divisor that is too small.
        """
        from monai.networks import nets

        known = [name for name, item in vars(nets).items() if inspect.isclass(item)]
        if params.class_name not in known:
            raise ConfigError(unknown_name("MONAI network", params.class_name, sorted(known)))
        network_class = getattr(nets, params.class_name)
        takes = inspect.signature(network_class.__init__).parameters
        given = {"spatial_dims": 2, "in_channels": channels, "out_channels": classes}
        arguments = {key: value for key, value in given.items() if key in takes} | params.arguments
        try:
            network = network_class(**arguments)
        except (TypeError, ValueError, AssertionError, KeyError, NotImplementedError) as error:
            raise ConfigError(
                f"monai.networks.nets.{params.class_name} does not take these arguments: {error}; "
                f"it takes {', '.join(name for name in takes if name != 'self')}"
            ) from error
        built = cls(network, params.divisor, classes)
        if _shrinks_to_one_value(network, channels, built.minimum):
            raise ConfigError(
                f"divisor {params.divisor} is too small for this {params.class_name}: the smallest slice it"
                f" gets, {built.minimum} x {built.minimum} pixels, shrinks to 1 x 1 in it, and one value has"
                " no spread to normalise by; set model.params.divisor to the product of the strides"
            )
        return built

    @property
    def head(self) -> nn.Module:
        """The last convolution or linear layer with one output a class."""
        layers = [
            layer
            for layer in self.network.modules()
            if getattr(layer, "out_channels", getattr(layer, "out_features", None)) == self.classes
            and isinstance(layer, nn.Conv2d | nn.ConvTranspose2d | nn.Linear)
        ]
        if not layers:
            raise ConfigError(
                f"{type(self.network).__name__} has no layer with {self.classes} outputs, so no head"
            )
        return layers[-1]

    def logits(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W) to logits (N, L, H, W); of several outputs the first is taken."""
        output = self.network(images)
        first: Tensor = output[0] if isinstance(output, list | tuple) else output
        return first


@torch.no_grad()
def _shrinks_to_one_value(network: nn.Module, channels: int, size: int) -> bool:
    """Whether some norm of ``network`` gets a single pixel of one slice of ``size`` x ``size`` pixels."""
    pixels: list[int] = []
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    layers = [layer for layer in network.modules() if isinstance(layer, kinds)]
    handles = [
        layer.register_forward_pre_hook(lambda _, inputs: pixels.append(inputs[0][0, 0].numel()))
        for layer in layers
    ]
    training = network.training
    try:
        network.eval()(torch.zeros(1, channels, size, size))
    except (RuntimeError, ValueError, AssertionError):
        pass  # some networks take one size only; what their norms got up to here is known
    finally:
        network.train(training)
        for handle in handles:
            handle.remove()
    return 1 in pixels
