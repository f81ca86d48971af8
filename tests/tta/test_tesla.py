"""TeSLA: what an update may move, what a prediction may not, and exact repetition."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from tesla_med import losses
from tesla_med.augment import warp
from tesla_med.augment.corrected import corrected
from tesla_med.errors import AdaptationError, ConfigError
from tesla_med.models.base import norm_layers, to_model_range
from tesla_med.models.normalisation import (
    batch_statistics,
    copied,
    evenly_spaced,
    mixed_with,
    running_statistics,
)
from tesla_med.models.unet import UNet
from tesla_med.tta import METHODS
from tesla_med.tta._mechanics.parameters import clip_each, relative_size
from tesla_med.tta._shared.augmented import by_certainty, severity
from tesla_med.tta._shared.passes import activations
from tesla_med.tta._shared.teacher import weak_view_thetas
from tesla_med.tta.base import MethodContext, make_method

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"batch_slices": 4, "weak_views": 2, "policy_size": 2}


@pytest.fixture
def make_tesla(make_tta):
    def make(network=None, *, seed=0, **params):
        return make_tta("tesla", network, seed=seed, **(QUICK | params))

    return make


def running(model):
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name}


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def moved(before, after):
    return [name for name in before if not torch.equal(before[name], after[name])]


def eval_probs(network, images):
    with torch.no_grad():
        return network.eval()(2 * images - 1).softmax(dim=1)


# ------------------------------------------------------------ what an update moves


def test_the_head_is_frozen_bit_for_bit(make_tesla, make_images):
    method, images = make_tesla(learning_rate=0.05, teacher_momentum=0.5), make_images(4)
    before = weights(method.student.head)
    other = weights(method.student)
    for _ in range(2):
        method.adapt(images)
    assert before
    for model in (method.student, method.teacher):
        assert moved(before, weights(model.head)) == []
    rest = [name for name in other if not name.startswith("outc.")]
    for model in (method.student, method.teacher):
        now = moved(other, weights(model))
        assert [name for name in rest if "weight" in name and name not in now] == []


@pytest.mark.parametrize("augment", ["learned", "randaugment"])
def test_the_policy_is_told_of_the_planes(make_tesla, augment):
    assert not make_tesla(augment=augment).policy.all_planes
    assert make_tesla(augment=augment, warp_planes="all").policy.all_planes


def test_freeze_norm_affine(make_tesla, make_images):
    method, images = make_tesla(freeze_norm_affine=True, learning_rate=0.05), make_images(4)
    before = weights(method.student)
    affine = {id(value) for layer in norm_layers(method.student) for value in layer.parameters()}
    names = [name for name, value in method.student.named_parameters() if id(value) in affine]
    method.adapt(images)
    now = moved(before, weights(method.student))
    assert len(names) == 36
    assert not set(names) & set(now)
    assert [name for name in now if name.endswith("weight")]
    free = make_tesla(freeze_norm_affine=False, learning_rate=0.05)
    free.adapt(images)
    assert set(names) <= set(moved(before, weights(free.student)))


def test_rate_zero_moves_no_learnable_parameter(make_tesla, make_images):
    zero = {"learning_rate": 0.0, "policy_learning_rate": 0.0, "magnitude_learning_rate": 0.0}
    method, images = make_tesla(**zero), make_images(4)
    modules = method.modules()
    before = {name: weights(module) for name, module in modules.items()}
    for _ in range(2):
        method.adapt(images)
    for name, module in modules.items():
        assert moved(before[name], weights(module)) == [], name


def test_an_update_moves_student_teacher_and_policy(make_tesla, make_images):
    method, images = make_tesla(), make_images(4)
    before = {name: weights(module) for name, module in method.modules().items()}
    scalars = method.adapt(images)
    now = {name: moved(before[name], weights(module)) for name, module in method.modules().items()}
    assert all(now.values())
    assert set(now["policy"]) == {"logits", "raw_magnitudes"}
    assert method.steps == 1
    assert set(scalars) == {
        "loss/flipped_cross_entropy",
        "loss/class_marginal",
        "loss/distillation",
        "loss/policy",
    }
    assert all(torch.isfinite(torch.as_tensor(value)) for value in scalars.values())
    change = max((weights(method.student)[k] - v).abs().max() for k, v in before["student"].items())
    assert change < 3e-4  # one AdamW step of 2e-4


def test_the_teacher_is_the_moving_average_of_the_student(make_tesla, make_images):
    method, images = make_tesla(teacher_momentum=0.9, learning_rate=0.01), make_images(4)
    before = weights(method.teacher)
    method.adapt(images)
    student = weights(method.student)
    for name, value in weights(method.teacher).items():
        assert torch.allclose(value, 0.9 * before[name] + 0.1 * student[name], atol=1e-6), name


def test_the_given_network_is_not_touched(make_tesla, make_network, make_images):
    network = make_network()
    before = copy.deepcopy(network.state_dict())
    method = make_tesla(network, learning_rate=0.05)
    method.adapt(make_images(4))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_descent_lowers_the_loss_it_descends(make_tesla, make_images):
    params = {"learning_rate": 5e-3, "teacher_momentum": 1.0, "distillation_weight": 0.0, "weak_views": 1}
    method, images = make_tesla(**params), make_images(4)
    values = [method.adapt(images) for _ in range(12)]
    total = [float(v["loss/flipped_cross_entropy"] + v["loss/class_marginal"]) for v in values]
    assert total[-1] < total[1] - 0.01


def test_without_distillation_the_student_is_not_taken_through_views(make_tesla, make_images):
    method, images = make_tesla(distillation_weight=0.0), make_images(4)
    passes = []
    method.student.register_forward_pre_hook(lambda *_: passes.append(1))
    scalars = method.adapt(images)
    assert len(passes) == 1
    assert float(scalars["loss/distillation"]) == 0.0


@pytest.mark.parametrize("weight", ["marginal_weight", "distillation_weight", "severity_weight"])
def test_weights_of_the_terms_matter(weight, make_tesla, make_images):
    images = make_images(4)
    low, high = make_tesla(**{weight: 0.0}), make_tesla(**{weight: 5.0})
    for method in (low, high):
        for _ in range(2):
            method.adapt(images)
    module = "policy" if weight == "severity_weight" else "student"
    assert moved(weights(low.modules()[module]), weights(high.modules()[module]))


@pytest.mark.parametrize(("name", "bad"), [("momentum", 1), ("policy_size", 40), ("op_set", "none")])
def test_wrong_parameters(name, bad, make_tesla):
    with pytest.raises(ConfigError, match=name if name != "op_set" else "op set 'none'"):
        make_tesla(**{name: bad})


# ------------------------------------------------------------ running statistics


def passes_through(model, method, images, images_seen):
    """How each forward of ``model`` in one update moves its first norm's running mean."""
    rows = []
    layer = norm_layers(model)[0]

    def before(module, inputs):
        rows.append([layer.running_mean.clone(), inputs[0].clone()])

    def after(module, inputs, output):
        rows[-1].append(not torch.equal(rows[-1][0], layer.running_mean))

    handles = [model.register_forward_pre_hook(before), model.register_forward_hook(after)]
    method.adapt(images)
    for handle in handles:
        handle.remove()
    clean = to_model_range(images, method.context.model_range)
    return [(torch.allclose(seen, clean), moves) for _, seen, moves in rows]


