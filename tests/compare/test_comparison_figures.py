"""Pictures of a comparison: what they are made of, and what they refuse."""

import numpy as np
import pytest
import small_site as small
import torch

from tesla_med.compare.pictures import (
    Features,
    SanityCheck,
    features_of,
    labelled_slices,
    projection,
    qualitative,
    sanity_check,
    sanity_png,
)
from tesla_med.errors import DataError
from tesla_med.io.cases import find_cases
from tesla_med.plan import RunRequest, make_plan
from tesla_med.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes") / "nii"
    small.make_volumes(folder, 2, seed=3)
    return folder


def plan_for(volumes, weights, method="source", overrides=()):
    request = RunRequest(
        small.site(),
        volumes,
        weights=weights,
        pipeline="prostate",
        method=method,
        device="cpu",
        overrides=(*small.SMALL, *small.FEW, *overrides),
    )
    return make_plan(request)


def first_case(volumes):
    return find_cases(volumes, small.site()).cases[0]


def test_slices_and_labels_lie_on_one_grid(volumes, weights):
    plan = plan_for(volumes, weights)
    images, labels = labelled_slices(first_case(volumes), plan.site, plan.pipeline)
    assert images.shape == (small.SLICES, 1, 32, 32)
    assert labels.shape == (small.SLICES, 32, 32)
    assert set(labels.unique().tolist()) == {0, 1}


def test_features_are_the_heads_input(volumes, weights):
    plan = plan_for(volumes, weights)
    found = features_of(first_case(volumes), plan)
    weight = next(iter(plan.model.head.parameters()))
    assert found.vectors.shape[1] == weight.shape[1]
    assert set(found.labels.tolist()) == {0, 1}
    again = features_of(first_case(volumes), plan)
    assert np.array_equal(found.vectors, again.vectors)
    with torch.no_grad():
        logits = plan.model.head(torch.from_numpy(found.vectors)[:, :, None, None])[:, :, 0, 0].numpy()
    assert (logits.argmax(1) == found.labels).mean() > 0.7


def test_the_silhouette_tells_apart_what_is_apart():
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 40)
    vectors = rng.normal(0, 1, (80, 5)).astype(np.float32)
    mixed = Features(vectors, labels).silhouette
    vectors[labels == 1] += np.array([9, 0, 0, 0, 0], np.float32)
    vectors[labels == 0] += np.array([0, 9, 0, 0, 0], np.float32)
    assert Features(vectors, labels).silhouette > 0.7 > 0.1 > mixed


@pytest.mark.slow
def test_projection_and_qualitative_are_pictures(volumes, weights, tmp_path):
    plan, case = plan_for(volumes, weights), first_case(volumes)
    found = features_of(case, plan)
    assert projection({"source": found, "again": found}, plan.pipeline).startswith(PNG)
    small.run(volumes, weights, tmp_path / "out", method="source")
    picture = qualitative(case, plan, {"source": RunFolder(tmp_path / "out")})
    assert picture.startswith(PNG)
    two = qualitative(case, plan, {name: RunFolder(tmp_path / "out") for name in ("source", "again")})
    assert len(two) > len(picture)


def test_the_check_of_the_policy(volumes, weights):
    plan = plan_for(volumes, weights, "tesla")
    check = sanity_check(plan, [first_case(volumes)], count=5)
    assert check.ranks[0] == 1
    assert check.ranks[-1] == 165
    assert len(check.dice) == len(check.names) == 5
    assert all(0 <= value <= 1 for value in check.dice)
    assert all(name.count("+") == 2 for name in check.names)
    assert sanity_png(check).startswith(PNG)
    assert sanity_png(SanityCheck((1, 2), ("a", "b"), (0.5, 0.5), None)).startswith(PNG)
    with pytest.raises(DataError, match="learns no policy"):
        sanity_check(plan_for(volumes, weights, "bn"), [first_case(volumes)])


def test_a_hard_view_is_scored_low(volumes, weights):
    """The score falls where the views are made hard: noise and gamma at full strength against none."""
    from tesla_med.compare.pictures import _dice_under

    plan = plan_for(volumes, weights, "tesla", ("methods.tesla.op_set=intensity",))
    method = plan.make_method("tesla")
    images, labels = labelled_slices(first_case(volumes), plan.site, plan.pipeline)
    chosen = next(
        i
        for i in range(len(method.policy.sub_policies))
        if {"GaussianBlur", "RicianNoise"} <= set(method.policy.name(i).split("+"))
    )
    with torch.no_grad():
        method.policy.raw_magnitudes.fill_(-20.0)
        easy = _dice_under(method, method.policy, chosen, images, labels)
        method.policy.raw_magnitudes.fill_(20.0)
        hard = _dice_under(method, method.policy, chosen, images, labels)
    assert easy > hard
