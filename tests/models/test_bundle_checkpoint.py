"""Which weights of a MONAI bundle are taken: those that its configuration loads into the network."""

from __future__ import annotations

import pytest
import torch
from bundles import agreement, config, load, make_bundle, make_image, make_network, mask, metadata, of_monai

from tesla_med.actions.predict import predict
from tesla_med.config.bundle_files import network_key, weights_of
from tesla_med.errors import CheckpointError
from tesla_med.models.bundle_files import write_bundle
from tesla_med.models.checkpoint import one_state

pytestmark = pytest.mark.usefixtures("one_thread")
LOADER = {"_target_": "CheckpointLoader", "load_path": "$@bundle_root + '/models/model.pt'"}
CHOICE = {
    "displayable_configs": {"highres": False},
    "modelname": "$'model.pt' if @displayable_configs#highres else 'model_lowres.pt'",
}
LOW = LOADER | {"load_path": "$@bundle_root + '/models/' + @modelname"}
UNREAD = LOADER | {"load_path": "$__import__('os').system('touch canary')"}


def two(**parts):
    """Return two networks of one kind with other weights."""
    return {name: make_network(config(), seed).state_dict() for seed, name in enumerate(("a", "b"))} | parts


def first_of(path):
    return next(iter(load(path).model.state_dict().values()))


@pytest.mark.parametrize(
    "path",
    [
        LOW["load_path"],
        "models/model_lowres.pt",
        "$os.path.join(@bundle_root, 'models', @modelname)",
        "$os.path.join(@bundle_root, 'models') + '/model_lowres.pt'",
    ],
)
@pytest.mark.parametrize("place", ["checkpointloader", "handlers", "evaluator", "ckpt_path"])
def test_the_file_that_the_configuration_names_is_taken(tmp_path, path, place):
    loader = LOW | {"load_path": path, "load_dict": {"model": "@network"}}
    places = {
        "checkpointloader": {"checkpointloader": loader},
        "handlers": {
            "handlers": [{"_target_": "StatsHandler"}, loader],
            "evaluator": {"val_handlers": "@handlers"},
        },
        "evaluator": {
            "evaluator": {"val_handlers": [loader | {"_disabled_": "$not os.path.exists(@modelname)"}]}
        },
        "ckpt_path": {"ckpt_path": path},
    }
    content = config(**CHOICE, **({"checkpointloader": None} | places[place]))
    other, own = two().values()
    bundle = make_bundle(tmp_path / "b", content, model={"model": other}, model_lowres={"model": own})
    assert weights_of(bundle).name == "model_lowres.pt"
    assert torch.equal(first_of(bundle), next(iter(own.values())))
    assert not any("names" in note for note in load(bundle).notes)
    given = load(bundle / "models" / "model.pt")
    assert torch.equal(next(iter(given.model.state_dict().values())), next(iter(other.values())))
    assert any("names models/model_lowres.pt; model.pt was given" in note for note in given.notes)
    assert not any("was given" in note for note in load(bundle / "models" / "model_lowres.pt").notes)


def test_masks_are_those_of_the_weights_that_monai_loads(tmp_path):
    other, own = two().values()
    loader = LOW | {"load_dict": {"ema": "@network"}}
    bundle = make_bundle(
        tmp_path / "b",
        config(**CHOICE, checkpointloader=loader),
        model={"model": other},
        model_lowres={"model": other, "ema": own},
    )
    image = make_image(tmp_path / "i" / "c.nii.gz")
    predict(image, bundle, out=tmp_path / "out", overrides=("reports=[]",))
    theirs = of_monai(bundle, image, "model_lowres.pt", "ema")[0]
    assert agreement(mask(tmp_path / "out"), theirs) == (1.0, 1.0)
    assert agreement(of_monai(bundle, image)[0], theirs)[0] < 0.9


