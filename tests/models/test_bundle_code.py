"""Code of MONAI bundles: run for those who trust it, and only as long as they do."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from bundles import (
    READ,
    STEPS,
    agreement,
    config,
    load,
    make_bundle,
    make_image,
    make_network,
    mask,
    of_monai,
)

from tesla_med import adapt_site
from tesla_med.actions.predict import predict
from tesla_med.config.models import Region
from tesla_med.config.resolve import resolve
from tesla_med.errors import CheckpointError
from tesla_med.io.volumes import read_volume
from tesla_med.models.bundle_files import write_bundle
from tesla_med.prepare.preprocessors import preprocessor_of

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("reports=[]",)

OWN = """
import torch
from monai.networks.nets import UNet

class Own(UNet):
    pass
"""


def with_code(folder):
    content = config()
    network = make_network(content)
    content["network_def"] = content["network_def"] | {"_target_": f"{folder.name}_own.Own"}
    content["preprocessing"]["transforms"] = [
        *content["preprocessing"]["transforms"],
        {"_target_": "Lambdad", "keys": "image", "func": "$lambda image: image * 2.0"},
    ]
    bundle = make_bundle(folder, content, model=network.state_dict())
    (bundle / f"{folder.name}_own.py").write_text(OWN)
    return bundle


def test_code_runs_for_those_who_trust_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sys.path", [*sys.path])
    bundle, image = with_code(tmp_path / "trusted_b"), make_image(tmp_path / "i" / "c.nii.gz")
    with pytest.raises(CheckpointError, match=r"network.*--trust-code"):
        predict(image, bundle, out=tmp_path / "no")
    predict(image, bundle, out=tmp_path / "p", overrides=QUICK, trust_code=True)
    assert "--trust-code" in caplog.text
    adapt_site(
        *(None, image), weights=bundle, method="tent", out=tmp_path / "a", overrides=QUICK, trust_code=True
    )
    assert len(np.unique(mask(tmp_path / "p"))) > 1


def of_scripts(folder, name):
    """Make a bundle whose network lies in modules of the same name as another's."""
    content = config()
    network = make_network(content)
    content["network_def"] = content["network_def"] | {"_target_": "scripts.own.Own"}
    bundle = make_bundle(folder, content, model=network.state_dict())
    (bundle / "scripts").mkdir()
    (bundle / "scripts" / "own.py").write_text(f"{OWN}\n    name = {name!r}\n")
    return bundle


