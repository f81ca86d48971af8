"""Labelled slices take part in every update of a method that learns, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from test_method_contract import few_steps

from tesla_med import losses
from tesla_med.config.models import CorrectionsConfig
from tesla_med.engine.driver import Driver
from tesla_med.engine.supervision import Labelled, Supervision
from tesla_med.errors import ConfigError
from tesla_med.tta import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")
LEARNING = [
    name if name in ("tent", "tesla") else pytest.param(name, marks=pytest.mark.slow)
    for name in METHODS.names()
    if name not in ("source", "bn")
]


def labelled(make_images, seed=9, size=20, fill=None):
    images = make_images(3, size, size, seed=seed)
    return Labelled(images, (images[:, 0] > 0.6).long(), fill)


def supervised(method, case, *, weight=1.0, seen=None, first=0):
    steps = {} if seen is None else seen
    driver = Driver(
        method, method.protocols[0], "site", lambda number, scalars: steps.update({number: scalars})
    )
    if case is not None:
        driver.supervision = Supervision(
            method, [case], CorrectionsConfig(weight=weight, batch_slices=2, first_updates=first)
        )
    return driver


def learned(method):
    """Return all weights that optimisers update, as one vector."""
    groups = [group for item in method.optimizers().values() for group in item.param_groups]
    return torch.cat([item.detach().flatten() for group in groups for item in group["params"]])


def same(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@pytest.mark.parametrize("name", LEARNING)
def test_labelled_slices_change_what_is_learned_and_a_reset_is_exact(name, make_tta, make_images):
    images, case = make_images(2, 20, 20), labelled(make_images)
    params = few_steps(name, METHODS.get(name).protocols[0])
    plain, method, seen = make_tta(name, **params), make_tta(name, **params), {}
    initial = method.state_dict()
    assert supervised(plain, None).adapt_to_case(images)
    driver = supervised(method, case, seen=seen)
    assert driver.adapt_to_case(images)
    first = method.state_dict()
    assert not torch.equal(learned(plain), learned(method))
    assert all(scalars["loss/corrections"] > 0 for scalars in seen.values())
    method.reset()
    assert same(method.state_dict(), initial)
    assert driver.adapt_to_case(images)
    assert same(method.state_dict(), first)  # what was drawn, too


@pytest.mark.parametrize(
    "name", [pytest.param(item, marks=pytest.mark.slow) if item == "tent" else item for item in LEARNING]
)
def test_updates_before_the_first_case_are_where_a_reset_leads(name, make_tta, make_images):
    images, case = make_images(2, 20, 20), labelled(make_images)
    params = few_steps(name, METHODS.get(name).protocols[0])
    plain, method = make_tta(name, **params), make_tta(name, **params)
    driver = supervised(method, case, first=2)
    taught = method.state_dict()
    assert not torch.equal(learned(plain), learned(method))
    assert method.steps == 0
    assert same(taught["optimizers"], plain.state_dict()["optimizers"])
    assert same(taught["generators"], plain.state_dict()["generators"])
    networks = [item for key, item in method.modules().items() if key not in ("policy", "policies")]
    weights = [{key: value.clone() for key, value in item.state_dict().items()} for item in networks]
    assert all(same(weights[0], item) for item in weights[1:])  # a teacher starts where its student does
    assert driver.adapt_to_case(images)
    method.reset()
    assert same(method.state_dict(), taught)


@pytest.mark.parametrize("name", ["source", "bn"])
def test_methods_that_do_not_learn_refuse(name, make_tta, make_images):
    with pytest.raises(ConfigError, match=f"method '{name}' does not learn.*such as tesla"):
        Supervision(make_tta(name), [labelled(make_images)], CorrectionsConfig(first_updates=0))


def test_the_step_goes_down_the_sum_of_both(make_tta, make_images):
    """With a plain gradient step, what the term adds is -rate * weight * its gradient."""
    images, case = make_images(2, 20, 20), labelled(make_images)
    moved = {}
    for weight in (0.5, 1.0, None):
        method = make_tta(
            "tesla", batch_slices=2, optimizer="sgd", sgd_momentum=0.0, weight_decay=0.0, learning_rate=0.1
        )
        before = learned(method)
        driver = supervised(method, None if weight is None else case, weight=weight or 1.0)
        driver.supervision and method.generator.manual_seed(0)
        method.generator.manual_seed(0)
        assert driver.adapt_to_case(images)
        moved[weight] = learned(method) - before
    half, whole = moved[0.5] - moved[None], moved[1.0] - moved[None]
    assert whole.abs().max() > 1e-4
    assert torch.allclose(2 * half, whole, atol=1e-6)


def test_running_statistics_stay(make_tta, make_images):
    method = make_tta("tent")
    before = {key: value.clone() for key, value in method.model.state_dict().items() if "running" in key}
    method.labelled_pass("model")(make_images(2, 20, 20)).sum().backward()
    assert before
    assert all(torch.equal(method.model.state_dict()[key], value) for key, value in before.items())


def test_policies_learn_nothing_from_labels(make_tta):
    method = make_tta("tesla")
    assert set(method.optimizers()) == {"student", "policy"}
    assert method.labelled_pass("policy") is None


def test_a_batch_is_of_one_case_and_every_case_is_drawn(make_tta, make_images):
    method = make_tta("tent")
    cases = [labelled(make_images, size=20), labelled(make_images, size=24)]
    supervision = Supervision(method, cases, CorrectionsConfig(batch_slices=3, first_updates=0))
    shapes = {tuple(supervision._drawn()[0].shape) for _ in range(20)}
    assert shapes == {(3, 1, 20, 20), (3, 1, 24, 24)}


def test_a_case_without_foreground_or_all_of_it_can_be_drawn(make_tta, make_images):
    images = make_images(2, 20, 20)
    for labels in (torch.zeros(2, 20, 20).long(), torch.ones(2, 20, 20).long()):
        supervision = Supervision(
            make_tta("tent"), [Labelled(images, labels)], CorrectionsConfig(first_updates=0)
        )
        assert torch.equal(supervision._drawn()[1][0], labels[0])


def test_memory_that_is_short_makes_the_batch_smaller(make_tta, make_images):
    method = make_tta("tent")
    supervision = Supervision(
        method, [labelled(make_images)], CorrectionsConfig(batch_slices=5, first_updates=0)
    )
    method.use_less_memory(2)
    assert len(supervision._drawn()[0]) == 2


def test_the_loss_by_hand():
    logits = torch.tensor([[[[2.0, 0.0]], [[0.0, 3.0]]]], requires_grad=True)
    labels, nowhere = torch.tensor([[[0, 1]]]), torch.zeros(1, 1, 2, dtype=torch.bool)
    probs = logits.detach().softmax(dim=1)
    entropy = -(probs[0, 0, 0, 0].log() + probs[0, 1, 0, 1].log()) / 2
    overlap = 1 - (2 * probs[0, 1, 0, 1] + 1e-5) / (probs[0, 1].sum() + 1 + 1e-5)
    assert losses.supervised(logits, labels, nowhere).item() == pytest.approx(
        float(entropy + overlap), abs=1e-5
    )
    hidden = torch.tensor([[[False, True]]])
    losses.supervised(logits, labels, hidden).backward()
    assert logits.grad[..., 1].abs().max() == 0
    assert logits.grad[..., 0].abs().max() > 0