@pytest.mark.parametrize("passes", ["clean", "all"])
def test_which_passes_move_running_statistics(passes, make_tesla, make_images):
    images = make_images(4)
    method = make_tesla(moving_passes=passes, weak_views=3)
    teacher = passes_through(method.teacher, method, images, None)
    method = make_tesla(moving_passes=passes, weak_views=3)
    student = passes_through(method.student, method, images, None)
    augmented = passes == "all"
    assert teacher == [(True, True), (False, augmented), (False, augmented), (False, augmented)]
    assert student == [(True, True), (False, augmented)]


@pytest.mark.parametrize("times", [1, 2])
def test_how_far_a_clean_batch_moves_the_teacher(times, make_tesla, make_images):
    images = make_images(4)
    params = {"teacher_momentum": 1.0, "statistics_momentum": 0.3, "teacher_clean_moves": times}
    method = make_tesla(**params)
    layer = norm_layers(method.teacher)[0]
    features = method.teacher.inc.double_conv[0](2 * images - 1)
    before, batch = layer.running_mean.clone(), features.mean(dim=(0, 2, 3))
    method.adapt(images)
    left = 0.7**times
    assert torch.allclose(layer.running_mean, left * before + (1 - left) * batch, atol=1e-5)


def test_one_share_for_the_student(make_tesla, make_images):
    images = make_images(4)
    method = make_tesla(statistics_momentum=0.3, learning_rate=0.0)
    layer = norm_layers(method.student)[0]
    batch = method.student.inc.double_conv[0](2 * images - 1).mean(dim=(0, 2, 3))
    want = 0.7 * layer.running_mean + 0.3 * batch
    method.adapt(images)
    assert torch.allclose(layer.running_mean, want, atol=1e-5)


# ------------------------------------------------------------ predicting


@pytest.mark.parametrize("statistics", ["running", "volume"])
def test_predicting_with_one_view_changes_nothing(statistics, make_tesla, make_images, same_state):
    method, images = make_tesla(predict_statistics=statistics), make_images(5)
    method.adapt(images)
    before = method.state_dict()
    first = method.predict(images)
    assert same_state(before, method.state_dict())
    assert torch.equal(first, method.predict(images))


@pytest.mark.parametrize("statistics", ["running", "volume"])
def test_predicting_with_views_moves_nothing(statistics, make_tesla, make_images, same_state):
    method = make_tesla(predict_statistics=statistics, predict_views=3)
    images = make_images(5)
    method.adapt(images)
    before = method.state_dict()
    first = method.predict(images)
    assert same_state(before, method.state_dict())
    assert torch.equal(first, method.predict(images))
    single = make_tesla(predict_statistics=statistics)
    single.adapt(images)
    assert (first - single.predict(images)).abs().max() > 1e-4


def test_volume_statistics_equal_one_forward_in_batch_mode(make_tesla, make_images, batch_mode_probs):
    method, images = make_tesla(predict_statistics="volume"), make_images(7, 48, 48)
    method.adapt(images[:4])
    in_batch_mode, under_its_statistics = batch_mode_probs(copy.deepcopy(method.teacher), images)
    result = method.predict(images)
    assert torch.allclose(result, under_its_statistics, atol=1e-5)
    by_running = eval_probs(copy.deepcopy(method.teacher), images)
    assert (result - in_batch_mode).abs().mean() < 0.2 * (by_running - in_batch_mode).abs().mean()


