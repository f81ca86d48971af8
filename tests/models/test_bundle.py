"""MONAI bundles: masks as MONAI makes them, adapted weights that come back, nothing run unasked."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from bundles import (
    READ,
    SIGMOID,
    STEPS,
    agreement,
    config,
    load,
    make_bundle,
    make_image,
    make_network,
    mask,
    metadata,
    of_monai,
)

from tesla_med import adapt_site
from tesla_med.actions.predict import predict
from tesla_med.errors import AdaptationError, CheckpointError, ConfigError
from tesla_med.models.bundle_files import PROVENANCE, load_script, reaches_out, write_bundle
from tesla_med.models.loading import weights_sha256

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("reports=[]", "protocols.N-O.tesla.updates_per_case=2")
REGIONS = metadata(3, ["whole", "core", "rim"])
SLICES = {"_target_": "SliceInferer", "roi_size": [16, 16], "spatial_dim": 2, "sw_batch_size": 4}


def test_the_mask_is_that_of_monais_own_workflow(shared, tmp_path):
    folder = shared / "foreign" / "monai_bundle"
    if not folder.is_dir():
        pytest.skip(f"needs the bundle at {folder}")
    predict(folder / "images", folder / "tiny_bundle", out=tmp_path / "out", overrides=QUICK[:1])
    theirs = np.asarray(nib.load(folder / "tiny_bundle" / "eval" / "c0_seg.nii.gz").dataobj)
    voxels, dice = agreement(mask(tmp_path / "out"), theirs)
    assert voxels >= 0.9999
    assert dice >= 0.999


@pytest.mark.parametrize(
    ("content", "about"),
    [
        (config(), metadata()),
        (config(postprocessing=SIGMOID), REGIONS),
        (config(2, inferer=SLICES), metadata()),
        (config(inferer={"_target_": "SimpleInferer"}, pixdim=[1.5, 1.5, 1.5]), metadata()),
    ],
    ids=["windows", "regions", "slices", "whole images"],
)
def test_masks_are_those_of_monai(tmp_path, content, about):
    if content["inferer"]["_target_"] == "SimpleInferer":
        content["preprocessing"]["transforms"] = [
            *content["preprocessing"]["transforms"],
            {"_target_": "Resized", "keys": "image", "spatial_size": [24, 24, 16], "mode": "trilinear"},
        ]
    bundle, image = make_bundle(tmp_path / "b", content, about), make_image(tmp_path / "i" / "c.nii.gz")
    predict(image, bundle, out=tmp_path / "out", overrides=QUICK[:1])
    theirs = of_monai(bundle, image)
    if len(theirs) > 1:  # regions, painted in turn
        painted = np.zeros(theirs.shape[1:])
        for index, inside in enumerate(theirs):
            painted[inside > 0] = index + 1
        theirs = painted[None]
    voxels, dice = agreement(mask(tmp_path / "out"), theirs[0])
    assert len(np.unique(theirs)) > 1
    assert voxels >= 0.9999
    assert dice >= 0.999


@pytest.mark.parametrize(("axes", "method"), [(3, "tesla"), (2, "tent")])
def test_adapted_weights_predict_again_and_go_back_to_their_bundle(tmp_path, axes, method):
    content = config(axes, postprocessing=SIGMOID) | ({"inferer": SLICES} if axes == 2 else {})
    bundle, image = make_bundle(tmp_path / "b", content, REGIONS), make_image(tmp_path / "i" / "c.nii.gz")
    adapt_site(None, image, weights=bundle, method=method, out=tmp_path / "a", guard=False, overrides=QUICK)
    adapted = tmp_path / "a" / "checkpoints" / "c.safetensors"
    again = predict(image, adapted, out=tmp_path / "p", overrides=QUICK[:1])
    assert np.array_equal(mask(tmp_path / "p"), mask(tmp_path / "a"))
    assert [item.used for item in again.results] == ["source"]

    state = load(adapted).model.state_dict()
    new = write_bundle(bundle, tmp_path / "back", state, {"method": method})
    assert new == tmp_path / "back" / "b"
    assert json.loads((new / PROVENANCE).read_text()) == {"method": method}
    assert (new / "LICENSE").is_file()
    content = torch.load(new / "models" / "model.pt", weights_only=True)
    before = torch.load(bundle / "models" / "model.pt", weights_only=True)
    assert content["epoch"] == 3
    assert list(content["model"]) == list(before["model"])
    assert any(not torch.equal(content["model"][key], before["model"][key]) for key in before["model"])
    predict(image, new, out=tmp_path / "n", overrides=QUICK[:1])
    assert (mask(tmp_path / "n") == mask(tmp_path / "a")).mean() > 0.98  # but for batches' own statistics


def test_classes_channels_range_and_licence_come_from_the_bundle(tmp_path):
    bundle = make_bundle(tmp_path / "b")
    loaded = load(bundle)
    assert [item.name for item in loaded.pipeline.classes] == ["background", "part 1", "part 2"]
    assert loaded.pipeline.preprocessing.model_range == (0.0, 1.0)
    assert loaded.model.patch == (16, 16, 8)
    assert any("Made-up licence 1.0" in text for text in loaded.notes)
    assert any("of somebody" in text for text in loaded.notes)
    assert weights_sha256(bundle) != weights_sha256(bundle / "models" / "model.pt")


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        ({"_target_": "NormalizeIntensityd", "keys": "image", "nonzero": True}, (-3.0, 5.0)),
        ({"_target_": "ScaleIntensityD", "keys": "image", "minv": -1, "maxv": 1}, (-1.0, 1.0)),
        ({"_target_": "ThresholdIntensityd", "keys": "image", "threshold": 0.1}, (0.0, 1.0)),
    ],
)
def test_the_range_follows_the_last_scaling(tmp_path, step, expected):
    bundle = make_bundle(tmp_path / "b", config(preprocessing=[*READ, *STEPS, step]))
    assert load(bundle).pipeline.preprocessing.model_range == expected


def test_torchscript_predicts_in_place_of_weights(tmp_path):
    content = config(network_def={"_target_": "scripts.own.Net"})
    plain = make_bundle(tmp_path / "p")
    bundle, image = make_bundle(tmp_path / "b", content, other=0), make_image(tmp_path / "i" / "c.nii.gz")
    torch.jit.script(make_network(config())).save(str(bundle / "models" / "model.ts"))
    for name, weights in (("p", plain), ("b", bundle), ("f", bundle / "models" / "model.ts")):
        predict(image, weights, out=tmp_path / "out" / name, overrides=QUICK[:1])
        assert np.array_equal(mask(tmp_path / "out" / name), mask(tmp_path / "out" / "p"))
    for method in ("tesla", "cotta", "tent"):  # these ask for all weights, for copies, and for norm layers
        with pytest.raises(AdaptationError, match=r"TorchScript|norm layers"):
            adapt_site(None, image, weights=bundle, method=method, out=tmp_path / "a", overrides=QUICK)
    new = write_bundle(bundle, tmp_path / "new", load(bundle).model.state_dict(), {})
    assert isinstance(load_script(new / "models" / "model.ts"), torch.nn.Module)


# ------------------------------------------------------------ what is refused


class Pickled:
    """What runs when a pickle is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import pathlib

        return pathlib.Path.touch, (self.path,)


