"""Every registered method keeps the contract under every protocol that it names."""

from __future__ import annotations

import gc
import inspect
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from tesla_med.config.models import PROTOCOLS
from tesla_med.errors import AdaptationError, ConfigError
from tesla_med.tta import METHODS, MethodParams, TTAMethod
from tesla_med.tta._shared.passes import NetworkPass

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY = pytest.mark.parametrize("name", METHODS.names())
PAIRS = [(name, protocol) for name, method in METHODS.items() for protocol in method.protocols]
EVERY_PAIR = pytest.mark.parametrize(("name", "protocol"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
ADAPTING = pytest.mark.parametrize("name", [name for name, item in METHODS.items() if item.adapts])


def few_steps(name, protocol):
    """Parameters that keep a run short; an odd number of slices ends with a batch of one."""
    fields = METHODS.get(name).Params.model_fields
    short = {"batch_slices": 2, "epochs": 2 if protocol.endswith("M") else 1}
    few = ("weak_views", "policy_size", "views", "first_steps", "later_steps")
    short |= {key: 2 for key in few if key in fields}
    if "first_steps" in fields:
        short["policy_size"] = 6  # of seven operations, so that there are few sub-policies
    return short


class Cases:
    """Slices of made-up cases, in place of a folder of files."""

    joined = True
    channels = None

    def __init__(self, *cases):
        self.cases = cases

    def __iter__(self):
        return iter(self.cases)

    def batches(self, size):
        yield from torch.split(torch.cat(self.cases), size)


def drive(method, protocol, images, seen=None):
    """Adapt as the protocol says and return the probabilities of the images."""
    from tesla_med.engine.driver import Driver

    steps = {} if seen is None else seen
    driver = Driver(method, protocol, "site", lambda number, scalars: steps.update({number: scalars}))
    if driver.case_by_case:
        assert driver.adapt_to_case(images)
    else:
        driver.adapt_to_site(Cases(images, images.flip(0)))
        assert driver.finite
    return method.predict(images)


def check_probs(probs, images, classes=2):
    assert probs.shape == (images.shape[0], classes, *images.shape[2:])
    assert probs.dtype == torch.float32
    assert torch.isfinite(probs).all()
    assert probs.min() >= 0
    assert torch.allclose(probs.sum(dim=1), torch.ones_like(probs[:, 0]), atol=1e-4)
    assert not probs.requires_grad


def test_there_are_methods():
    assert {"source", "bn", "tesla"} <= set(METHODS.names())


@EVERY
def test_describes_itself(name):
    method = METHODS.get(name)
    assert issubclass(method, TTAMethod)
    assert method.name == name
    assert method.summary
    assert "\n" not in method.summary
    assert method.citation
    assert method.protocols
    assert set(method.protocols) <= set(PROTOCOLS)


@EVERY
def test_parameters_are_frozen_and_refuse_unknown_keys(name, make_tta):
    kind = METHODS.get(name).Params
    assert issubclass(kind, MethodParams)
    with pytest.raises(ValidationError):
        kind().epochs = 3
    with pytest.raises(
        ConfigError, match=rf"methods\.{re.escape(name)}: unknown key 'no_such_key'.*Known: .*epochs"
    ):
        make_tta(name, no_such_key=1)
    with pytest.raises(ConfigError, match=rf"methods\.{re.escape(name)}: key 'epochs': .*got 'many'"):
        make_tta(name, epochs="many")


@EVERY
def test_sees_images_only(name):
    method = METHODS.get(name)
    for function in (method.adapt, method.predict):
        assert list(inspect.signature(function).parameters) == ["self", "images"]


@EVERY_PAIR
def test_probabilities(name, protocol, make_tta, make_images):
    images = make_images(3, 20, 23)  # of odd size, in a batch of two and one of one
    kept = images.clone()
    method = make_tta(name, **few_steps(name, protocol))
    steps = {}
    check_probs(drive(method, protocol, images, steps), images)
    assert torch.equal(images, kept)
    assert list(steps) == list(range(len(steps)))
    for scalars in steps.values():
        assert all(isinstance(value, float) for value in scalars.values())


@EVERY_PAIR
def test_one_slice(name, protocol, make_tta, make_images):
    images = make_images(1)
    check_probs(drive(make_tta(name, **few_steps(name, protocol)), protocol, images), images)


@EVERY_PAIR
def test_several_classes_and_channels(name, protocol, make_tta, make_network, make_images):
    images = make_images(2, channels=3)
    method = make_tta(name, make_network(3, 4), **few_steps(name, protocol))
    check_probs(drive(method, protocol, images), images, 4)


@EVERY_PAIR
def test_blank_images(name, protocol, make_tta):
    images = torch.zeros(2, 1, 32, 32)
    check_probs(drive(make_tta(name, **few_steps(name, protocol)), protocol, images), images)


def check_state(make, protocol, images, same_state):
    """Check that reset is exact, that runs repeat exactly, and that a saved state continues exactly.

    Args:
        make: makes the method, with a seed where one is given.
        protocol: how it is driven.
        images: of one case.
        same_state: compares two states.
    """
    method = make()
    initial = method.state_dict()
    first = drive(method, protocol, images)
    middle = method.state_dict()
    assert (not same_state(initial, middle)) == method.adapts
    second = drive(method, protocol, images)
    method.reset()
    assert same_state(initial, method.state_dict())
    assert torch.equal(first, drive(method, protocol, images))
    torch.rand(3)  # the global generator does not matter
    assert torch.equal(first, drive(make(), protocol, images))
    other = make(seed=9)
    other.load_state_dict(middle)
    assert torch.equal(second, drive(other, protocol, images))


@pytest.mark.slow
@EVERY_PAIR
def test_state(name, protocol, make_tta, make_images, same_state):
    params = few_steps(name, protocol)
    check_state(partial(make_tta, name, **params), protocol, make_images(3), same_state)


@EVERY_PAIR
def test_a_reset_method_forgets_what_it_saw(name, protocol, make_tta, make_images):
    a, b = make_images(3), 1 - make_images(3, seed=1)
    fresh, ours = (make_tta(name, **few_steps(name, protocol)) for _ in range(2))
    drive(ours, protocol, b)
    ours.reset()
    assert torch.equal(drive(ours, protocol, a), drive(fresh, protocol, a))


@ADAPTING
def test_a_reset_restores_weights_buffers_optimisers_policy_memories_and_generators(
    name, make_tta, make_images, same_state
):
    few = {} if METHODS.get(name).one_network else {"first_steps": 1, "later_steps": 1, "views": 2}
    ours = make_tta(name, batch_slices=2, **few)
    start = ours.state_dict()
    images = make_images(4)
    ours.start_epoch(0, ours.batches(images))
    for batch in ours.batches(images):
        ours.adapt(batch)
    assert not same_state(ours.state_dict(), start)
    ours.reset()
    assert same_state(ours.state_dict(), start)


@pytest.mark.parametrize("name", [name for name, item in METHODS.items() if item.adapts and item.one_network])
def test_adapting_changes_the_network(make_tta, make_network, make_images, name):
    network = make_network()
    method = make_tta(name, network)
    images = make_images(4) ** 2
    method.start_epoch(0, [images])
    method.adapt(images)
    before, after = network.state_dict(), method.predictor.state_dict()
    moved = [key for key in before if not torch.equal(before[key], after[key])]
    assert any(key.endswith("running_mean") for key in moved)
    if name != "bn":  # which adapts statistics alone
        assert any(key.endswith("weight") for key in moved)


@EVERY_PAIR
def test_the_deployed_network_repeats_the_prediction(name, protocol, make_tta, make_network, make_images):
    if not METHODS.get(name).one_network:
        pytest.skip("predicts with more than a network")
    images = make_images(3)
    method = make_tta(name, **few_steps(name, protocol))
    probs = drive(method, protocol, images)
    plain = make_network(seed=3)
    with method.deployed(images) as network:
        plain.load_state_dict(network.state_dict())
    with torch.no_grad():
        again = plain.eval()(2 * images - 1).softmax(dim=1)
    assert torch.allclose(again, probs, atol=1e-4)


@EVERY
def test_the_given_network_is_not_touched(name, make_tta, make_network, make_images, same_state):
    network = make_network()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    drive(make_tta(name, network, **few_steps(name, "N-O")), "N-O", make_images(3))
    assert same_state(before, dict(network.state_dict()))


@EVERY
def test_the_seed_matters_unless_the_method_says_that_it_does_not(name, make_tta, make_images):
    """Comparisons run a deterministic method once, and others with several seeds."""
    protocol, images = METHODS.get(name).protocols[0], make_images(3)
    params = few_steps(name, protocol)
    if "feature_pixels" in METHODS.get(name).Params.model_fields:
        params["feature_pixels"] = 64  # of a slice, not all of them
    found = [drive(make_tta(name, seed=seed, **params), protocol, images) for seed in (1, 2)]
    assert torch.equal(*found) == METHODS.get(name).deterministic


@EVERY
def test_cost_grows_with_the_slices(name, make_tta):
    method = make_tta(name, **few_steps(name, "N-O"))
    assert 0 < method.passes(4) < method.passes(40)


def parameters_of_living_graphs():
    """Return the ids of parameters that some graph of a tensor that is still there leads to."""
    kinds = torch.Tensor, torch.nn.Parameter
    tensors = [item for item in gc.get_objects() if type(item) in kinds and item.grad_fn is not None]
    found, seen, open_nodes = set(), set(), [item.grad_fn for item in tensors]
    while open_nodes:
        node = open_nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        open_nodes += [after for after, _ in node.next_functions if after is not None]
    return found


@EVERY
def test_no_graph_of_the_network_lives_when_a_pass_may_be_captured(name, make_tta, make_images, monkeypatch):
    method = make_tta(name, **few_steps(name, METHODS.get(name).protocols[0]))
    called = NetworkPass.__call__
    learned = []

    def checked(self, images):
        if self.graph.pool is not None and self.gradient:
            mine = {id(parameter) for parameter in self.network.parameters() if parameter.requires_grad}
            learned.append(bool(mine))
            assert not mine & parameters_of_living_graphs()
        return called(self, images)

    monkeypatch.setattr(NetworkPass, "__call__", checked)
    gc.collect()
    gc.freeze()  # only what lives from now on is looked at
    try:
        drive(method, METHODS.get(name).protocols[0], make_images(3))
    finally:
        gc.unfreeze()
    assert any(learned) or name not in {"tesla", "tesla_s", "tent", "cotta"}


@EVERY
def test_a_network_without_batch_norm(name, make_tta, make_images):
    from tesla_med.models.monai import MonaiNetwork, MonaiParams

    arguments = {"channels": [4, 8], "strides": [2], "num_res_units": 1}
    network = MonaiNetwork.build(MonaiParams(class_name="UNet", arguments=arguments, divisor=2), 1, 2)
    images = make_images(3)
    refusal = ""
    try:
        method = make_tta(name, network, **few_steps(name, "N-O"))
    except AdaptationError as error:
        refusal = str(error)
    if refusal:
        assert f"{name!r}" in refusal
        assert "the model has 0 (" in refusal
    else:
        check_probs(drive(method, "N-O", images), images)


# ------------------------------------------------------------ no labels


class Untouchable(type(Path())):
    """A path that must not be looked at."""

    def _refuse(self, *_, **__):
        raise AssertionError("a reference was touched")

    open = exists = is_file = stat = read_bytes = read_text = __fspath__ = __str__ = _refuse


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    """Return a task of two cases, and its units, whose references must not be opened."""
    import nibabel
    import numpy as np

    from tesla_med.config.models import Files, LabelClass, PipelineConfig, Preprocessing, SiteConfig
    from tesla_med.tasks.volumes import Volumes
    from tesla_med.types import Case, Items

    pipeline = PipelineConfig(
        name="made_up",
        title="made up",
        sites="made_up",
        classes=(LabelClass(value=0, name="background"), LabelClass(value=1, name="thing")),
        preprocessing=Preprocessing(size=(32, 32)),
    )
    site = SiteConfig(id="A", pipeline="made_up", institution="A", files=Files(image=("*.nii.gz",)))
    folder, generator = tmp_path_factory.mktemp("volumes"), np.random.default_rng(0)
    cases = []
    for number in range(2):
        path = folder / f"case{number}.nii.gz"
        array = generator.random((24, 20, 3), dtype=np.float32)
        nibabel.save(nibabel.Nifti1Image(array, np.diag([1.0, 1.0, 3.0, 1.0])), path)
        cases.append(Case(f"case{number}", path, (Untouchable("reference.nii.gz"),)))
    task = Volumes(site, pipeline)
    items = Items(folder, tuple(case.name for case in cases), (), cases)
    return task, task.refs(items, 0, 1)


def drive_task(method, protocol, task, refs):
    """Adapt to the units of a task as a run does, and yield each with its probabilities."""
    from tesla_med.engine.driver import Driver
    from tesla_med.prepare.stream import SiteImages

    driver = Driver(method, protocol, "site")
    if not driver.case_by_case:
        driver.adapt_to_site(SiteImages(refs, task.load, joined=task.joins))
    for ref in refs:
        unit = task.load(ref)
        if driver.case_by_case:
            driver.adapt_to_case(unit.images)
        yield unit, method.predict(unit.images)


@EVERY_PAIR
def test_references_are_never_opened(name, protocol, volumes, make_tta):
    with pytest.raises(AssertionError, match="a reference was touched"):
        os.fspath(Untouchable("reference.nii.gz"))
    for unit, probs in drive_task(make_tta(name, **few_steps(name, protocol)), protocol, *volumes):
        check_probs(probs, unit.images)


def head_gradients(method, kept):
    """Keep the gradient with respect to everything that enters the head of the method's network."""

    def hook(_, inputs):
        if inputs[0].requires_grad:
            inputs[0].register_hook(lambda gradient: kept.append(gradient.detach()))

    method.model.head.register_forward_pre_hook(hook)


@EVERY_PAIR
def test_fill_pixels_get_no_gradient(name, protocol, make_tta, make_images):
    """Of a slice without a measured pixel; for OptTTA, which draws its own, a whole case."""
    images, method = make_images(2), make_tta(name, **few_steps(name, protocol))
    weight, gradients = torch.ones(2, *images.shape[2:]), []
    weight[0] = 0
    if name == "opttta":
        weight[:] = 0
    method.pixel_weight = weight
    method.start_epoch(0, iter([images]))
    head_gradients(method, gradients)
    method.adapt(images)
    assert bool(gradients) == (name not in ("source", "bn"))
    for gradient in gradients:
        assert gradient[0].eq(0).all()
        assert (name == "opttta") == gradient[1].eq(0).all()


@EVERY_PAIR
def test_slices_of_fill_alone_do_no_harm(name, protocol, make_tta, make_images):
    from tesla_med.engine.driver import Driver

    images = make_images(3)
    fill = torch.ones(3, *images.shape[2:], dtype=torch.bool)
    method = make_tta(name, **few_steps(name, protocol))
    driver = Driver(method, protocol, "case")
    assert driver.adapt_to_case(images, fill)
    assert method.pixel_weight is None
    check_probs(method.predict(images), images)