def test_volume_statistics_by_hand(make_tesla, make_images):
    method, images = make_tesla(predict_statistics="volume", max_slices=3), make_images(7)
    used = evenly_spaced(images, 3)
    with method.deployed(images) as teacher:
        layer = norm_layers(teacher)[0]
        features = teacher.inc.double_conv[0](2 * used - 1)
        assert torch.allclose(layer.running_mean, features.mean(dim=(0, 2, 3)), atol=1e-5)
        assert torch.allclose(layer.running_var, features.var(dim=(0, 2, 3)), rtol=1e-4)


def test_running_statistics_predict_slice_by_slice(make_tesla, make_images):
    method, images = make_tesla(), make_images(5)
    method.adapt(images)
    whole = method.predict(images)
    single = torch.cat([method.predict(images[[i]]) for i in range(5)])
    assert torch.allclose(whole, single, atol=1e-5)


@pytest.mark.parametrize("statistics", ["running", "volume"])
def test_the_deployed_network_repeats_the_prediction(statistics, make_tesla, make_images):
    method, images = make_tesla(predict_statistics=statistics), make_images(5)
    method.adapt(images)
    want = method.predict(images)
    with method.deployed(images) as network:
        saved = copy.deepcopy(network.state_dict())
    fresh = UNet(1, 2, 4)
    fresh.load_state_dict(saved)
    assert torch.allclose(eval_probs(fresh, images), want, atol=1e-6)


MIXED = {"predict_statistics": "volume", "statistics_share": 0.5}


def test_updates_and_predictions_mix_the_statistics_of_images_and_source(make_tesla, make_images):
    images = make_images(6)
    method, own = (
        make_tesla(**MIXED, learning_rate=0.0),
        make_tesla(predict_statistics="volume", learning_rate=0.0),
    )
    source = copied(running_statistics(method.student))
    for item in (method, own):
        item.adapt(images)  # moves running statistics, which must not count
    with (
        torch.no_grad(),
        batch_statistics(method.teacher, momentum=None),
        mixed_with(method.teacher, source, 0.5),
    ):
        want = method.logits(method.teacher, images).softmax(1)
    assert torch.allclose(method.predict(images), want, atol=1e-5)
    assert not torch.allclose(method.predict(images), own.predict(images), atol=1e-3)
    assert torch.allclose(method._learning(images).logits.softmax(1), want, atol=1e-4)


@pytest.mark.parametrize("of_a_case", [True, False])
def test_the_deployed_network_repeats_a_mixture(of_a_case, make_tesla, make_tta, make_images):
    method, images = make_tesla(**MIXED, learning_rate=0.01), make_images(6)
    for _ in range(2):
        method.adapt(images)
    want = method.predict(images)
    given = images if of_a_case else None
    params = method.deployed_params(given)
    before = [item.clone() for pair in running_statistics(method.teacher) for item in pair]
    with method.deployed(given) as network:
        again = make_method("source", network, params, method.context).predict(images)
    assert torch.allclose(again, want, atol=1e-5)
    now = [item for pair in running_statistics(method.teacher) for item in pair]
    assert all(torch.equal(one, two) for one, two in zip(before, now, strict=True))


def test_without_batch_norm_there_is_nothing_to_mix(make_images):
    torch.manual_seed(0)
    network = UNet(1, 2, 4, "group").eval()
    method = make_method("tesla", network, MIXED, MethodContext(torch.device("cpu"), seed=0))
    method.adapt(make_images(4))
    assert torch.isfinite(method.predict(make_images(4))).all()


def test_rates_relative_to_the_weights(make_tesla):
    method, plain = make_tesla(relative_rate=True, learning_rate=0.01), make_tesla(learning_rate=0.01)
    trained = [item for item in method.student.parameters() if item.requires_grad]
    rates = [group["lr"] for group in method.optimizer.param_groups]
    assert len(rates) == len(trained)
    assert {group["lr"] for group in plain.optimizer.param_groups} == {0.01}
    for rate, weight in zip(rates, trained, strict=True):
        assert rate == pytest.approx(0.01 * relative_size(weight))
    assert relative_size(trained[1]) == 1.0  # a bias


def test_the_relative_size_of_new_weights_is_one():
    torch.manual_seed(0)
    for layer in (torch.nn.Conv2d(64, 64, 3), torch.nn.Linear(300, 200)):
        assert relative_size(layer.weight) == pytest.approx(1.0, abs=0.02)
        layer.weight.data.mul_(3)
        assert relative_size(layer.weight) == pytest.approx(3.0, abs=0.06)
    assert relative_size(torch.nn.Parameter(torch.zeros(2, 2))) == 1.0


def test_the_mean_over_predicted_views_is_a_distribution(make_tesla, make_images):
    method, images = make_tesla(predict_views=4), make_images(3, 20, 23)
    probs = method.predict(images)
    assert torch.allclose(probs.sum(dim=1), torch.ones(3, 20, 23), atol=1e-5)


# ------------------------------------------------------------ state


def adapt_some(method, images, updates=2):
    for _ in range(updates):
        method.adapt(images)
    return method.predict(images)