class Writer(torch.nn.Module):
    """A TorchScript that writes a file."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        torch.save(images, "canary")
        return images


HOSTILE = {
    "a class of another package": {"network_def": {"_target_": "os.system", "command": "touch canary"}},
    "an expression": {"network_def": "$__import__('os').system('touch canary')"},
    "beside the network": {"network": "$[__import__('os').system('touch canary'), @network_def][1]"},
    "an argument": {"top": "$__import__('os').system('touch canary')"},
    "a hidden name": {"top": "$(1).__class__.__base__.__subclasses__()"},
    "a transform": {"preprocessing": [{"_target_": "Lambdad", "keys": "image", "func": "$print"}]},
    "a class among arguments": {"pixdim": [{"_target_": "os.system", "command": "touch canary"}, 1, 1]},
    "a switch": {
        "inferer": {"_target_": "SimpleInferer", "_disabled_": "$__import__('os').system('touch canary')"}
    },
    "a circle": {"pixdim": ["@pixdim", 1, 1], "top": "@top"},
    "a macro": {"network_def": "%/etc/passwd"},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_configurations_are_refused_and_run_nothing(tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    bundle = make_bundle(tmp_path / "b", config(**change), model={})
    with pytest.raises(CheckpointError, match=r"inference\.json"):
        load(bundle)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "key", ["imports", "dataset", "dataloader", "evaluator", "handlers", "run", "initialize", "dataset_dir"]
)
def test_what_is_not_needed_is_not_looked_at(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "canary.py").write_text("open('canary', 'w')")
    bundle = make_bundle(tmp_path / "b", config(**{key: ["$__import__('os').system('touch canary')"]}))
    logging = "[loggers]\nkeys=root\n[handlers]\nkeys=a\n[handler_a]\nclass=__import__('canary')\nargs=()\n"
    (bundle / "configs" / "logging.conf").write_text(logging)
    assert load(bundle).pipeline.channels == 1
    assert not (tmp_path / "canary").exists()


def test_pickles_are_refused_and_run_nothing(tmp_path):
    bundle = make_bundle(tmp_path / "b", model={"state_dict": Pickled(tmp_path / "canary")})
    with pytest.raises(CheckpointError, match="could run code"):
        load(bundle)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(("inside", "given"), [(".", "."), ("models", ".."), ("models", "model.pt")])
def test_a_path_that_ends_in_no_name_means_what_it_leads_to(tmp_path, monkeypatch, inside, given):
    bundle = make_bundle(tmp_path / "b")
    monkeypatch.chdir(bundle / inside)
    state = load(Path(given)).model.state_dict()
    assert write_bundle(Path(given), tmp_path / "new", state, {}) == tmp_path / "new" / "b"
    assert (tmp_path / "new" / "b" / "models" / "model.pt").is_file()


def test_weights_in_a_folder_of_models_are_written_where_the_configuration_looks(tmp_path):
    named = config(checkpointloader={"_target_": "CheckpointLoader", "load_path": "models/best/model.pt"})
    bundle = make_bundle(tmp_path / "b", named, other=0)
    (bundle / "models" / "best").mkdir()
    torch.save(make_network(named).state_dict(), bundle / "models" / "best" / "model.pt")
    new = write_bundle(bundle, tmp_path / "new", load(bundle).model.state_dict(), {})
    assert load(new).model.state_dict().keys() == load(bundle).model.state_dict().keys()


def test_what_links_lead_to_outside_is_neither_copied_nor_said(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "license.txt").write_text("a secret line", encoding="utf-8")
    bundle = make_bundle(tmp_path / "b")
    state = load(bundle).model.state_dict()
    (bundle / "LICENSE").unlink()
    (bundle / "LICENSE").symlink_to(outside / "license.txt")
    (bundle / "docs").symlink_to(outside)
    new = write_bundle(bundle, tmp_path / "new", state, {})
    assert sorted(path.name for path in new.iterdir()) == ["configs", "models", PROVENANCE]
    assert not any("secret" in note for note in load(bundle).notes)


@pytest.mark.parametrize("name", ["../out.pt", "models/../../out.pt", "/somewhere/out.pt"])
def test_weights_outside_of_the_bundle_are_refused(tmp_path, name):
    bundle = make_bundle(tmp_path / "b", config(checkpointloader={"load_path": name}), other=0)
    torch.save(make_network(config()).state_dict(), tmp_path / "out.pt")
    with pytest.raises(CheckpointError, match="outside of the bundle"):
        load(bundle)


def test_a_torchscript_that_writes_files_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.jit.script(Writer()).save("model.ts")
    with pytest.raises(CheckpointError, match="'save'"):
        load_script(tmp_path / "model.ts")
    assert not (tmp_path / "canary").exists()


def rewritten(path, rename=lambda name: name, change=lambda code: code, twice=False):
    """Write a TorchScript again, with other names in its archive or other code."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, held in content.items():
            code = name.endswith(".py")
            archive.writestr(rename(name), change(held.decode()).encode() if code else held)
            if code and twice:
                archive.writestr(name.upper(), held)


