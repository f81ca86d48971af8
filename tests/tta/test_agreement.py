"""Where methods coincide: TeSLA whose teacher is its student, SHOT-IM and Tent.

With p the student's probabilities and y the pseudo-labels, the gradient of the flipped cross-entropy
is -sum_k log y_k dp_k: the labels carry none. That of the entropy is -sum_k log p_k dp_k - sum_k dp_k,
and the last sum is 0 since probabilities sum to 1. So with y = p value and gradient of both are equal,
for every parameter; the curvature is not, and once y parts from p the difference of the gradients is
that of KL(p || y) (Eq. 1 of TeSLA). With the marginal this is SHOT-IM, without it Tent.
"""

from __future__ import annotations

import pytest
import torch

from tesla_med import losses
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tta._mechanics.parameters import norm_affine

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = {
    "augment": "none",
    "weak_views": 1,
    "distillation_weight": 0.0,
    "teacher_momentum": 0.0,
    "clip_norm": None,
    "weight_decay": 0.0,
    "predict_statistics": "volume",
}
"""TeSLA whose teacher is its student, which looks at the images as they are and learns from Eq. 3 alone."""
UPDATES = 4


@pytest.fixture
def make_pair(make_tta, make_network):
    """Make TeSLA and another method on equal networks, both descending by the same SGD."""

    def make(other, params=None, **tesla_params):
        one = make_tta("tesla", make_network(), **(PLAIN | tesla_params))
        two = make_tta(other, make_network(), **(params or {}))
        if other == "tent":
            one.student.requires_grad_(False)
            for value in norm_affine(one.student, "tent"):
                value.requires_grad_(True)
        for method in (one, two):
            chosen = [item for item in method.model.parameters() if item.requires_grad]
            method.optimizer = torch.optim.SGD(chosen, lr=0.1, momentum=0.9)
        return one, two

    return make


def gradients(model):
    return {
        name: item.grad.clone()
        for name, item in model.named_parameters()
        if getattr(item, "grad", None) is not None
    }


def gap(one, two):
    """The largest relative distance of the gradients of a parameter."""
    assert one.keys() == two.keys()
    assert one
    return max(float((one[name] - two[name]).norm() / (two[name].norm() + 1e-4)) for name in one)


def step(one, two, images):
    scalars = one.adapt(images), two.adapt(images)
    return gap(gradients(one.model), gradients(two.model)), *scalars


def value(scalars, *names):
    return sum(float(scalars[f"loss/{name}"]) for name in names)


# ------------------------------------------------------------ TeSLA and SHOT-IM, TeSLA and Tent


def test_tesla_is_shot_im_where_the_teacher_is_the_student(make_pair, make_images):
    tesla, shot = make_pair("shot", {"pseudo_label_weight": 0.0})
    start = shot.model.state_dict()
    for seed in range(UPDATES):
        images = make_images(4, seed=seed)
        distance, ours, theirs = step(tesla, shot, images)
        assert distance < 1e-3
        entropy, marginal = value(theirs, "entropy"), value(theirs, "class_marginal")
        assert value(ours, "flipped_cross_entropy") == pytest.approx(entropy, rel=1e-4)
        assert value(ours, "class_marginal") == pytest.approx(marginal, rel=1e-4)
    assert len(gradients(shot.model)) > 30
    probs = tesla.predict(images)
    assert torch.allclose(probs, shot.predict(images), atol=1e-4)
    shot.model.load_state_dict(start)
    shot.reset()
    assert (probs - shot.predict(images)).abs().max() > 0.01  # and both went somewhere


def test_without_the_marginal_it_is_tent_on_the_same_parameters(make_pair, make_images):
    tesla, tent = make_pair("tent", marginal_weight=0.0)
    for seed in range(UPDATES):
        distance, ours, theirs = step(tesla, tent, make_images(4, seed=seed))
        assert distance < 1e-3
        assert value(ours, "flipped_cross_entropy") == pytest.approx(value(theirs, "entropy"), rel=1e-4)
    assert len(gradients(tent.model)) == 36  # scale and shift of 18 norms
    images = make_images(4)
    assert torch.allclose(tesla.predict(images), tent.predict(images), atol=1e-4)
    assert (tent.predict(images) - make_pair("tent")[1].predict(images)).abs().max() > 0.01