@pytest.mark.parametrize("params", [{}, {"moving_passes": "all", "predict_views": 2}])
def test_a_run_repeats_bit_for_bit(params, make_tesla, make_images):
    images = make_images(4)
    assert torch.equal(adapt_some(make_tesla(**params), images), adapt_some(make_tesla(**params), images))
    other = adapt_some(make_tesla(seed=1, **params), images)
    assert not torch.equal(adapt_some(make_tesla(**params), images), other)


def test_a_run_does_not_depend_on_the_global_generator(make_tesla, make_images):
    images, results = make_images(4), []
    for seed in (0, 1):
        method = make_tesla()
        torch.manual_seed(seed)
        results.append(adapt_some(method, images))
    assert torch.equal(*results)


def test_reset_restores_bit_for_bit(make_tesla, make_images, same_state):
    params = {"draw": "replacement", "updates_per_case": 2, "predict_views": 2}
    method, images = make_tesla(**params), make_images(6)
    initial = method.state_dict()

    def go():
        method.start_epoch(0, method.batches(images))
        for batch in method.batches(images):
            method.adapt(batch)
        return method.predict(images)

    first = go()
    assert not same_state(initial, method.state_dict())
    method.reset()
    assert same_state(initial, method.state_dict())
    assert torch.equal(first, go())


def test_a_restored_state_continues_bit_for_bit(make_tesla, make_images, tmp_path):
    images = make_images(4)
    method = make_tesla(predict_views=2)
    adapt_some(method, images)
    torch.save(method.state_dict(), tmp_path / "state.pt")
    want = adapt_some(method, images)
    other = make_tesla(predict_views=2, seed=77)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(adapt_some(other, images), want)
    assert other.steps == method.steps == 4


def test_a_saved_state_is_a_copy(make_tesla, make_images, same_state):
    method = make_tesla()
    saved = method.state_dict()
    kept = copy.deepcopy(saved)
    adapt_some(method, make_images(4))
    assert same_state(saved, kept)
    method.load_state_dict(saved)
    adapt_some(method, make_images(4))
    assert same_state(saved, kept)


# ------------------------------------------------------------ several passes


def test_refresh_moves_running_statistics_before_the_first_pass_only(make_tesla, make_images):
    method, images = make_tesla(refresh_statistics=True), make_images(8)
    parameters = weights(method.student)
    source = running(method.student)
    method.start_epoch(0, method.batches(images))
    refreshed = running(method.student)
    assert len(moved(source, refreshed)) == len(source)
    assert moved(refreshed, running(method.teacher)) == []
    assert moved(parameters, weights(method.student)) == []
    reference = copy.deepcopy(make_tesla().student).train()
    with torch.no_grad():
        for start in (0, 4):
            reference(2 * images[start : start + 4] - 1)
    for name, value in running(reference).items():
        assert torch.allclose(refreshed[name], value, atol=1e-6), name
    method.start_epoch(1, method.batches(images))
    assert moved(refreshed, running(method.student)) == []


def test_without_refresh_nothing_moves_before_the_first_pass(make_tesla, make_images, same_state):
    method, images = make_tesla(), make_images(8)
    before = method.state_dict()
    method.start_epoch(0, method.batches(images))
    assert same_state(before, method.state_dict())


@pytest.mark.parametrize("restart", [True, False])
def test_policy_restart(restart, make_tesla, make_images):
    method, images = make_tesla(reset_policy_each_epoch=restart), make_images(4)
    method.start_epoch(0, [])
    method.adapt(images)
    assert method.policy.raw_magnitudes.abs().sum() > 0
    method.start_epoch(1, [])
    assert (method.policy.raw_magnitudes.abs().sum() == 0) == restart
    assert (method.policy.logits.abs().sum() == 0) == restart


def test_fewer_views_in_the_first_pass(make_tesla, make_images):
    method, images = make_tesla(weak_views=4, weak_views_first_epoch=1), make_images(4)
    passes = []
    method.teacher.register_forward_pre_hook(lambda *_: passes.append(1))
    for epoch, want in ((0, 2), (1, 5)):  # the policy adds one
        method.start_epoch(epoch, [])
        passes.clear()
        method.adapt(images)
        assert len(passes) == want


def test_batches_in_order_and_with_replacement(make_tesla, make_images):
    images = make_images(10, 8, 8)
    ordered = list(make_tesla(batch_slices=4).batches(images))
    assert [batch.shape[0] for batch in ordered] == [4, 4, 2]
    assert torch.equal(torch.cat(ordered), images)
    whole = list(make_tesla(batch_slices=None).batches(images))
    assert len(whole) == 1
    assert torch.equal(whole[0], images)
    method = make_tesla(batch_slices=8, draw="replacement", updates_per_case=5)
    drawn = list(method.batches(images))
    assert [batch.shape[0] for batch in drawn] == [8] * 5
    known = {tuple(image.flatten().tolist()) for image in images}
    assert {tuple(image.flatten().tolist()) for batch in drawn for image in batch} == known
    assert not torch.equal(drawn[0], drawn[1])


