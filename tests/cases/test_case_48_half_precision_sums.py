"""Losses, statistics and metrics are summed in float32 or higher, whatever the precision of the input."""

import numpy as np
import pytest
import torch

from tesla_med import losses
from tesla_med.scoring.calibration import count_binary
from tesla_med.scoring.metrics import dice, volume_ml
from tesla_med.tta._shared.passes import activations

CASE = 48
HALVES = [torch.float16, torch.bfloat16]
SIDE = 512
CERTAIN = torch.tensor([8.0, 0.0]).view(1, 2, 1, 1).expand(1, 2, SIDE, SIDE)
WRONG = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, SIDE, SIDE)
LOSSES = {
    "flipped": losses.flipped_cross_entropy,
    "weighted": lambda logits, labels: losses.flipped_cross_entropy(
        logits, labels, torch.ones(1, SIDE, SIDE, dtype=logits.dtype)
    ),
    "marginal": lambda logits, _: losses.class_marginal(logits),
    "distillation": losses.distillation,
    "entropy": lambda logits, _: losses.negative_entropy(logits.softmax(1)),
}


def test_the_sum_in_half_precision_would_overflow():
    assert torch.isinf(torch.ones(SIDE, SIDE, dtype=torch.float16).sum(dtype=torch.float16))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, dtype):
    loss = LOSSES[name]
    value = loss(CERTAIN.to(dtype), WRONG.to(dtype))
    assert value.dtype == torch.float32
    # The inputs are exact in half precision; only the entropy gets probabilities that were rounded.
    relative, absolute = (0.02, 2e-3) if name == "entropy" else (1e-5, 1e-6)
    assert torch.allclose(value, loss(CERTAIN, WRONG), rtol=relative, atol=absolute)


@pytest.mark.parametrize("dtype", HALVES)
def test_statistics(dtype):
    norm = torch.nn.BatchNorm2d(1).eval()
    images = torch.ones(1, 1, SIDE, SIDE, dtype=dtype)
    with activations(norm) as means:
        norm(images.float())
        norm(images)
    assert [item.dtype for item in means] == [torch.float32] * 2
    assert [float(item) for item in means] == [1.0, 1.0]


@pytest.mark.parametrize("dtype", [np.float16, np.uint8])
def test_metrics(dtype):
    mask = np.ones((SIDE, SIDE, 1), dtype)
    assert dice(mask, mask) == 1.0
    assert volume_ml(mask, (1, 1, 1)) == pytest.approx(SIDE * SIDE / 1000)


def test_calibration():
    counts = count_binary(np.full((SIDE, SIDE), 0.75, np.float16), np.ones((SIDE, SIDE), bool), 15)
    assert counts.voxels == SIDE * SIDE
    assert counts.ece == pytest.approx(0.25)
    assert counts.summary()["brier"] == pytest.approx(0.0625)
