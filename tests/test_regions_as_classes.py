"""Overlapping regions as classes that exclude each other, and masks painted from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tesla_med.config.models import LabelClass, PipelineConfig
from tesla_med.losses import exclusive, overlapping
from tesla_med.scoring.score import label_values

pytestmark = pytest.mark.usefixtures("one_thread")
LOGITS = st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=5)


def outputs_of(values):
    return torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1)


@given(LOGITS)
def test_classes_add_up_to_one(values):
    logs = exclusive(outputs_of(values))
    assert logs.shape[1] == len(values) + 1
    assert torch.isfinite(logs).all()
    assert torch.allclose(logs.logsumexp(1), torch.zeros(1, 1, 1), atol=1e-4)


@given(LOGITS)
def test_there_and_back(values):
    outputs = outputs_of(values)
    assert torch.allclose(overlapping(exclusive(outputs)), outputs, rtol=1e-4, atol=1e-3)


@given(st.lists(st.sampled_from([-1e4, -300.0, -88.0, 88.0, 300.0, 1e4]), min_size=1, max_size=4))
def test_extreme_outputs_keep_their_side(values):
    outputs = outputs_of(values)
    logs = exclusive(outputs)
    assert not torch.isnan(logs).any()
    back = overlapping(logs)
    assert not torch.isnan(back).any()
    assert (back.sign() == outputs.sign()).all()


def test_by_hand():
    inside = torch.tensor([0.6, 0.45])
    probs = exclusive(inside.logit().view(1, 2, 1, 1)).exp().flatten()
    assert torch.allclose(probs, torch.tensor([0.4 * 0.55, 0.6 * 0.55, 0.45]), atol=1e-6)


def pipeline(values):
    classes = [LabelClass(value=0, name="background")]
    classes += [LabelClass(value=value, name=f"region {value}") for value in values]
    return PipelineConfig(name="p", title="p", sites="p", classes=tuple(classes), regions=True)


@given(st.integers(0, 2**32 - 1), st.permutations([1, 2, 3]))
def test_masks_are_painted_region_after_region_above_a_half(seed, values):
    outputs = np.random.default_rng(seed).normal(0, 4, (3, 4, 4, 4)).astype(np.float32)
    expected = np.zeros((4, 4, 4), int)
    for output, value in zip(outputs, values, strict=True):
        expected[output > 0] = value
    probs = exclusive(torch.from_numpy(outputs)[None])[0].exp().numpy()
    assert np.array_equal(label_values(probs, pipeline(values)), expected)


def test_the_largest_probability_would_be_another_mask():
    inside = torch.tensor([0.6, 0.45]).logit().view(1, 2, 1, 1, 1)
    probs = exclusive(inside)[0].exp().numpy()
    assert probs.argmax(0).item() == 2
    assert label_values(probs, pipeline([1, 2])).item() == 1