def instead(other):
    """Return what writes other code in place of ``torch.save(``."""
    return {"change": lambda code: code.replace("torch.save(", other)}


DISGUISES = {
    "another ending": {"rename": lambda name: name.replace(".py", ".PY")},
    "another folder": {"rename": lambda name: name.replace("/code/", "/CODE/")},
    "a name that is there twice": instead("torch.relu(") | {"twice": True},
    "a line that goes on": instead("torch.save\\\n("),
    "a comment": instead("torch.save # or not\n  ("),
    "another name": instead("f = torch.save\n    _1 = f("),
    "text": instead('getattr(torch, "save")('),
    "text in parts": instead('getattr(torch, "sa" "ve")('),
    "escaped text": instead('getattr(torch, "sa\\x76e")('),
    "three quotes": instead('getattr(torch, """sa""" """ve""")('),
    "another library": instead("ops.image.write_file("),
    "a library by another name": instead("o = ops\n    o.image.write_file("),
}


@pytest.mark.parametrize("disguise", DISGUISES.values(), ids=DISGUISES.keys())
def test_a_disguised_torchscript_is_refused_and_writes_nothing(tmp_path, monkeypatch, disguise):
    monkeypatch.chdir(tmp_path)
    torch.jit.script(Writer()).save("model.ts")
    rewritten(tmp_path / "model.ts", **disguise)
    with pytest.raises(CheckpointError, match="refused"):
        load_script(tmp_path / "model.ts")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "code",
    [
        "x = self.saved\ny = loader",
        'a = getattr(self.net, "0")\nb = ("don\'t", "a\\n")',
        "b = __torch__.torchvision.ops.misc.FrozenBatchNorm2d",
        "c = ops.prim.data(x)\nd = ops.aten.relu(x)",
        "e = torch.relu(x, )",
    ],
)
def test_code_as_torch_writes_it_reaches_nothing(code):
    assert reaches_out(code) is None


