"""The learned augmentation as a plug-in to other objectives."""

from __future__ import annotations

import copy

import pytest
import torch

from tesla_med.augment import warp
from tesla_med.models.base import norm_layers
from tesla_med.models.normalisation import batch_statistics
from tesla_med.tta import METHODS, MethodContext, MethodParams, TTAMethod
from tesla_med.tta._shared.augmented import AugmentationParams
from tesla_med.tta.base import check_params
from tesla_med.tta.teaa import TeAA

pytestmark = pytest.mark.usefixtures("one_thread")

PLUGGED = [name for name in METHODS.names() if name.endswith("+teaa")]
EVERY = pytest.mark.parametrize("name", PLUGGED)
QUICK = {"batch_slices": 4, "weak_views": 2, "policy_size": 2, "learning_rate": 1e-2}
STILL = {"weak_views": 1, "augment": "none", "distillation_weight": 0.0}
"""Parameters with which the plug-in neither draws nor adds anything."""


class EntropyParams(MethodParams):
    """Parameters of the method below."""

    learning_rate: float = 1e-2


class Entropy(TTAMethod):
    """A method without randomness: entropy of the prediction, scale and shift of norms learn."""

    name, summary, citation, Params = "entropy", "entropy", "none", EntropyParams

    def setup(self):
        self.model.requires_grad_(False)
        affine = [value for layer in norm_layers(self.model) for value in layer.parameters()]
        for value in affine:
            value.requires_grad_(True)
        self.optimizer = torch.optim.SGD(affine, lr=self.params.learning_rate)

    def adapt(self, images):
        self.optimizer.zero_grad(set_to_none=True)
        loss, scalars = self.objective(self.to_device(images))
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return scalars

    def objective(self, images):
        with batch_statistics(self.model, momentum=None):
            probs = self.logits(self.model, images).softmax(dim=1)
        loss = -(probs * probs.clamp_min(1e-6).log()).sum(dim=1).mean()
        return loss, {"loss/entropy": loss.detach()}

    def predict(self, images):
        return self.probabilities(self.model, images)

    def optimizers(self):
        return {"model": self.optimizer}


class EntropyTeAAParams(EntropyParams, AugmentationParams):
    """Parameters of the method and the plug-in."""


class EntropyTeAA(TeAA, Entropy):
    """The plug-in on it."""

    name, Params = "entropy+teaa", EntropyTeAAParams


@pytest.fixture
def make_plugged(make_network):
    def make(kind=EntropyTeAA, network=None, *, seed=0, **params):
        context = MethodContext(torch.device("cpu"), seed=seed, predict_batch=3)
        known = {key: value for key, value in (QUICK | params).items() if key in kind.Params.model_fields}
        return kind(make_network() if network is None else network, kind.Params(**known), context)

    return make


