"""Runs with somebody else's model: what a dry run says, what goes back to its owner, regions apart."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest
import torch
from nnunet_folder import balls, load, make_folder, write_image

from tesla_med import adapt_site, predict, rollback
from tesla_med.cli.app import run
from tesla_med.losses import overlapping
from tesla_med.models.nnunet_files import read_folds
from tesla_med.tta.base import METHODS, MethodContext, make_method

pytestmark = pytest.mark.usefixtures("one_thread")
FEW = ("protocols.N-O.tesla.updates_per_case=1", "methods.tesla.weak_views=1", "guard.enabled=false")


@pytest.fixture
def images(tmp_path):
    for number in range(2):
        write_image(tmp_path / "images" / f"P{number}_0000.nii.gz", balls(seed=number))
    return tmp_path / "images"


def same(first, second):
    return np.array_equal(*(np.asanyarray(nib.load(path).dataobj) for path in (first, second)))


def test_adapted_weights_lie_in_the_form_of_their_source_and_predict_the_same(tmp_path, images):
    folder = make_folder(tmp_path / "model", 2, norm="BatchNorm", folds=2)
    out = tmp_path / "out"
    adapt_site(None, images, weights=folder, out=out, device="cpu", overrides=FEW)
    (record, _) = json.loads((out / "run.json").read_text(encoding="utf-8"))["cases"]
    assert record["used"] == "adapted"
    for name in ("P0_0000", "P1_0000"):
        new = out / "checkpoints" / f"{name}.model" / folder.name
        assert [fold.weights.keys() for fold in read_folds(new)] == [
            fold.weights.keys() for fold in read_folds(folder)
        ]
        assert json.loads((new / "tesla_med.json").read_text(encoding="utf-8"))["method"] == "tesla"
        predict(images / f"{name}.nii.gz", new, out=tmp_path / name, device="cpu")
        assert same(out / "masks" / f"{name}_mask.nii.gz", tmp_path / name / "masks" / f"{name}_mask.nii.gz")
    rollback(out, cases=["P0_0000"])
    assert not (out / "checkpoints" / "P0_0000.model").exists()
    assert (out / "checkpoints" / "P1_0000.model").is_dir()


def test_the_form_of_the_source_can_be_left_out(tmp_path, images):
    folder = make_folder(tmp_path / "model", 2)
    out = tmp_path / "out"
    adapt_site(None, images, weights=folder, out=out, device="cpu", overrides=(*FEW, "own_form=false"))
    assert not list((out / "checkpoints").glob("*.model"))
    assert len(list((out / "checkpoints").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_dry_run_says_what_was_understood(tmp_path, images, capsys, dimensions):
    folder = make_folder(tmp_path / "model", dimensions, regions=True, folds=2)
    line = ["adapt", "--weights", str(folder), "--volumes", str(images), "--device", "cpu", "--dry-run"]
    assert run([*line, "--out", str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    patch = "16x16" if dimensions == 2 else "8x16x16"
    for words in (
        "Network: PlainConvUNet, 2 folds",
        "instance norm",
        "1 channel (zscore)",
        "slices" if dimensions == 2 else "volumes",
        f"patches of {patch}, mirrored over all axes",
        "0 background, 1 whole, 2 core (overlapping regions, painted in this order)",
        "by tesla",
    ):
        assert words in shown
    assert not (tmp_path / "out").exists()


def test_a_dry_run_counts_the_slices_of_a_volume(tmp_path, images, capsys):
    folder = make_folder(tmp_path / "model", 3)
    line = [
        "adapt",
        "--weights",
        str(folder),
        "--volumes",
        str(images),
        "--device",
        "cpu",
        "--dry-run",
        "--json",
    ]
    assert run(line) == 0
    content = json.loads(capsys.readouterr().out)
    assert {case["slices"] > 1 for case in content["cases"]} == {True}
    assert set(content["model"]) == {"network", "images", "classes", "adapted"}


def test_binary_logits_of_regions_are_their_sigmoids(tmp_path):
    network = load(make_folder(tmp_path, 2, regions=True)).model.eval()
    images = torch.randn(2, 1, 16, 16)
    with torch.no_grad():
        outputs = overlapping(network(images))
        network.apart = True
        found = network(images).softmax(dim=1)
    assert found.shape == (2, 2, 2, 16, 16)
    assert torch.allclose(found[:, 1], outputs.sigmoid(), atol=1e-5)


@pytest.mark.parametrize("name", METHODS.names())
def test_methods_that_can_ask_of_each_region_by_itself(tmp_path, name):
    """Their deployed predictions are classes all the same."""
    kind = METHODS.get(name)
    if not kind.binary_regions:
        pytest.skip("learns regions as classes that exclude each other")
    model = load(make_folder(tmp_path, 2, regions=True, norm="BatchNorm")).model
    method = make_method(name, model, {}, MethodContext(torch.device("cpu")))
    assert method.model.apart
    assert not model.apart
    images = torch.rand(2, 1, 16, 16)
    method.start_epoch(0, iter((images,)))
    assert all(torch.isfinite(torch.as_tensor(value)) for value in method.adapt(images).values())
    probs = method.predict(images)
    assert probs.shape == (2, 3, 16, 16)
    assert torch.allclose(probs.sum(dim=1), torch.ones(2, 16, 16), atol=1e-5)


def test_volumes_can_be_warped_in_all_planes(tmp_path):
    model = load(make_folder(tmp_path, 3)).model
    found = {}
    for planes in ("slices", "all"):
        params = {"warp_planes": planes, "op_set": "released_mri", "weak_views": 1}
        method = make_method("tesla", model, params, MethodContext(torch.device("cpu"), seed=1))
        images = torch.rand(2, 1, 8, 16, 16, generator=torch.Generator().manual_seed(0))
        method.start_epoch(0, iter((images,)))
        found[planes] = {name: float(value) for name, value in method.adapt(images).items()}
        assert method.policy.draw(tuple(images.shape), "uniform").planes is None or planes == "all"
    assert all(np.isfinite(value) for item in found.values() for value in item.values())
    assert found["all"] != found["slices"]


@pytest.mark.parametrize("pipeline", ["nnunet", "bundle"])
def test_such_models_are_not_trained_here(tmp_path, images, capsys, pipeline):
    line = ["train", "--pipeline", pipeline, "--sites", "nnunet/any", "--volumes", str(images)]
    assert run([*line, "--out", str(tmp_path / "out"), "--device", "cpu"]) == 2
    assert "trained elsewhere" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("norm", "words"),
    [("batch", "batch norm with running statistics"), ("instance", "instance norm"), ("group", "group norm")],
)
def test_the_norms_of_a_network_of_the_project_are_named(norm, words):
    """Its batch norm is a class of its own, derived from PyTorch's."""
    from tesla_med.actions.describing import _norms
    from tesla_med.models.unet import UNet

    assert _norms(UNet(1, 2, 4, norm=norm)) == words