# ------------------------------------------------------------ unusual images


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(4, 1, 32, 32),
        torch.ones(4, 1, 32, 32),
        torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0)),
        torch.rand(2, 1, 20, 23, generator=torch.Generator().manual_seed(0)),
        torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)),
    ],
    ids=["zeros", "ones", "one slice", "20x23", "8x8"],
)
@pytest.mark.parametrize("statistics", ["running", "volume"])
def test_unusual_images(images, statistics, make_tesla):
    method = make_tesla(predict_statistics=statistics)
    for _ in range(2):
        scalars = method.adapt(images)
        assert all(torch.isfinite(torch.as_tensor(value)) for value in scalars.values())
    probs = method.predict(images)
    assert probs.shape == (images.shape[0], 2, *images.shape[2:])
    assert torch.isfinite(probs).all()
    assert torch.allclose(probs.sum(dim=1), torch.ones_like(probs[:, 0]), atol=1e-5)
    assert all(torch.isfinite(value).all() for value in weights(method.student).values())


def test_a_network_sure_of_one_class(make_tesla, make_network, make_images):
    network = make_network()
    with torch.no_grad():
        network.head.conv.bias.copy_(torch.tensor([300.0, -300.0]))
    method, images = make_tesla(network), make_images(4)
    for _ in range(3):
        scalars = method.adapt(images)
        assert all(torch.isfinite(torch.as_tensor(value)) for value in scalars.values())
    assert torch.isfinite(method.predict(images)).all()
    assert all(torch.isfinite(value).all() for value in weights(method.student).values())


def test_bfloat16_stays_near_float32(make_tta, make_images):
    images = make_images(4)
    exact, rough = (make_tta("tesla", precision=p, **QUICK) for p in ("float32", "bfloat16"))
    for method in (exact, rough):
        method.adapt(images)
    probs = rough.predict(images)
    assert probs.dtype == torch.float32
    assert 0 < (probs - exact.predict(images)).abs().max() < 0.05
    assert all(value.dtype == torch.float32 for value in weights(rough.student).values())


# ------------------------------------------------------------ parts


def test_severity_by_hand():
    seen = [torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[3.0], [1.0]])]
    clean = [torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([[1.0], [1.0]])]
    assert severity(seen, clean).tolist() == pytest.approx([(2.5 + 4.0) / 2, 0.0])


def test_severity_without_batch_norm_goes_with_every_device():
    elsewhere = torch.ones(3, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        elsewhere + torch.zeros(3)
    assert (elsewhere + severity([], [])).shape == (3,)
    assert float(severity([], [])) == 0.0


def test_severity_of_the_paper_is_a_norm():
    """Summed over the channels of a layer, the mean over layers (Eq. 9)."""
    seen = [torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[2.0], [0.0]])]
    clean = [torch.zeros(2, 2), torch.zeros(2, 1)]
    assert severity(seen, clean, summed=True).tolist() == pytest.approx([((1 + 4) + 4) / 2, 0.0])
    assert severity(seen, clean).tolist() == pytest.approx([((1 + 4) / 2 + 4) / 2, 0.0])


@pytest.mark.parametrize(("severity_of", "layers"), [("network", 18), ("encoder", 10)])
def test_severity_looks_at_the_layers_it_is_told(severity_of, layers, make_tesla, make_images, monkeypatch):
    method, seen = make_tesla(severity_of=severity_of), []

    def noted(attacked, reference, *, summed):
        seen.append((len(attacked), len(reference), summed))
        return severity(attacked, reference, summed=summed)

    monkeypatch.setattr("tesla_med.tta._shared.augmented.severity", noted)
    method.adapt(make_images(3))
    assert seen == [(layers, layers, severity_of == "encoder")]


def test_the_severity_of_the_paper_changes_the_policy(make_tesla, make_images):
    magnitudes = []
    for severity_of in ("network", "encoder"):
        method = make_tesla(severity_of=severity_of, severity_weight=10.0)
        for _ in range(3):
            method.adapt(make_images(4))
        magnitudes.append(method.policy.raw_magnitudes.detach().clone())
    assert not torch.allclose(*magnitudes, atol=1e-4)


def test_severity_has_no_gradient_in_the_reference():
    seen, clean = (torch.ones(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True))
    severity([seen], [clean]).sum().backward()
    assert seen.grad is not None
    assert clean.grad is None


def test_activations_are_spatial_means_at_the_input_of_every_norm(make_network, make_images):
    network, images = make_network(), make_images(3)
    with activations(network) as means:
        network(images)
    assert len(means) == 18
    want = network.inc.double_conv[0](images).mean(dim=(2, 3))
    assert torch.allclose(means[0], want, atol=1e-6)
    network(images)
    assert len(means) == 18  # hooks are gone


def test_clip_each_scales_every_parameter_on_its_own():
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), 3.0)
    model.bias.grad = torch.tensor([0.3, 0.4])
    clip_each(model, 1.0)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, abs=1e-5)
    assert model.weight.grad[0, 0].item() == pytest.approx(0.5, abs=1e-5)
    assert model.bias.grad.tolist() == pytest.approx([0.3, 0.4])
    clip_each(nn.Linear(2, 2), 1.0)


def test_pseudo_labels_are_the_mean_over_weak_views(make_tesla, make_images):
    method, images = make_tesla(weak_views=2), make_images(4)
    generator = torch.Generator()
    generator.set_state(method.generator.get_state())
    teacher = copy.deepcopy(method.teacher)
    for layer in norm_layers(teacher):
        layer.train()
    labels, _ = method._pseudo_labels(images)
    theta = weak_view_thetas(4, generator)

    def warped(values, matrix, padding):
        grid = nn.functional.affine_grid(matrix, list(values.shape), align_corners=False)
        return nn.functional.grid_sample(values, grid, padding_mode=padding, align_corners=False)

    square = torch.cat([theta, torch.tensor([[[0.0, 0, 1]]]).expand(4, 1, 3)], dim=1)
    with torch.no_grad():
        first = teacher(2 * images - 1).softmax(dim=1)
        second = teacher(2 * warped(images, theta, "reflection") - 1).softmax(dim=1)
    total = first + warped(second, torch.linalg.inv(square)[:, :2], "zeros")
    assert torch.allclose(labels, total / total.sum(dim=1, keepdim=True), atol=1e-4)


