"""TTT++: both distances are lessened."""

import pytest


def test_the_loss_is_the_weighted_sum_of_both_distances(make_tta, make_images):
    method = make_tta("ttt_pp", mean_weight=2.0, covariance_weight=3.0)
    loss, scalars = method.objective(1.0 - 0.7 * make_images(4))
    mean, covariance = (float(scalars[f"loss/{name}"]) for name in ("mean", "covariance"))
    assert min(mean, covariance) > 0
    assert float(loss.detach()) == pytest.approx(2.0 * mean + 3.0 * covariance, rel=1e-5)
