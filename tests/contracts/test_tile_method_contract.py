"""Every registered method keeps the contract on tile classifiers too, or says why it does not serve them."""

from __future__ import annotations

import dataclasses

import pytest
import tile_site
import torch
from test_method_contract import PAIRS, check_probs, drive, few_steps

from tesla_med.errors import AdaptationError
from tesla_med.models.base import Network, norm_layers
from tesla_med.tasks import tile_runs
from tesla_med.tta import METHODS

pytestmark = pytest.mark.usefixtures("one_thread")
NETWORKS = ("mobilenet_v2", "vit_b_16")
EVERY_PAIR = pytest.mark.parametrize(("name", "protocol"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
FIRST = {name: method.protocols[0] for name, method in METHODS.items()}
TRIPLES = [  # the wide features of MobileNetV2 are slow: there each method has one protocol
    (network, *pair)
    for network in NETWORKS
    for pair in PAIRS
    if network != NETWORKS[0] or pair in FIRST.items()
]
EVERY_TRIPLE = pytest.mark.parametrize(
    ("network", "name", "protocol"), TRIPLES, ids=["-".join(item) for item in TRIPLES], indirect=["network"]
)


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
    return tile_site.make_network(request.param)


def served(name, network, make_tta):
    try:
        make_tta(name, network)
    except AdaptationError:
        return False
    return True


def test_which_methods_serve_tiles(make_tta):
    network = tile_site.make_network("mobilenet_v2")
    names = {name for name in METHODS.names() if served(name, network, make_tta)}
    assert set(METHODS.names()) - names == {"opttta"}
    without = tile_site.make_network("vit_b_16")
    assert names - {name for name in names if served(name, without, make_tta)} == {"bn"}
    with pytest.raises(AdaptationError, match=r"'opttta'.*for classification.*no volumes"):
        make_tta("opttta", network)
    with pytest.raises(AdaptationError, match=r"'bn'.*the model has 0 \(3 norm layers of other kinds\)"):
        make_tta("bn", without)


@EVERY_TRIPLE
def test_probabilities(name, protocol, network, make_tile_tta):
    for count in (6, 1):
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


@EVERY_TRIPLE
def test_reset_is_exact_and_runs_repeat(name, protocol, network, make_tile_tta, same_state):
    count = 4 if norm_layers(network) else 5  # one batch for MobileNetV2, whose features are wide
    images, params = tile_site.make_batch(count), few_steps(name, protocol)
    method = make_tile_tta(name, network, **params)
    if method is None:
        return
    initial = method.state_dict()
    first = drive(method, protocol, images)
    assert (not same_state(initial, method.state_dict())) == method.adapts
    method.reset()
    assert same_state(initial, method.state_dict())
    torch.rand(3)  # the global generator does not matter
    again = make_tile_tta(name, network, **params)
    assert torch.equal(first, drive(again, protocol, images))
    other = make_tile_tta(name, network, seed=9, **params)
    other.load_state_dict(again.state_dict())
    assert torch.equal(drive(again, protocol, images), drive(other, protocol, images))


@EVERY_TRIPLE
def test_nothing_is_learned_at_rate_0(name, protocol, network, make_tile_tta):
    fields = METHODS.get(name).Params.model_fields
    still = {"learning_rate": 0.0} if "learning_rate" in fields else {}
    method = make_tile_tta(name, network, **few_steps(name, protocol), **still)
    if method is None:
        return
    before = dict(network.named_parameters())
    drive(method, protocol, tile_site.make_batch(5))
    networks = [module for module in method.modules().values() if isinstance(module, Network)]
    assert networks
    for module in networks:
        for key, value in module.named_parameters():
            assert torch.equal(value, before[key]), key
    if still and method.adapts:
        learns = make_tile_tta(name, network, **few_steps(name, protocol), learning_rate=0.01)
        drive(learns, protocol, tile_site.make_batch(5))
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
    folder = tmp_path_factory.mktemp("tiles") / "set"
    tile_site.make_tiles(folder, 2, size=32)
    return folder


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return tile_site.train_weights(tmp_path_factory.mktemp("weights"))


@EVERY_PAIR
def test_labels_are_never_looked_at(name, protocol, tiles, weights, tmp_path, monkeypatch):
    def hidden(*arguments):
        return dataclasses.replace(tile_runs_find(*arguments), labels=Untouchable())

    def written(_, folder, before, after, seconds):
        found.append(after)
        return write(_, folder, before, after, seconds)

    found, tile_runs_find, write = [], tile_runs.find_tiles, tile_runs._TileRun._write
    monkeypatch.setattr(tile_runs, "find_tiles", hidden)
    monkeypatch.setattr(tile_runs._TileRun, "_write", written)
    settings = [f"methods.{name}.{key}={value}" for key, value in few_steps(name, protocol).items()]
    options = {"weights": weights, "pipeline": "kather", "method": name, "protocol": protocol}
    texts = (*tile_site.SMALL, "protocols={}", "reports=[table]", *settings)
    with pytest.raises((AssertionError, AdaptationError)) as stopped:
        tile_runs.adapt_tiles(
            tile_site.site(), tiles, out=tmp_path / "out", device="cpu", overrides=texts, **options
        )
    if stopped.type is AdaptationError:
        assert "this model is for classification" in str(stopped.value)
        return
    assert str(stopped.value) == "a label was touched"  # by the scores, when all predictions are there
    assert found[0].shape == (8, 4)
    check_probs(torch.from_numpy(found[0]), torch.zeros(8), 4)
