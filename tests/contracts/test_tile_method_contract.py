"""Every registered method keeps the contract on tile classifiers too, or says why it does not serve them."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import tile_site
import torch
from test_method_contract import EVERY_PAIR, PAIRS, check_probs, check_state, drive, drive_task, few_steps
from torch import nn

from tesla_med.config.files import load_pipeline
from tesla_med.engine.outcome import Outcome
from tesla_med.errors import AdaptationError
from tesla_med.models.base import Network, norm_layers
from tesla_med.tasks.tiles import Tiles
from tesla_med.tta import METHODS
from tesla_med.types import Verdict

pytestmark = pytest.mark.usefixtures("one_thread")
TRIPLES = [(network, *pair) for network in ("narrow", "vit_b_16") for pair in PAIRS]
EVERY_TRIPLE = pytest.mark.parametrize(
    ("network", "name", "protocol"), TRIPLES, ids=["-".join(item) for item in TRIPLES], indirect=["network"]
)


class Narrow(Network):
    """A tile classifier with batch norms and few features, which keeps covariances small."""

    task = "classification"

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        )
        self.classifier = nn.Linear(8, 4)

    @classmethod
    def build(cls, params, channels, classes):
        raise NotImplementedError

    @property
    def head(self):
        return self.classifier

    def logits(self, images):
        return self.classifier(self.body(images).mean(dim=(2, 3)))


def make_narrow():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Narrow()
    images = tile_site.make_batch(6, seed=100)
    with torch.no_grad():
        for _ in range(4):
            network.train()(2 * images - 1)
    return network.eval()


@pytest.fixture
def make_tile_tta(make_tta):
    """Make a method on a small tile classifier; None where it refuses, for a reason that it states."""

    def make(name, network, **params):
        try:
            return make_tta(name, network, **params)
        except AdaptationError as error:
            text = str(error)
            assert f"{name!r}" in text
            for_volumes = "this model is for classification" in text
            assert for_volumes or ("the model has 0 (" in text and not norm_layers(network))
            return None

    return make


@pytest.fixture(scope="module")
def network(request, one_thread):
    return make_narrow() if request.param == "narrow" else tile_site.make_network(request.param)


def served(name, network, make_tta):
    try:
        make_tta(name, network)
    except AdaptationError:
        return False
    return True


def test_which_methods_serve_tiles(make_tta):
    network = make_narrow()
    names = {name for name in METHODS.names() if served(name, network, make_tta)}
    assert set(METHODS.names()) - names == {"opttta"}
    without = tile_site.make_network("vit_b_16")
    assert names - {name for name in names if served(name, without, make_tta)} == {"bn"}
    with pytest.raises(AdaptationError, match=r"'opttta'.*for classification.*do not belong to volumes"):
        make_tta("opttta", network)
    with pytest.raises(AdaptationError, match=r"'bn'.*the model has 0 \(3 norm layers of other kinds\)"):
        make_tta("bn", without)


@EVERY_TRIPLE
def test_probabilities(name, protocol, network, make_tile_tta):
    for count in (3, 1):
        method = make_tile_tta(name, network, **few_steps(name, protocol))
        if method is None:
            return
        images = tile_site.make_batch(count)
        kept, steps = images.clone(), {}
        probs = drive(method, protocol, images, steps)
        assert probs.shape == (count, 4)
        check_probs(probs, images[:, 0, 0, 0], 4)
        assert torch.equal(images, kept)
        for scalars in steps.values():
            assert all(isinstance(value, float) for value in scalars.values())


@pytest.mark.slow
@EVERY_TRIPLE
def test_state(name, protocol, network, make_tile_tta, same_state):
    make = partial(make_tile_tta, name, network, **few_steps(name, protocol))
    if make() is not None:
        check_state(make, protocol, tile_site.make_batch(3), same_state)


@EVERY_TRIPLE
def test_nothing_is_learned_at_rate_0(name, protocol, network, make_tile_tta):
    fields = METHODS.get(name).Params.model_fields
    still = {"learning_rate": 0.0} if "learning_rate" in fields else {}
    method = make_tile_tta(name, network, **few_steps(name, protocol), **still)
    if method is None:
        return
    before = dict(network.named_parameters())
    drive(method, protocol, tile_site.make_batch(3))
    networks = [module for module in method.modules().values() if isinstance(module, Network)]
    assert networks
    for module in networks:
        for key, value in module.named_parameters():
            assert torch.equal(value, before[key]), key
    if still and method.adapts:
        learns = make_tile_tta(name, network, **few_steps(name, protocol), learning_rate=0.01)
        drive(learns, protocol, tile_site.make_batch(3))
        now = dict(learns.predictor.named_parameters())
        assert any(not torch.equal(value, before[key]) for key, value in now.items())


# ------------------------------------------------------------ no labels


class Untouchable:
    """Labels that must not be looked at."""

    def _refuse(self, *_, **__):
        raise AssertionError("a label was touched")

    __array__ = __getitem__ = __eq__ = __ne__ = __len__ = __iter__ = _refuse
    __hash__ = None


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    """Return a task of a few tiles, and its units, whose labels must not be looked at."""
    folder = tmp_path_factory.mktemp("tiles") / "set"
    tile_site.make_tiles(folder, 1, size=32)
    pipeline = load_pipeline("kather", [*tile_site.SMALL, "preprocessing.size=[32,32]"])
    task = Tiles(tile_site.site(), pipeline)
    items = task.find(folder, ())
    hidden = dataclasses.replace(items.content, labels=Untouchable())
    return task, task.refs(dataclasses.replace(items, content=hidden), 0, 3)


@EVERY_PAIR
def test_labels_are_never_looked_at(name, protocol, tiles, make_tile_tta):
    task, refs = tiles
    method = make_tile_tta(name, make_narrow(), **few_steps(name, protocol))
    if method is None:
        return
    for unit, probs in drive_task(method, protocol, task, refs):
        check_probs(probs, unit.images[:, 0, 0, 0], 4)
        finished = task.finish(None, unit, Outcome(probs, probs, Verdict(1.0, "")))
        with pytest.raises(AssertionError, match="a label was touched"):  # when the result is final
            task.score(unit, finished)
