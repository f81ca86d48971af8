"""Logarithms are log-softmax; a loss that is not finite leaves no trace, and the source mask is kept."""

import pytest
import small_site as small
import torch

from tesla_med import losses

CASE = 47
CERTAIN = torch.tensor([[200.0, -200.0], [-200.0, 200.0]])[:, :, None, None]
LABELS = torch.tensor([[1.0, 0.0], [1.0, 0.0]])[:, :, None, None]
LOSSES = {
    "flipped": lambda logits: losses.flipped_cross_entropy(logits, LABELS),
    "marginal": losses.class_marginal,
    "marginal with prior": lambda logits: losses.class_marginal(logits, torch.tensor([1.0, 0.0])),
    "distillation": lambda logits: losses.distillation(logits, LABELS),
    "negative entropy": lambda logits: losses.negative_entropy(logits.softmax(1)).mean(),
    "normalised entropy": lambda logits: losses.normalised_entropy(logits.softmax(1)).mean(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_loss_and_gradient_of_a_certain_voxel_are_finite(loss):
    logits = CERTAIN.clone().requires_grad_()
    value = loss(logits)
    value.backward()
    assert torch.isfinite(value)
    assert torch.isfinite(logits.grad).all()


def test_a_certain_mistake_still_teaches():
    logits = CERTAIN.clone().requires_grad_()
    losses.distillation(logits, LABELS).backward()
    assert logits.grad[1].abs().max() > 0.4
    assert losses.distillation(CERTAIN, LABELS) == pytest.approx(200.0)


def broken_at(monkeypatch, updates):
    """Let the loss of these updates, from 0, be NaN."""
    original, count = losses.distillation, [-1]

    def loss(*arguments):
        count[0] += 1
        return original(*arguments) * (float("nan") if count[0] in updates else 1.0)

    monkeypatch.setattr(losses, "distillation", loss)


@pytest.mark.parametrize("reset", ["case", "site"])
def test_a_loss_that_is_not_finite_leaves_no_trace(small_weights, tmp_path, monkeypatch, reset):
    small.make_volumes(tmp_path / "three", 3)
    for name in ("Case00", "Case02"):
        small.copy_image(tmp_path / f"three/{name}.nii.gz", tmp_path / f"two/{name}.nii.gz")
    plain = small.run(tmp_path / "two", small_weights, tmp_path / "plain", reset=reset)
    with monkeypatch.context() as patch:
        broken_at(patch, {2})  # the first of the two updates on the second case
        result = small.run(tmp_path / "three", small_weights, tmp_path / "out", reset=reset)
    assert [item.status == "collapsed" for item in result.results] == [False, True, False]
    assert (result.results[1].used, result.results[1].share) == ("source", 0.0)
    assert "not finite" in result.results[1].reason
    ours, wanted = small.masks(result.out), small.masks(plain.out)
    assert ours["masks/Case01_mask.nii.gz"] == ours["source_masks/Case01_mask.nii.gz"]
    assert {name: ours[name] for name in wanted} == wanted
