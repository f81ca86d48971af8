"""The precision and the layout in which a network computes fastest here, measured once per process."""

from __future__ import annotations

import copy
import logging
import time
from typing import Literal, NamedTuple

import torch
from torch import nn

log = logging.getLogger(__name__)
Precision = Literal["float32", "bfloat16"]
SIDE = 128
"""Pixels a side of the slice with which variants are measured, at most."""
GAIN = 0.8
"""A variant is taken if it needs less than this share of the time of plain float32."""
LARGEST_CHANGE = 0.02
"""Mean change of a probability beyond which a variant is not taken."""

SLOW_SECONDS = 10.0
"""A pass that takes longer is not timed again."""


class Computing(NamedTuple):
    """How networks compute.

    Attributes:
        precision: ``bfloat16`` runs them under autocast.
        channels_last: layout of weights and images.
    """

    precision: Precision
    channels_last: bool


_FOUND: dict[tuple[object, ...], Computing] = {}


def fastest(network: nn.Module, channels: int, device: torch.device) -> Computing:
    """Return how a network of slices computes fastest, forward and backward.

    On a CUDA device that is bfloat16, where there is, and channels last. On a CPU the variants are timed on
    one slice of noise, and one that changes the probabilities is left out.

    Args:
        network: on the CPU; it stays as it is.
        channels: of its images.
        device: where it will compute.
    """
    if device.type == "cuda":
        return Computing("bfloat16" if torch.cuda.is_bf16_supported() else "float32", channels_last=True)
    key = (type(network), sum(item.numel() for item in network.parameters()), channels)
    if key not in _FOUND:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            _FOUND[key] = _measured(network, torch.rand(1, channels, SIDE, SIDE) * 2.0 - 1.0)
        log.info("computing in %s, channels last: %s", *_FOUND[key])
    return _FOUND[key]


def _measured(network: nn.Module, images: torch.Tensor) -> Computing:
    plain = Computing("float32", channels_last=False)
    usual, reference = _timed(network, images, plain)
    best, least = plain, GAIN * usual
    variants: tuple[tuple[Precision, bool], ...] = (
        ("float32", True),
        ("bfloat16", False),
        ("bfloat16", True),
    )
    for precision, channels_last in variants:
        variant = Computing(precision, channels_last)
        try:
            seconds, probs = _timed(network, images, variant)
        except RuntimeError as error:  # an operation that this precision or layout does not have
            log.info("%s, channels last: %s cannot be computed in: %s", *variant, error)
            continue
        if seconds < least and float((probs - reference).abs().mean()) <= LARGEST_CHANGE:
            best, least = variant, seconds
    return best


def _timed(network: nn.Module, images: torch.Tensor, how: Computing) -> tuple[float, torch.Tensor]:
    """Return the seconds of a pass with its backward pass, and the probabilities.

    They are those of the process, all threads together: other work on the machine has no part in them.
    """
    own = copy.deepcopy(network).requires_grad_(True).eval()
    layout = torch.channels_last if how.channels_last else torch.contiguous_format
    own, inputs = own.to(memory_format=layout), images.contiguous(memory_format=layout)
    found = []
    for _ in range(2):  # the first one makes kernels
        start = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how.precision == "bfloat16"):
            output = own(inputs)
        logits = output.float()
        logits.mean().backward()
        found.append(time.process_time() - start)
        if found[0] > SLOW_SECONDS:
            break
    return min(found), logits.detach().softmax(dim=1)