@pytest.mark.parametrize("power", [0.0, 4.0])
@pytest.mark.parametrize("views", [["smooth"], ["field", "field_smooth"]])
def test_corrected_views_count_by_their_certainty(make_tesla, make_images, views, power):
    more = {"corrected_views": views, "corrected_certainty": power}
    plain, method = make_tesla(weak_views=2), make_tesla(weak_views=2, **more)
    images = make_images(4)
    teacher = batch_mode(copy.deepcopy(method.teacher))
    weak, labels = plain._pseudo_labels(images)[0], method._pseudo_labels(images)[0]
    with torch.no_grad():
        seen = [weak, *(teacher(2 * corrected(images, view) - 1).softmax(dim=1) for view in views)]
    weights = [
        losses.normalised_entropy(probs).mean(dim=(1, 2))[:, None, None, None] ** -power for probs in seen
    ]
    wanted = sum(weight * probs for weight, probs in zip(weights, seen, strict=True)) / sum(weights)
    assert torch.allclose(labels, wanted, atol=1e-4)
    assert not torch.allclose(labels, weak, atol=1e-3)
    assert torch.allclose(labels.sum(dim=1), torch.ones(()), atol=1e-5)
    assert method.passes_per_update() == plain.passes_per_update() + len(views)


def test_certain_views_of_tiles_and_of_certain_images_count_alike():
    sure = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    unsure = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    found = by_certainty(torch.stack([sure, unsure]), 4.0)
    assert torch.allclose(found, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), atol=1e-5)


def test_the_student_descends_the_stated_losses(make_tesla, make_images):
    method, images = make_tesla(distillation_weight=0.0, clip_norm=None), make_images(4)
    student = copy.deepcopy(method.student)
    for layer in norm_layers(student):
        layer.train()
    labels, _ = method._pseudo_labels(images)
    logits = student(2 * images - 1)
    total = losses.flipped_cross_entropy(logits, labels) + losses.class_marginal(logits)
    want = torch.autograd.grad(total, student.inc.double_conv[0].weight)[0]
    method._update_student(images, labels)
    assert torch.allclose(method.student.inc.double_conv[0].weight.grad, want, atol=1e-6)


def batch_mode(model):
    twin = copy.deepcopy(model)
    for layer in norm_layers(twin):
        layer.train()
    return twin


def test_the_policy_objective_by_hand(make_tesla, make_images):
    method, images = make_tesla(severity_weight=3.0, op_set="released_mri"), make_images(4)
    _, reference = method._pseudo_labels(images)
    teacher, before = batch_mode(method.teacher), method.state_dict()
    result = method._update_policy(images, reference)
    after = weights(method.policy)
    method.load_state_dict(before)
    draw = method.policy.draw(tuple(images.shape), "uniform")
    view = method.policy.apply_draw(images, draw)
    with activations(teacher) as seen:
        probs = teacher(2 * view.images - 1).softmax(dim=1)
    back = warp.from_view(probs, view.theta)
    entropy = (back * back.clamp_min(1e-6).log()).sum(dim=1).mean(dim=(1, 2))
    distance = sum(((a - b) ** 2).mean(dim=1) for a, b in zip(seen, reference, strict=True)) / 18
    want = entropy + 3.0 * distance
    assert distance.mean() > 1e-3
    assert result.item() == pytest.approx(want.mean().item(), rel=1e-4)
    log_p = method.policy.logits.log_softmax(dim=0)[draw.sub_policy]
    (want + want.detach() * log_p).mean().backward()
    used = method.policy.raw_magnitudes.grad.abs() > 1e-5
    assert used.any()
    step = after["raw_magnitudes"] - method.policy.raw_magnitudes.detach()
    assert torch.equal(step[used].sign(), -method.policy.raw_magnitudes.grad[used].sign())
    sure = method.policy.logits.grad.abs() > 1e-5
    step = after["logits"] - method.policy.logits.detach()
    assert sure.any()
    assert torch.equal(step[sure].sign(), -method.policy.logits.grad[sure].sign())


def test_the_distillation_loss_by_hand(make_tesla, make_images):
    method, images = make_tesla(op_set="released_mri", moving_passes="clean"), make_images(4)
    labels, _ = method._pseudo_labels(images)
    student, before = batch_mode(method.student), method.state_dict()
    result = method._update_student(images, labels)["loss/distillation"]
    method.load_state_dict(before)
    view = method.policy.apply_draw(images, method.policy.draw(tuple(images.shape), "probability"))
    assert (view.theta - torch.eye(2, 3)).abs().max() > 0.01
    targets = warp.to_view(labels, view.theta)
    log_probs = student(2 * view.images - 1).log_softmax(dim=1)
    want = (targets * (targets.clamp_min(1e-9).log() - log_probs)).sum(dim=1).mean()
    assert result.item() == pytest.approx(want.item(), rel=1e-3)