def weights(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def moved(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


# ------------------------------------------------------------ the registered ones


def test_there_are_plugged_methods():
    assert PLUGGED == ["adacontrast+teaa", "shot+teaa", "tent+teaa"]


@EVERY
def test_it_is_its_method_and_the_plug_in(name):
    method, base = METHODS.get(name), METHODS.get(name.removesuffix("+teaa"))
    assert issubclass(method, base)
    assert issubclass(method, TeAA)
    assert issubclass(method.Params, base.Params)
    assert base.citation in method.citation
    assert "TeSLA" in method.citation
    assert set(method.Params.model_fields) == set(base.Params.model_fields) | set(
        AugmentationParams.model_fields
    )
    for key, value in base.Params():
        assert getattr(method.Params(), key) == value, key


@EVERY
@pytest.mark.parametrize("updates", [1, 3])
def test_with_nothing_added_it_is_its_method_bit_for_bit(name, updates, make_tta, make_images):
    images, base = make_images(4), name.removesuffix("+teaa")
    fields = METHODS.get(base).Params.model_fields
    quick = {key: value for key, value in QUICK.items() if key in fields}
    plugged, plain = make_tta(name, **(quick | STILL)), make_tta(base, **quick)
    for method in (plugged, plain):
        method.start_epoch(0, [images])
        for _ in range(updates):
            method.adapt(images)
    assert moved(weights(plain.model), weights(plugged.model)) == set()
    assert torch.equal(plain.predict(images), plugged.predict(images))


@EVERY
@pytest.mark.parametrize("augment", ["learned", "randaugment", "autoaugment", "none"])
def test_what_it_adds_is_learned_from(name, augment, make_tta, make_images):
    images, base = make_images(4), name.removesuffix("+teaa")
    method = make_tta(name, augment=augment, **QUICK)
    none = make_tta(name, **(QUICK | {"augment": augment, "distillation_weight": 0.0}))
    before = {key: weights(module) for key, module in method.modules().items()}
    for item in (method, none):
        item.start_epoch(0, [images])
        for _ in range(2):
            scalars = item.adapt(images)
    assert ("loss/distillation" in scalars) is False
    scalars = method.adapt(images)
    assert scalars["loss/distillation"] > 0
    assert ("loss/policy" in scalars) == (augment == "learned")
    assert bool(moved(before["policy"], weights(method.modules()["policy"]))) == (augment == "learned")
    none.adapt(images)
    assert moved(weights(method.model), weights(none.model))
    fields = METHODS.get(base).Params.model_fields
    plain = make_tta(base, **{key: value for key, value in QUICK.items() if key in fields})
    cost = 8 * (2 + 3 + (2 if augment == "learned" else 0))
    assert method.passes(8) == plain.passes(8) + cost
    names = [key for key in method.record() if key.startswith("policy/")]
    assert bool(names) == (augment == "learned")


def test_the_momentum_encoder_of_adacontrast_is_the_teacher(make_tta, make_images):
    method, images = make_tta("adacontrast+teaa", teacher_momentum=0.9, **QUICK), make_images(4)
    assert set(method.modules()) == {"student", "teacher", "policy"}
    assert method.modules()["teacher"] is method.teacher
    before = weights(method.teacher)
    method.adapt(images)
    student = weights(method.student)
    for key, value in weights(method.teacher).items():
        assert torch.allclose(value, 0.9 * before[key] + 0.1 * student[key], atol=1e-6), key
    assert check_params("adacontrast+teaa", {}).teacher_momentum == 0.999


# ------------------------------------------------------------ the plug-in itself


def test_the_objective_by_hand(make_plugged, make_images):
    method, images = make_plugged(distillation_weight=2.5), make_images(4)
    for _ in range(3):
        method.adapt(images)
    state = method.state_dict()
    loss, scalars = method.objective(images)
    after = method.state_dict()
    method.load_state_dict(state)
    with batch_statistics(method.teacher, momentum=None):
        labels, reference, _ = method._averaged(images)
    method._update_policy(images, reference)
    assert all(
        torch.equal(value, after["modules"]["policy"][key])
        for key, value in method.policy.state_dict().items()
    )
    view = method.policy.apply_draw(images, method.policy.draw(tuple(images.shape), "probability"))
    targets = warp.normalise(warp.to_view(labels, view.theta))
    student = copy.deepcopy(method.model).train()
    own = student(2 * images - 1).softmax(dim=1)
    entropy = -(own * own.log()).sum(dim=1).mean()
    log_probs = student(2 * view.images - 1).log_softmax(dim=1)
    distilled = (targets * (targets.clamp_min(1e-9).log() - log_probs)).sum(dim=1).mean()
    assert distilled > 1e-4
    assert scalars["loss/entropy"].item() == pytest.approx(entropy.item(), rel=1e-4)
    assert scalars["loss/distillation"].item() == pytest.approx(distilled.item(), rel=1e-3)
    assert loss.item() == pytest.approx((entropy + 2.5 * distilled).item(), rel=1e-3)


def test_its_own_teacher_is_the_moving_average_of_the_student(make_plugged, make_images):
    method, images = make_plugged(teacher_momentum=0.8), make_images(4)
    assert set(method.modules()) == {"model", "teacher", "policy"}
    before = weights(method.teacher)
    method.adapt(images)
    student = weights(method.model)
    for key, value in weights(method.teacher).items():
        assert torch.allclose(value, 0.8 * before[key] + 0.2 * student[key], atol=1e-6), key


def test_only_what_the_method_adapts_learns(make_plugged, make_images):
    method, images = make_plugged(), make_images(4)
    before = weights(method.model)
    affine = {id(value) for layer in norm_layers(method.model) for value in layer.parameters()}
    names = {key for key, value in method.model.named_parameters() if id(value) in affine}
    buffers = {key: value.clone() for key, value in method.model.named_buffers() if "running" in key}
    for _ in range(2):
        method.adapt(images)
    assert moved(before, weights(method.model)) == names
    assert all(torch.equal(value, dict(method.model.named_buffers())[key]) for key, value in buffers.items())


def test_gradients_of_the_policy_step_stay_out_of_the_student(make_plugged, make_images):
    method, images = make_plugged(), make_images(4)
    _, reference, _ = method._averaged(images)
    method._update_policy(images, reference)
    assert all(value.grad is None for value in method.model.parameters())
    assert all(value.grad is None for value in method.teacher.parameters())


def test_with_rates_of_zero_nothing_learns(make_plugged, make_images):
    zero = {"learning_rate": 0.0, "policy_learning_rate": 0.0, "magnitude_learning_rate": 0.0}
    method, images = make_plugged(**zero), make_images(4)
    before = {key: weights(module) for key, module in method.modules().items()}
    method.adapt(images)
    for key, module in method.modules().items():
        assert moved(before[key], weights(module)) == set(), key


@pytest.mark.parametrize("restart", [True, False])
def test_the_policy_can_start_again_with_every_pass(restart, make_plugged, make_images):
    method, images = make_plugged(reset_policy_each_epoch=restart), make_images(4)
    initial = weights(method.policy)
    method.start_epoch(0, [images])
    method.adapt(images)
    assert moved(initial, weights(method.policy))
    method.start_epoch(1, [images])
    assert (moved(initial, weights(method.policy)) == set()) == restart


def test_a_state_in_the_middle_continues_exactly(make_plugged, make_images, same_state):
    one, two = make_plugged(weak_views_first_epoch=1), make_plugged(seed=5, weak_views_first_epoch=1)
    images = make_images(4)
    initial = one.state_dict()
    one.start_epoch(0, [images])
    one.start_epoch(1, [images])
    one.adapt(images)
    two.load_state_dict(one.state_dict())
    for method in (one, two):
        method.adapt(images)
    assert same_state(one.state_dict(), two.state_dict())
    one.reset()
    assert same_state(initial, one.state_dict())


def test_less_memory_gives_the_same_update(make_plugged, make_images):
    images, results = make_images(4), []
    for limit in (None, 4):
        method = make_plugged()
        method.use_less_memory(limit)
        method.adapt(images)
        results.append(weights(method.model))
    assert moved(*results) == set()


@EVERY
def test_one_image_and_tiles(name, make_tta, make_images):
    from tesla_med.models.torchvision import MobileNetV2, MobileNetV2Params

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = MobileNetV2.build(MobileNetV2Params(width=0.25), 3, 4).eval()
    tiles = make_images(3, channels=3)
    method = make_tta(name, network, **(QUICK | {"op_set": "generic"}))
    method.start_epoch(0, [tiles])
    scalars = method.adapt(tiles)
    assert all(torch.isfinite(torch.as_tensor(value)) for value in scalars.values())
    probs = method.predict(tiles)
    assert probs.shape == (3, 4)
    assert torch.allclose(probs.sum(dim=1), torch.ones(3), atol=1e-5)
    single = make_tta(name, **QUICK)
    single.start_epoch(0, [make_images(1)])
    scalars = single.adapt(make_images(1))
    assert all(torch.isfinite(torch.as_tensor(value)) for value in scalars.values())