def test_shot_im_without_the_marginal_has_tents_gradient(make_tta, make_network, make_images):
    shot = make_tta("shot", make_network(), pseudo_label_weight=0.0, marginal_weight=0.0)
    tent, images = make_tta("tent", make_network()), make_images(4)
    assert value(shot.adapt(images), "entropy") == value(tent.adapt(images), "entropy")
    ours, theirs = gradients(shot.model), gradients(tent.model)
    assert gap({name: ours[name] for name in theirs}, theirs) < 1e-5


# ------------------------------------------------------------ where they part


CHANGES = {
    "marginal": {"marginal_weight": 0.5},
    "weak views": {"weak_views": 5},
    "augmented views": {"distillation_weight": 1.0, "augment": "randaugment"},
    "plain cross-entropy": {"self_learning": "plain"},
}


@pytest.mark.parametrize("changed", CHANGES.values(), ids=CHANGES)
def test_each_part_of_tesla_makes_it_another_method(changed, make_pair, make_images):
    tesla, shot = make_pair("shot", {"pseudo_label_weight": 0.0}, **changed)
    assert step(tesla, shot, make_images(4))[0] > 0.01


def test_distillation_from_the_image_itself_adds_nothing(make_pair, make_images):
    tesla, shot = make_pair("shot", {"pseudo_label_weight": 0.0}, distillation_weight=1.0)
    for seed in range(2):  # after which rounding, divided by tiny gradients, parts them
        distance, ours, _ = step(tesla, shot, make_images(4, seed=seed))
        assert distance < 1e-3
        assert abs(value(ours, "distillation")) < 1e-6


def test_a_teacher_that_stays_behind_parts_them_at_the_second_update(make_pair, make_images):
    tesla, shot = make_pair("shot", {"pseudo_label_weight": 0.0}, teacher_momentum=1.0)
    assert step(tesla, shot, make_images(4))[0] < 1e-3
    assert step(tesla, shot, make_images(4, seed=1))[0] > 0.01


def test_what_another_teacher_adds_is_the_divergence_from_it(make_pair, make_network, make_images):
    tesla, shot = make_pair("shot", {"pseudo_label_weight": 0.0})
    tesla.teacher.load_state_dict(make_network(seed=1).state_dict())
    network, teacher, images = make_network(), make_network(seed=1), make_images(4)
    assert step(tesla, shot, images)[0] > 0.01
    network.head.requires_grad_(False)
    with batch_statistics(network, momentum=None), batch_statistics(teacher, momentum=None):
        labels = teacher(2 * images - 1).softmax(dim=1).detach()
        probs = network(2 * images - 1).softmax(dim=1)
    (probs * (probs.log() - labels.log())).sum(dim=1).mean().backward()
    entropy = gradients(shot.model)
    want = {name: entropy[name] + extra for name, extra in gradients(network).items() if name in entropy}
    assert want.keys() == entropy.keys()
    assert gap(gradients(tesla.model), want) < 1e-3


# ------------------------------------------------------------ pixel by pixel


def twice(loss, logits):
    """First derivatives, and the second ones along a direction."""
    logits = logits.clone().requires_grad_(True)
    (first,) = torch.autograd.grad(loss(logits), logits, create_graph=True)
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (second,) = torch.autograd.grad((first * direction).sum(), logits)
    return first.detach(), second


@pytest.mark.parametrize("scale", [0.1, 2.0, 60.0])
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 5, 4)], ids=["tiles", "slices"])
def test_own_labels_give_the_gradient_of_the_entropy_but_not_its_curvature(shape, scale):
    logits = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    labels = logits.softmax(dim=1)
    flipped = twice(lambda item: losses.flipped_cross_entropy(item, labels), logits)
    entropy = twice(losses.entropy, logits)
    assert torch.allclose(flipped[0], entropy[0], atol=1e-6)
    if scale < 10:
        assert entropy[0].abs().max() > 1e-4
        assert (flipped[1] - entropy[1]).abs().max() > 1e-3


def test_own_labels_teach_the_plain_cross_entropy_nothing():
    logits = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    losses.cross_entropy(logits, logits.softmax(dim=1)).backward()
    assert logits.grad.abs().max() < 1e-8
