"""The teacher: its moving average, its weak views, its averaged labels."""

from __future__ import annotations

import copy

import pytest
import torch

from tesla_med.augment import warp
from tesla_med.tta._shared.teacher import average_over_views, make_teacher, update_teacher, weak_view_thetas

pytestmark = pytest.mark.usefixtures("one_thread")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def soft(images):
    """A made-up model without spatial context: probabilities from intensity alone."""
    return torch.cat([images, 1 - images], dim=1).clamp(0, 1)


# ------------------------------------------------------------ moving average


def test_teacher_starts_as_the_student(make_network):
    student = make_network().train()
    teacher = make_teacher(student)
    assert not teacher.training
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert all(parameter.requires_grad for parameter in student.parameters())
    for (name, ours), theirs in zip(teacher.state_dict().items(), student.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name
    with torch.no_grad():
        student.head.conv.weight.zero_()
    assert teacher.head.conv.weight.abs().sum() > 0


def test_a_student_of_another_structure_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        update_teacher(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False), 0.5)


@pytest.mark.parametrize("momentum", [0.996, 0.5])
def test_moving_average_of_parameters_and_float_buffers(momentum, make_network):
    teacher, student = make_teacher(make_network(seed=1)), make_network(seed=2)
    before, other = copy.deepcopy(teacher.state_dict()), copy.deepcopy(student.state_dict())
    for key in before:
        if key.endswith("num_batches_tracked"):
            student.state_dict()[key].add_(7)
    update_teacher(teacher, student, momentum)
    for key, value in teacher.state_dict().items():
        if value.is_floating_point():
            want = momentum * before[key].double() + (1 - momentum) * other[key].double()
            assert torch.allclose(value.double(), want, atol=1e-6), key
        else:
            assert torch.equal(value, before[key]), key
    running = [key for key in before if "running" in key]
    assert running
    assert any(not torch.equal(teacher.state_dict()[key], before[key]) for key in running)
    for key, value in student.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(value, other[key]), key


def test_momentum_at_its_ends(make_network):
    teacher, student = make_teacher(make_network(seed=1)), make_network(seed=2)
    before = copy.deepcopy(teacher.state_dict())
    update_teacher(teacher, student, 1.0)
    assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())
    update_teacher(teacher, student, 0.0)
    for key, value in student.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(teacher.state_dict()[key], value), key


# ------------------------------------------------------------ weak views


def test_weak_views_by_the_stated_rule():
    theta = weak_view_thetas(4000, generator(), scale=0.8, shift=0.1, flip="last")
    sign = theta[:, 0, 0].sign()
    assert torch.allclose(theta[:, 0, 0].abs(), torch.tensor(0.8))
    assert torch.allclose(theta[:, 1, 1], torch.tensor(0.8))
    assert not theta[:, 0, 1].any()
    assert not theta[:, 1, 0].any()
    assert (sign < 0).float().mean().item() == pytest.approx(0.5, abs=0.04)
    moves = theta[:, :, 2]
    assert moves.abs().max() <= 0.1
    assert moves.abs().max() > 0.099
    assert moves.mean().abs() < 0.004
    assert moves.std(dim=0).tolist() == pytest.approx([0.2 / 12**0.5] * 2, rel=0.05)


def test_weak_views_without_flip_scale_or_shift():
    theta = weak_view_thetas(50, generator(), scale=1.0, shift=0.0, flip="none")
    assert torch.equal(theta, warp.identity(50))
    for flip, axis in (("first", 1), ("last", 0)):
        theta = weak_view_thetas(50, generator(), scale=1.0, shift=0.0, flip=flip)
        assert set(theta[:, axis, axis].tolist()) == {1.0, -1.0}
        assert (theta[:, 1 - axis, 1 - axis] == 1).all()
    theta = weak_view_thetas(50, generator(), scale=1.0, shift=0.0, flip="both")
    assert {tuple(pair) for pair in theta.diagonal(dim1=1, dim2=2).tolist()} == {
        (a, b) for a in (1.0, -1.0) for b in (1.0, -1.0)
    }


def test_weak_views_repeat_with_the_generator():
    assert torch.equal(weak_view_thetas(9, generator(4)), weak_view_thetas(9, generator(4)))
    assert not torch.equal(weak_view_thetas(9, generator(4)), weak_view_thetas(9, generator(5)))


def test_weak_view_then_inverse_returns_the_image_away_from_the_border(make_images):
    images = make_images(8, 64, 48)
    theta = weak_view_thetas(8, generator(1))
    back = warp.from_view(warp.to_view(images, theta), theta)
    seen = warp.from_view(torch.ones_like(images), theta) > 0.999
    assert seen.float().mean() > 0.55
    assert (back - images)[seen].abs().max() < 0.05
    assert (back - images)[seen].abs().mean() < 0.005


# ------------------------------------------------------------ averaged labels


def test_the_first_view_is_the_image_itself(make_images):
    images, seen = make_images(3, 16, 20), []

    def predict(view):
        seen.append(view.clone())
        return soft(view)

    average_over_views(images, predict, 4, generator())
    assert len(seen) == 4
    assert torch.equal(seen[0], images)
    assert all((view - images).abs().max() > 0.05 for view in seen[1:])


@pytest.mark.parametrize("views", [1, 3])
def test_known_probabilities_of_the_first_view_are_not_made_again(views, make_images):
    images, calls = make_images(2, 16, 16), []
    first = soft(images)
    kept = first.clone()

    def predict(view):
        calls.append(1)
        return soft(view)

    given = average_over_views(images, predict, views, generator(), first=first)
    assert len(calls) == views - 1
    assert torch.equal(first, kept)
    assert torch.allclose(given, average_over_views(images, soft, views, generator()), atol=1e-6)


@pytest.mark.parametrize("views", [1, 2, 5])
def test_constant_probabilities_stay_constant(views, make_images):
    constant = torch.tensor([0.7, 0.2, 0.1]).view(1, 3, 1, 1).expand(2, 3, 17, 23)
    labels = average_over_views(make_images(2, 17, 23), lambda view: constant, views, generator())
    assert torch.allclose(labels, constant, atol=1e-5)


@pytest.mark.parametrize("views", [1, 2, 5])
def test_labels_are_distributions(views, make_images, make_network):
    network = make_network(classes=3)
    images = make_images(3, 23, 20)
    labels = average_over_views(images, lambda view: network(view).softmax(dim=1), views, generator())
    assert labels.shape == (3, 3, 23, 20)
    assert labels.dtype == torch.float32
    assert labels.min() >= 0
    assert torch.allclose(labels.sum(dim=1), torch.ones(3, 23, 20), atol=1e-5)


def test_views_come_back_to_the_frame_of_the_image(make_images):
    images = make_images(4, 64, 64)
    labels = average_over_views(images, soft, 6, generator(2))
    inside = (..., slice(16, -16), slice(16, -16))
    assert (labels - soft(images))[inside].abs().max() < 0.03


def test_the_mean_by_hand(make_images):
    images = make_images(2, 16, 16)
    theta = weak_view_thetas(2, generator(7))
    second = warp.from_view(soft(warp.to_view(images, theta)) ** 2, theta)

    def predict(view):
        return soft(view) if torch.equal(view, images) else soft(view) ** 2

    labels = average_over_views(images, predict, 2, generator(7))
    total = soft(images) + second
    assert torch.allclose(labels, total / total.sum(dim=1, keepdim=True), atol=1e-5)


def test_no_gradient(make_images):
    images = make_images(2, 16, 16).requires_grad_()
    assert not average_over_views(images, soft, 3, generator()).requires_grad