@pytest.mark.parametrize("sampling", ["uniform", "probability"])
def test_how_sub_policies_are_drawn(sampling, make_tesla, make_images, monkeypatch):
    method, images, seen = make_tesla(policy_sampling=sampling), make_images(4), []
    draw = method.policy.draw

    def spy(shape, by):
        seen.append(by)
        return draw(shape, by)

    monkeypatch.setattr(method.policy, "draw", spy)
    method.adapt(images)
    assert seen == [sampling, "probability"]


def test_clipping_is_done_before_the_step(make_tesla, make_images):
    method, images = make_tesla(clip_norm=1e-3), make_images(4)
    method.adapt(images)
    norms = [value.grad.norm() for value in method.student.parameters() if value.grad is not None]
    assert max(norms) <= 1e-3 * (1 + 1e-4)
    free = make_tesla(clip_norm=None)
    free.adapt(images)
    assert max(value.grad.norm() for value in free.student.parameters() if value.grad is not None) > 1e-2


@pytest.fixture
def given_to_losses(monkeypatch):
    """Write down what the losses of the student are given."""
    found = []
    for name in ("flipped_cross_entropy", "distillation"):
        original = getattr(losses, name)

        def watched(logits, labels, weight=None, *, name=name, original=original):
            value = original(logits, labels, weight)
            found.append((name, logits.detach(), labels, float(value.detach())))
            return value

        monkeypatch.setattr(losses, name, watched)
    return found


def test_targets_of_the_first_step(make_tta, make_images, given_to_losses):
    method = make_tta("tesla", weak_views=4)
    method.adapt(make_images(4))
    assert [item[0] for item in given_to_losses] == ["flipped_cross_entropy", "distillation"]
    for _, logits, labels, loss in given_to_losses:
        own = logits.softmax(dim=1)
        hard = nn.functional.one_hot(own.argmax(1), 2).movedim(-1, 1).float()
        assert not labels.requires_grad
        assert torch.allclose(labels.sum(dim=1), torch.ones(()), atol=1e-5)
        assert (labels - own).abs().max() > 0.01  # another view, though student and teacher are still equal
        assert (labels - hard).abs().mean() > 0.01
        assert loss > 0.001


def test_a_teacher_that_is_certain_is_believed(make_tta, make_images, given_to_losses):
    method = make_tta("tesla", weak_views=3)
    with torch.no_grad():
        head = method.teacher.head
        bias = next(module for module in head.modules() if isinstance(module, nn.Conv2d)).bias
        bias.copy_(torch.tensor([-50.0, 50.0]))
    method.adapt(make_images(4))
    for _, logits, labels, _ in given_to_losses:
        assert labels[:, 1].min() > 0.99
        assert logits.softmax(dim=1)[:, 1].min() < 0.9


@pytest.mark.parametrize("measured", [None, 0.25])
@pytest.mark.parametrize("reliability", [0.0, 2.0])
def test_a_pixel_counts_as_much_as_its_label_is_certain(reliability, measured, make_tesla, monkeypatch):
    method = make_tesla(reliability=reliability)
    labels = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.9, 0.1]]).view(3, 2, 1, 1)
    given = None if measured is None else torch.full((3, 1, 1), measured)
    found = method._pixel_weight(labels, given)
    if reliability == 0.0:
        assert found is given
    else:
        entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2)
        want = torch.tensor([1.0, 0.0, (1.0 - entropy) ** 2]) * (measured or 1.0)
        assert torch.allclose(found.flatten(), want, atol=1e-4)


@pytest.mark.parametrize(("name", "needed"), [("tesla", False), ("tesla_s", True)])
def test_features_are_kept_where_they_are_looked_at(name, needed, make_tta, make_images):
    method, images = make_tta(name, **QUICK), make_images(2)
    assert (method._learning(images).features is not None) == needed


def test_what_is_saved_says_nothing_of_a_share_where_there_is_none(make_tesla, make_images):
    method, images = make_tesla(predict_statistics="volume", learning_rate=0.01), make_images(4)
    method.adapt(images)
    assert "statistics_share" not in method.deployed_params()
    after = [item.clone() for pair in running_statistics(method.predictor) for item in pair]
    with method.deployed() as network:
        saved = [item.clone() for pair in running_statistics(network) for item in pair]
    assert all(torch.equal(*pair) for pair in zip(saved, after, strict=True))
    assert make_tesla(**MIXED).deployed_params()["statistics_share"] == 0.5


def test_a_model_that_is_all_head_is_refused(make_tesla, make_network):
    network = make_network()
    for parameter in network.parameters():
        parameter.requires_grad_(False)

    class Headless(type(network)):
        head = property(lambda self: self)

    network.__class__ = Headless
    with pytest.raises(AdaptationError, match="found 0 parameters to adapt"):
        make_tesla(network)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_activations_of_half_precision_are_summed_in_float32(dtype):
    norm = nn.BatchNorm2d(1).eval()
    images = torch.ones(1, 1, 512, 512, dtype=dtype)
    with activations(norm) as means:
        norm(images.float())
        norm(images)
    assert [item.dtype for item in means] == [torch.float32] * 2
    assert [float(item) for item in means] == [1.0, 1.0]


def test_registered():
    assert METHODS.get("tesla").name == "tesla"