def test_a_switched_off_loader_names_nothing(tmp_path):
    handlers = [LOADER | {"load_path": "models/other.pt", "_disabled_": True}]
    content = config(checkpointloader=LOADER | {"load_path": "models/no.pt", "_disabled_": True})
    other, own = two().values()
    bundle = make_bundle(tmp_path / "b", content | {"handlers": handlers}, other=other, model=own)
    assert weights_of(bundle).name == "model.pt"


def test_a_named_file_that_is_not_there_is_not_replaced(tmp_path):
    bundle = make_bundle(tmp_path / "b", config(**CHOICE, checkpointloader=LOW), model=two()["a"])
    with pytest.raises(
        CheckpointError, match=r"no models/model_lowres\.pt that.*names.*model\.pt; --weights"
    ):
        load(bundle)
    (bundle / "models" / "model.ts").touch()
    with pytest.raises(CheckpointError, match=r"no models/model_lowres\.pt"):
        weights_of(bundle)
    (bundle / "models" / "model_lowres.ts").touch()
    assert weights_of(bundle).name == "model_lowres.ts"


@pytest.mark.parametrize(
    "content",
    [
        {"checkpointloader": UNREAD},
        {"checkpointloader": None, "handlers": [UNREAD], "evaluator": {"val_handlers": "@handlers"}},
        {"checkpointloader": None, "handlers": "$[monai.handlers.CheckpointLoader('models/b.pt')]"},
        {"checkpointloader": None, "initialize": ["$@network.load_state_dict(torch.load('models/b.pt'))"]},
        {"checkpointloader": LOADER, "handlers": [LOADER | {"load_path": "models/b.pt"}]},
        {"checkpointloader": LOADER | {"load_path": "$os.path.join(@bundle_root, '/models/b.pt')"}},
    ],
)
def test_a_choice_that_cannot_be_read_is_refused_unless_there_is_none(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    bundle = make_bundle(tmp_path / "b", config(**content), model=two()["a"])
    assert any("the only one, is taken" in note for note in load(bundle).notes)
    torch.save(two()["b"], bundle / "models" / "b.pt")
    with pytest.raises(CheckpointError, match=r"b\.pt, model\.pt\. --weights BUNDLE/models/FILE"):
        load(bundle)
    given = load(bundle / "models" / "b.pt")
    assert any("b.pt was given" in note for note in given.notes)
    assert not (tmp_path / "canary").exists()


BEST = {"_target_": "CheckpointLoader", "load_path": "models/best.pt", "load_dict": {"model": "@network"}}
BY_HAND = "$@network.load_state_dict(torch.load(@bundle_root + '/models/best.pt'))"


@pytest.mark.parametrize(
    "content",
    [
        {"loader": BEST, "initialize": ["$@loader(@evaluator)"]},
        {"loader": BEST, "handlers": ["%loader"], "evaluator": {"val_handlers": "@handlers"}},
        {"loader": [BEST], "other": [], "handlers": "$@loader + @other"},
        {"eval_handlers": [BEST], "evaluator": {"val_handlers": "@eval_handlers"}},
        {"handlers": [BEST | {"_target_": "scripts.MyLoader"}]},
        {"handlers": [{"_target_": "scripts.Own", "load_path": "$@bundle_root + '/models/best.pt'"}]},
        {"ckpt_path": "models/best.pt", "load": "$@network.load_state_dict(torch.load(@ckpt_path))"},
    ],
)
def test_a_loader_under_any_key_names_the_weights(tmp_path, content):
    other, own = two().values()
    content = config(**{"checkpointloader": None} | content)
    bundle = make_bundle(tmp_path / "b", content, model={"model": other}, best={"model": own})
    assert weights_of(bundle).name == "best.pt"
    assert torch.equal(first_of(bundle), next(iter(own.values())))


@pytest.mark.parametrize(
    "content",
    [
        {"load": BY_HAND, "initialize": ["$@load"]},
        {"load": BY_HAND, "run": ["$@load", "$@evaluator.run()"]},
        {"initialize": {"a": BY_HAND}},
        {"state": {"_target_": "torch.load", "f": "models/best.pt"}},
        {"checkpointloader": BEST | {"load_path": "models/model.pt"}, "load": BY_HAND},
        {"checkpointloader": BEST, "other": BEST | {"load_path": "models/model.pt"}},
        {"checkpointloader": "$scripts.loader()"},
        {"handlers": ["%other.json::loader"]},
    ],
)
def test_weights_that_are_loaded_in_ways_that_cannot_be_read_are_refused(tmp_path, content):
    content = config(**{"checkpointloader": None} | content)
    bundle = make_bundle(tmp_path / "b", content, model={}, best={})
    with pytest.raises(CheckpointError, match=r"best\.pt, model\.pt\. --weights BUNDLE/models/FILE"):
        weights_of(bundle)


def test_an_import_and_a_loader_that_loads_the_same_name_nothing_else(tmp_path):
    imports = ["$import glob", "$from monai.handlers import CheckpointLoader"]
    content = config(imports=imports, other=LOADER | {"load_dict": {"a": "@network"}})
    assert weights_of(make_bundle(tmp_path / "b", content, model={}, b={})).name == "model.pt"


def test_a_long_mapping_of_parts_is_read_or_refused_at_once(tmp_path):
    loader = LOADER | {"load_dict": "${" + "'a': @network, " * 40 + "!"}
    bundle = make_bundle(tmp_path / "b", config(checkpointloader=loader), model={})
    assert network_key(bundle / "models" / "model.pt") == ""


def test_weights_outside_are_refused_though_there_is_a_usual_file(tmp_path):
    content = config(checkpointloader=LOADER | {"load_path": "../model.pt"})
    bundle = make_bundle(tmp_path / "b", content, model=two()["a"])
    with pytest.raises(CheckpointError, match="outside of the bundle"):
        load(bundle)
    assert any("outside" in note for note in load(bundle / "models" / "model.pt").notes)


@pytest.mark.parametrize(
    "given",
    [
        {"ema": "@network"},
        {"ema": "$@network.module"},
        "@parts",
        "${'ema': @network}",
        {"opt": "@optimizer", "ema": "@network"},
    ],
)
def test_the_part_that_goes_into_the_network_is_taken_and_written(tmp_path, given):
    content = config(checkpointloader=LOADER | {"load_dict": given}, parts={"ema": "@network"})
    other, own = two().values()
    bundle = make_bundle(tmp_path / "b", content, model={"model": other, "ema": own, "epoch": 3})
    loaded = load(bundle)
    assert torch.equal(first_of(bundle), next(iter(own.values())))
    changed = {name: value + 1 for name, value in loaded.model.state_dict().items()}
    new = write_bundle(bundle, tmp_path / "new", changed, {})
    saved = torch.load(new / "models" / "model.pt", weights_only=True)
    assert all(torch.equal(saved["model"][name], value) for name, value in other.items())
    assert all(torch.equal(saved["ema"][name], value + 1) for name, value in own.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"swa": "@network"}, "'swa', which is not one"),
        ("$make(@network)", "not in a way that can be read"),
        ({"model": "@network", "ema": "@network"}, "not in a way that can be read"),
    ],
)
def test_a_part_that_is_not_there_or_cannot_be_read_is_refused(tmp_path, given, words):
    content = config(checkpointloader=LOADER | {"load_dict": given})
    other, own = two().values()
    bundle = make_bundle(tmp_path / "b", content, metadata(), model={"model": other, "ema": own})
    with pytest.raises(CheckpointError, match=words):
        load(bundle)
    torch.save({"model": own}, bundle / "models" / "model.pt")  # nothing else that it could mean
    assert torch.equal(first_of(bundle), next(iter(own.values())))


def test_files_beside_no_bundle_go_by_their_names(tmp_path):
    parts = {"ema": {"a.w": torch.ones(1)}, "model": {"a.w": torch.zeros(1)}}
    assert one_state(parts, tmp_path / "models" / "model.pt") == parts["model"]