@pytest.fixture
def own_modules(monkeypatch):
    """Forget what bundles import."""
    monkeypatch.setattr("sys.path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
        del sys.modules[name]


@pytest.mark.usefixtures("own_modules")
def test_each_bundle_has_the_modules_of_its_own_folder(tmp_path):
    bundles = [of_scripts(tmp_path / name, name) for name in ("a", "b")]
    for bundle in (*bundles, bundles[0]):
        assert load(bundle, trust=True).model.network.name == bundle.name
    assert str(bundles[1]) not in sys.path


@pytest.mark.usefixtures("own_modules")
def test_what_is_installed_inside_of_a_bundle_stays(tmp_path, monkeypatch):
    bundles = [of_scripts(tmp_path / name, name) for name in ("a", "b")]
    module = type(sys)("installed")
    module.__file__ = str(bundles[0].resolve() / "lib" / "site-packages" / "installed.py")
    monkeypatch.setitem(sys.modules, "installed", module)
    for bundle in bundles:
        load(bundle, trust=True)
    assert sys.modules["installed"] is module


@pytest.mark.usefixtures("own_modules")
def test_trust_ends_with_the_call_that_has_it(tmp_path):
    bundle, image = of_scripts(tmp_path / "b", "b"), make_image(tmp_path / "i" / "c.nii.gz")
    adapt_site(
        *(None, image),
        weights=bundle,
        method="tent",
        out=tmp_path / "a",
        overrides=QUICK,
        trust_code=True,
        guard=False,
    )
    adapted = tmp_path / "a" / "checkpoints" / "c.safetensors"
    load(adapted, trust=True)
    with pytest.raises(CheckpointError, match="--trust-code"):
        load(adapted)


def test_modules_beside_the_configuration_go_with_an_adapted_bundle(tmp_path):
    bundle = make_bundle(tmp_path / "b")
    (bundle / "own.py").touch()
    (bundle / "package" / "part").mkdir(parents=True)
    for name in ("__init__.py", "part/more.py"):
        (bundle / "package" / name).touch()
    (bundle / "data").mkdir()
    (bundle / "data" / "big.py").touch()
    new = write_bundle(bundle, tmp_path / "new", load(bundle).model.state_dict(), {})
    found = sorted(str(path.relative_to(new)) for path in new.rglob("*.py"))
    assert found == ["own.py", "package/__init__.py", "package/part/more.py"]


@pytest.mark.parametrize("kind", ["lazy", "nested", "another key"])
def test_code_prepares_images_as_monai_does(tmp_path, kind):
    own = {"_target_": "Lambdad", "keys": "image", "func": "$lambda x: x * 2 - 0.6"}
    coarse = STEPS[1] | {"pixdim": [2.2, 2.2, 2.2]}
    zoom = {"_target_": "Zoomd", "keys": "image", "zoom": 1.3, "keep_size": False}
    transforms = [*READ, STEPS[2], coarse, zoom, own]
    if kind == "nested":
        transforms = [{"_target_": "Compose", "transforms": READ}, *transforms[2:]]
    composed = {"_target_": "Compose", "transforms": transforms, "lazy": kind == "lazy"}
    content = config(preprocessing=composed)
    if kind == "another key":
        renamed = json.dumps([composed, content["postprocessing"]]).replace('"image"', '"scan"')
        content["preprocessing"], content["postprocessing"] = json.loads(renamed)
    bundle, image = make_bundle(tmp_path / "b", content), make_image(tmp_path / "i" / "c.nii.gz")
    predict(image, bundle, out=tmp_path / "out", overrides=QUICK, trust_code=True)
    assert mask(tmp_path / "out").shape == (32, 28, 12)
    _, pipeline = resolve(None, None, (), bundle, trust_code=True)
    prepared = preprocessor_of(pipeline, Region(kind="whole"))(read_volume(image))
    from monai.bundle import ConfigParser

    parser = ConfigParser()
    parser.read_config(str(bundle / "configs" / "inference.json"))
    key = "scan" if kind == "another key" else "image"
    theirs = parser.get_parsed_content("preprocessing")({key: str(image)})[key].as_tensor()
    low, high = pipeline.preprocessing.model_range
    assert torch.equal(prepared.images[0] * (high - low) + low, theirs)


def test_slices_that_code_takes_predict_and_are_not_adapted(tmp_path):
    inferer = "$monai.inferers.SliceInferer(roi_size=(16, 16), spatial_dim=2, sw_batch_size=4)"
    bundle, image = (
        make_bundle(tmp_path / "b", config(2, inferer=inferer)),
        make_image(tmp_path / "i" / "c.nii.gz"),
    )
    predict(image, bundle, out=tmp_path / "out", overrides=QUICK, trust_code=True)
    assert agreement(mask(tmp_path / "out"), of_monai(bundle, image)[0]) == (1.0, 1.0)
    found = adapt_site(
        *(None, image), weights=bundle, method="tent", out=tmp_path / "a", overrides=QUICK, trust_code=True
    )
    assert "not adapted" in str(found.results)


def test_a_card_brings_no_trust(tmp_path):
    bundle, image = make_bundle(tmp_path / "b"), make_image(tmp_path / "i" / "c.nii.gz")
    adapt_site(None, image, weights=bundle, method="tent", out=tmp_path / "a", guard=False, overrides=QUICK)
    card = tmp_path / "a" / "checkpoints" / "c.json"
    content = json.loads(card.read_text())
    content["model"]["params"] |= {"code": str(with_code(tmp_path / "evil_b"))}
    card.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="--trust-code"):
        load(card.with_suffix(".safetensors"))
    with pytest.raises(CheckpointError, match="--trust-code"):
        load(bundle, f"model.params.code={tmp_path / 'evil_b'}")
