"""Which parameters of a network a method updates, and the refusal of networks that have none of them."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from tesla_med.errors import AdaptationError
from tesla_med.models.base import Network, norm_layers

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
"""Norm layers, of batches and of instances, whose scale and shift can learn."""


def norm_affine(model: nn.Module, method: str) -> list[nn.Parameter]:
    """Return the scale and shift of every norm layer of ``model``, in module order.

    Args:
        model: any network.
        method: the name of the method, for the error.

    Raises:
        AdaptationError: there are none; the message gives the number of norm layers found.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, NORMS)]
    found = [item for layer in layers for item in layer.parameters(recurse=False)]
    if not found:
        raise AdaptationError(
            f"method {method!r} adapts scale and shift of norm layers, but the model has 0 ({len(layers)} "
            "norm layers without them); use method 'tesla', or a network whose norm layers have them "
            "(MONAI: norm: batch)"
        )
    return found


def all_but_head(model: Network, method: str) -> list[nn.Parameter]:
    """Return every parameter of ``model`` except those of its head.

    Args:
        model: any network.
        method: the name of the method, for the error.

    Raises:
        AdaptationError: there are none.
    """
    frozen = {id(item) for item in model.head.parameters()}
    found = [item for item in model.parameters() if id(item) not in frozen]
    if not found:
        raise AdaptationError(
            f"method {method!r} adapts every parameter but the head's, but the model has 0 (it is all head)"
        )
    return found


def choose(model: Network, which: Literal["all", "encoder", "norms"], method: str) -> None:
    """Let the named parameters of a network learn, and no others.

    Args:
        model: any network.
        which: every parameter, those of its encoder, or scale and shift of its norm layers.
        method: the name of the method, for the error.

    Raises:
        AdaptationError: there are none.
    """
    if which == "all":
        model.requires_grad_(True)
        return
    model.requires_grad_(False)
    if which == "norms":
        for item in norm_affine(model, method):
            item.requires_grad_(True)
        return
    if not model.encoder:
        raise AdaptationError(
            f"method {method!r} is to adapt the encoder, but the network does not say what its encoder is; "
            f"--set methods.{method}.adapt=all or norms"
        )
    for part in model.encoder:
        part.requires_grad_(True)


def require_norm_layers(model: nn.Module, method: str, *, affine: bool = False) -> None:
    """Refuse a model without batch norms that the method could adapt.

    Args:
        model: any network.
        method: the name of the method, for the error.
        affine: whether the method needs their scale and shift.

    Raises:
        AdaptationError: there are none; the message gives the number of norm layers and what to do.
    """
    layers = norm_layers(model)
    usable = [layer for layer in layers if layer.affine] if affine else layers
    if not usable:
        others = sum("Norm" in type(layer).__name__ for layer in model.modules())
        need = "batch-norm layers with affine parameters" if affine else "batch-norm layers"
        raise AdaptationError(
            f"method {method!r} adapts {need}, but the model has 0 ({others} norm layers of other kinds); "
            "use method 'tesla', or a network with batch normalisation (MONAI: norm: batch)"
        )


@torch.no_grad()
def clip_each(model: nn.Module, limit: float) -> None:
    """Scale the gradient of each parameter down to a norm of ``limit``, separately."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if not gradients:
        return
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (limit / (norms + 1e-6)).clamp_max(1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))


@torch.no_grad()
def relative_size(weight: nn.Parameter) -> float:
    """Return the root mean square of a weight tensor over that of PyTorch's initial weights.

    PyTorch draws the weights of convolutions and linear layers uniformly, with a variance of one third of
    the reciprocal of the fan-in. A long training with Adam multiplies them, and behind a norm layer only
    their direction counts: a step of the same size then changes less. Biases and norm layers give 1.
    """
    if weight.dim() < 2:
        return 1.0
    fan_in = weight[0].numel()
    size = float(weight.square().mean().sqrt()) * (3.0 * fan_in) ** 0.5
    return size if size > 0 else 1.0