@pytest.mark.parametrize(
    ("content", "about", "words"),
    [
        (config(network_def={"_target_": "NoSuchNet"}), None, "NoSuchNet"),
        (config(inferer={"_target_": "SaliencyInferer"}), None, "SaliencyInferer"),
        (config(preprocessing=None), None, "preprocessing"),
        (config(2, inferer=None), None, "SliceInferer"),
        (config(), metadata(channels=4), "4 channels"),
        (config(), metadata(names=["background", "organ"]), "organ"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, content, about, words):
    with pytest.raises(CheckpointError, match=words):
        load(make_bundle(tmp_path / "b", content, about, model={}))


def test_onnx_alone_is_refused_by_name(tmp_path):
    bundle = make_bundle(tmp_path / "b", config(checkpointloader=None), other=0)
    (bundle / "models" / "model.onnx").touch()
    with pytest.raises(CheckpointError, match=r"model\.onnx.*ONNX"):
        load(bundle)


def test_arguments_that_a_class_does_not_take_are_named(tmp_path):
    content = config()
    content["network_def"]["no_such_argument"] = 1
    with pytest.raises(ConfigError, match="no_such_argument"):
        load(make_bundle(tmp_path / "b", content, model={}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"channels": [-4, 8]}, "UNet cannot be built.*negative"),
        ({"channels": [10**9, 10**9]}, "UNet cannot be built"),
        ({"strides": [[2]]}, "strides"),
        ({"strides": [0]}, "strides"),
    ],
)
def test_networks_that_cannot_be_built_are_said(tmp_path, change, words):
    content = config()
    content["network_def"] |= change
    with pytest.raises(CheckpointError, match=words):
        load(make_bundle(tmp_path / "b", content, model={}))


@pytest.mark.parametrize(
    "error", ["No module named 'einops'", "from einops.layers import x", "import einops"]
)
def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch, error):
    def missing(*_, **__):
        raise ImportError(error)

    monkeypatch.setattr("monai.networks.nets.UNet.__init__", missing)
    with pytest.raises(CheckpointError, match=r"UNet needs a package .*pip install einops$"):
        load(make_bundle(tmp_path / "b", model={}))


def test_terms_are_said_in_one_line_of_plain_text(tmp_path):
    about = metadata() | {"copyright": "of \x1b[31msomebody\nelse"}
    bundle = make_bundle(tmp_path / "b", config(), about)
    (bundle / "LICENSE").write_text("Licence \x1b]0;title\x07 1.0", encoding="utf-8")
    terms = [note for note in load(bundle).notes if "of the model" in note]
    assert len(terms) == 2
    assert all(note.isprintable() for note in terms)