def test_the_marginal_can_follow_the_teacher(make_tesla, make_images):
    method, images = make_tesla(marginal_target="teacher", distillation_weight=0.0), make_images(4)
    labels, _ = method._pseudo_labels(images)
    shares = labels.mean(dim=(0, 2, 3))
    before = method.state_dict()
    assert before["class_shares"] is None
    result = method._update_student(images, labels)
    assert torch.allclose(method.class_shares, shares)
    probs = batch_mode(method.model)
    method.load_state_dict(before)
    assert method.class_shares is None
    probs = batch_mode(method.student)(2 * images - 1).softmax(dim=1)
    mean = probs.mean(dim=(0, 2, 3))
    want = (mean * (mean / shares).log()).sum()
    assert result["loss/class_marginal"].item() == pytest.approx(want.item(), abs=1e-5)
    method._update_student(images, labels)
    uniform = torch.full_like(labels, 1 / labels.shape[1])
    method._update_student(images, uniform)
    assert torch.allclose(method.class_shares, 0.9 * shares + 0.1 / labels.shape[1], atol=1e-6)


def test_class_shares_are_part_of_the_state(make_tesla, make_images):
    method, images = make_tesla(marginal_target="teacher"), make_images(4)
    method.adapt(images)
    kept = method.state_dict()
    method.adapt(images)
    after = weights(method.teacher)
    method.load_state_dict(kept)
    method.adapt(images)
    assert all(torch.equal(value, after[name]) for name, value in weights(method.teacher).items())
    method.reset()
    assert method.class_shares is None


def test_neighbouring_slices_are_mixed_in(make_tesla, make_images):
    images = make_images(4)
    plain = make_tesla().predict(images)
    mixed = make_tesla(neighbour_share=0.25).predict(images)
    assert torch.allclose(mixed[1], 0.25 * plain[0] + 0.5 * plain[1] + 0.25 * plain[2], atol=1e-6)
    assert torch.allclose(mixed[0], 0.75 * plain[0] + 0.25 * plain[1], atol=1e-6)
    assert torch.allclose(mixed.sum(dim=1), torch.ones(4, *images.shape[2:]), atol=1e-5)


def test_the_marginal_can_follow_the_source_under_the_batchs_statistics(make_tesla, make_images):
    method, images = make_tesla(marginal_target="source", distillation_weight=0.0), make_images(4)
    for _ in range(2):
        method.adapt(images)
    source = copy.deepcopy(method.source)
    before = weights(source) | running(source)
    labels, _ = method._pseudo_labels(images)
    student = batch_mode(copy.deepcopy(method.student))
    with torch.no_grad():
        shares = batch_mode(source)(2 * images - 1).softmax(dim=1).mean(dim=(0, 2, 3))
        mean = student(2 * images - 1).softmax(dim=1).mean(dim=(0, 2, 3))
    result = method._update_student(images, labels)
    want = (mean * (mean / shares).log()).sum()
    assert want.item() > 1e-6
    assert result["loss/class_marginal"].item() == pytest.approx(want.item(), rel=1e-3, abs=1e-6)
    now = weights(method.source) | running(method.source)
    assert all(torch.equal(value, before[name]) for name, value in now.items())


def test_plain_cross_entropy_in_place_of_the_flipped_one(make_tesla, make_images):
    images = make_images(4)
    plain, flipped = make_tesla(self_learning="plain"), make_tesla()
    labels, _ = plain._pseudo_labels(images)
    student = batch_mode(copy.deepcopy(plain.student))
    with torch.no_grad():
        want = losses.cross_entropy(student(2 * images - 1), labels)
    result = plain._update_student(images, labels)
    assert result["loss/cross_entropy"].item() == pytest.approx(want.item(), rel=1e-4)
    assert "loss/flipped_cross_entropy" not in result
    flipped._update_student(images, labels)
    assert moved(weights(plain.student), weights(flipped.student))


def test_warm_up_makes_running_statistics_the_mean_of_the_batches(make_tta, make_images):
    method = make_tta(
        "tesla", learning_rate=0.0, weight_decay=0.0, statistics_warm_up=True, statistics_momentum=0.3
    )
    seen = []
    first = norm_layers(method.teacher)[0]

    def keep(layer, inputs, _):
        if layer.training and layer.momentum:
            seen.append(inputs[0].detach())

    handle = first.register_forward_hook(keep)
    for seed in range(5):
        method.adapt(make_images(4, seed=seed))
    handle.remove()
    variances = [batch.var(dim=(0, 2, 3)) for batch in seen]
    assert len(variances) == 5
    expected = torch.stack(variances[:3]).mean(dim=0)  # 1, 1/2 and 1/3, then 0.3
    for variance in variances[3:]:
        expected = torch.lerp(expected, variance, 0.3)
    for network in (method.teacher, method.student):
        assert torch.allclose(norm_layers(network)[0].running_var, expected, rtol=1e-4)
    method.reset()
    assert not torch.allclose(first.running_var, expected, rtol=1e-3)


def test_no_pass_is_captured_while_the_momentum_still_changes(make_tesla, make_images):
    method = make_tesla(statistics_warm_up=True, statistics_momentum=0.25, batch_slices=2)
    waiting = []
    for _ in range(5):
        method.adapt(make_images(2, 32, 32))
        waiting.append(method._pool.waiting)
    assert waiting == [True, True, True, False, False]
    assert not make_tesla()._pool.waiting
