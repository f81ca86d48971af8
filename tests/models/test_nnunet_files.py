"""Checkpoints of nnU-Net folders: read and written under the same names; hostile ones run nothing."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from nnunet_folder import dataset_of, load, make_folder, pipeline_of, plans_of, write_plans

from tesla_med.config.nnunet import nnunet_notes
from tesla_med.errors import CheckpointError, TeslaMedError
from tesla_med.models.nnunet_files import PROVENANCE, read_folds, write_folder

pytestmark = pytest.mark.usefixtures("one_thread")
CHECKPOINT = "fold_0/checkpoint_final.pth"


def rewrite(folder, **more):
    """Change the content of the first checkpoint."""
    path = folder / CHECKPOINT
    content = torch.load(path, weights_only=False)
    torch.save(content | more, path)
    return path


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("more", [{}, {"residual": True}, {"norm": "BatchNorm"}, {"folds": 2}])
def test_written_and_read_again(tmp_path, dimensions, more):
    folder = make_folder(tmp_path / "a", dimensions, **more)
    state = load(folder).model.state_dict()
    new = write_folder(folder, tmp_path / "b", state, {"method": "tesla"})
    assert new == tmp_path / "b" / folder.name
    assert json.loads((new / PROVENANCE).read_text(encoding="utf-8"))["method"] == "tesla"
    before, after = read_folds(folder), read_folds(new)
    assert len(before) == len(after)
    for one, two in zip(before, after, strict=True):
        assert list(one.weights) == list(two.weights)
        assert all(torch.equal(value, two.weights[name]) for name, value in one.weights.items())
        assert one.mirror == two.mirror
        assert two.content["trainer_name"] == "nnUNetTrainer"
    for name in ("plans.json", "dataset.json"):
        assert (new / name).read_bytes() == (folder / name).read_bytes()


def test_changed_weights_are_written_under_all_their_names(tmp_path):
    folder = make_folder(tmp_path / "a", 2)
    state = {name: value + 1 for name, value in load(folder).model.state_dict().items()}
    new = write_folder(folder, tmp_path / "b", state, {})
    for name, value in read_folds(folder)[0].weights.items():
        assert torch.equal(read_folds(new)[0].weights[name], value + 1)
    again = load(new).model.state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_outputs_of_deep_supervision_are_kept(tmp_path):
    names = [name for name in read_folds(make_folder(tmp_path))[0].weights if "seg_layers" in name]
    assert names
    assert set(names) <= {
        name.removeprefix("folds.0.") for name in load(next(tmp_path.iterdir())).model.state_dict()
    }


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_names_of_compiled_and_wrapped_networks(tmp_path, prefix):
    folder = make_folder(tmp_path, 2)
    plain = load(folder).model.state_dict()
    weights = {
        prefix + name: value for name, value in read_folds(folder)[0].content["network_weights"].items()
    }
    rewrite(folder, network_weights=weights)
    assert all(torch.equal(value, plain[name]) for name, value in load(folder).model.state_dict().items())


def test_numbers_of_numpy_in_the_records(tmp_path):
    folder = make_folder(tmp_path, 2)
    records = {kind: [np.dtype(kind).type(1)] for kind in ("float64", "float32", "int64", "int32", "bool")}
    rewrite(folder, logging=records, _best_ema=np.float64(0.5))
    assert read_folds(folder)[0].content["_best_ema"] == 0.5


@pytest.mark.parametrize("mirror", [None, (), (0,), [0, 1]])
def test_mirroring_is_that_of_the_checkpoint(tmp_path, mirror):
    assert load(make_folder(tmp_path, 2, mirror=mirror)).model.mirror == tuple(mirror or ())


def test_the_best_checkpoint_where_there_is_no_final_one(tmp_path):
    folder = make_folder(tmp_path, 2, checkpoint="checkpoint_best.pth")
    assert [fold.path.name for fold in read_folds(folder)] == ["checkpoint_best.pth"]
    assert len(load(folder).model.folds) == 1
    assert [fold.path.name for fold in read_folds(folder / "fold_0")] == ["checkpoint_best.pth"]


def test_an_empty_fold_folder(tmp_path):
    folder = make_folder(tmp_path, 2)
    (folder / "fold_1").mkdir()
    assert len(read_folds(folder)) == 1
    with pytest.raises(CheckpointError, match=r"fold_1: holds neither checkpoint_final\.pth nor"):
        read_folds(folder / "fold_1")


def test_weights_of_another_network(tmp_path):
    folder = make_folder(tmp_path, 2)
    plans = plans_of(2)
    plans["configurations"]["2d"]["architecture"]["arch_kwargs"]["features_per_stage"] = [4, 8]
    write_plans(folder, plans, dataset_of())
    with pytest.raises(CheckpointError, match=r"weights of another architecture.*instead of"):
        load(folder)


@pytest.mark.parametrize(
    "content", [{}, {"network_weights": None}, {"network_weights": {"a": 1}}, [1], torch.zeros(2)]
)
def test_a_checkpoint_without_weights(tmp_path, content):
    folder = make_folder(tmp_path, 2)
    torch.save(content, folder / CHECKPOINT)
    with pytest.raises(CheckpointError, match=r"checkpoint_final\.pth: holds no 'network_weights'"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 10, 2000])
def test_a_truncated_checkpoint(tmp_path, keep):
    path = make_folder(tmp_path, 2) / CHECKPOINT
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"checkpoint_final\.pth.*copy (it|the file) again"):
        load(path.parent.parent)


def test_a_folder_above_the_model_says_where_it_lies(tmp_path):
    folder = make_folder(tmp_path / "results", 2)
    for given in (tmp_path, tmp_path / "results"):
        with pytest.raises(CheckpointError, match=r"no model at .*did you mean") as caught:
            pipeline_of(given)
        assert f"did you mean {folder}?" in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"plans\.json.*metadata\.json") as caught:
        pipeline_of(tmp_path / "empty")
    assert "did you mean" not in str(caught.value)


def test_a_file_of_another_kind(tmp_path):
    folder = make_folder(tmp_path, 2)
    path = folder / "fold_0" / "model.onnx"
    path.write_bytes(b"\x08\x07\x12\x07pytorch" + b"\x00" * 100)
    with pytest.raises(CheckpointError, match=r"model\.onnx: cannot be read as a checkpoint of nnU-Net"):
        load(path)


def test_weights_that_are_not_finite(tmp_path):
    folder = make_folder(tmp_path, 2)
    weights = read_folds(folder)[0].content["network_weights"]
    rewrite(folder, network_weights={name: value * float("nan") for name, value in weights.items()})
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        load(folder)


# ------------------------------------------------------------ hostile


class Runs:
    """Runs a command when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def attacks(canary):
    """Return objects that leave a file when they are unpickled by a loader that runs them."""
    path = str(canary)
    return {
        "os.system": Runs(os.system, f"touch {path}"),
        "eval": Runs(eval, f"open({path!r}, 'w')"),
        "open": Runs(open, path, "w"),
        "numpy": Runs(np.save, path, np.zeros(1)),
        "mkdir": Runs(os.mkdir, path),
    }


def canary_of(tmp_path):
    return tmp_path / "canary"


@pytest.mark.parametrize("how", attacks("x"))
def test_the_attacks_work_where_nothing_stops_them(tmp_path, how):
    canary = canary_of(tmp_path)
    pickle.loads(pickle.dumps(attacks(canary)[how]))  # noqa: S301 - that the next test can fail
    assert canary.exists() or canary.with_suffix(".npy").exists()


@pytest.mark.parametrize("where", ["network_weights", "logging", "init_args", "trainer_name"])
@pytest.mark.parametrize("how", attacks("x"))
def test_a_checkpoint_runs_nothing(tmp_path, where, how):
    folder = make_folder(tmp_path / "model", 2)
    canary = canary_of(tmp_path)
    rewrite(folder, **{where: attacks(canary)[how]})
    with pytest.raises(CheckpointError, match=r"checkpoint_final\.pth: refused, it holds more than weights"):
        load(folder)
    assert not list(tmp_path.glob("canary*"))


@pytest.mark.parametrize("how", ["os.system", "open"])
def test_a_bare_pickle_runs_nothing(tmp_path, how):
    folder = make_folder(tmp_path / "model", 2)
    canary = canary_of(tmp_path)
    (folder / CHECKPOINT).write_bytes(pickle.dumps({"network_weights": attacks(canary)[how]}, protocol=2))
    with pytest.raises(CheckpointError, match=r"checkpoint_final\.pth"):
        load(folder)
    assert not canary.exists()


def test_names_inside_an_archive_lead_nowhere(tmp_path):
    folder = make_folder(tmp_path / "model", 2)
    path = folder / CHECKPOINT
    with zipfile.ZipFile(path) as old:
        entries = {item: old.read(item) for item in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, content in entries.items():
            new.writestr(name, content)
        new.writestr("../../../canary", b"x")
    with suppress(CheckpointError):
        load(folder)
    assert not list(tmp_path.rglob("canary*"))


def network(**more):
    def change(plans, _):
        architecture = plans["configurations"]["2d"]["architecture"]
        for key, value in more.items():
            place = architecture if key in architecture else architecture["arch_kwargs"]
            place[key] = value

    return change


HOSTILE_PLANS = {
    "network": network(network_class_name="os.system"),
    "network with a known end": network(network_class_name="os.system.PlainConvUNet"),
    "network with a path": network(network_class_name="dynamic_network_architectures.../../x"),
    "convolution": network(conv_op="os.system"),
    "norm": network(norm_op="os.system"),
    "norm beside torch": network(norm_op="torch.nn.../../os.system"),
    "activation": network(nonlin="builtins.eval"),
    "dropout": network(dropout_op="os.system", dropout_op_kwargs={"command": "touch canary"}),
    "imports": network(_kw_requires_import=["os", "conv_op"]),
    "option of a layer": network(norm_op_kwargs={"device": "touch canary"}),
    "huge width": network(features_per_stage=[10**12, 10**12]),
    "endless lists": network(n_stages=10**9, kernel_sizes=3),
    "negative width": network(features_per_stage=[-4, 6]),
    "no number": network(features_per_stage=["a", "b"]),
}


@pytest.mark.parametrize("what", HOSTILE_PLANS)
def test_hostile_plans_run_nothing(tmp_path, what, monkeypatch):
    def no(*_):
        raise AssertionError("a command was run")

    folder = make_folder(tmp_path, 2)
    plans = plans_of(2)
    HOSTILE_PLANS[what](plans, None)
    write_plans(folder, plans, dataset_of())
    monkeypatch.setattr(os, "system", no)
    monkeypatch.chdir(tmp_path)
    if what in ("dropout", "imports"):  # names that are not looked at
        load(folder)
    else:
        with pytest.raises(TeslaMedError):
            load(folder)
    assert not list(tmp_path.rglob("canary*"))


@pytest.mark.parametrize(
    "change",
    [
        {"patch_size": [10**9, 10**9]},
        {"spacing": [1e-5, 1e-5]},
        {"patch_size": [0, 16]},
        {"patch_size": [-8, 16]},
        {"spacing": [0, 1]},
        {"spacing": [float("nan"), 1]},
        {"spacing": [1e-300, 1]},
    ],
)
def test_numbers_that_cannot_be(tmp_path, change):
    from nnunet_folder import balls, volume

    from tesla_med.config.models import Region
    from tesla_med.prepare.preprocessors import preprocessor_of

    folder = make_folder(tmp_path, 2)
    plans = plans_of(2)
    plans["configurations"]["2d"] |= change
    write_plans(folder, plans, dataset_of())
    with pytest.raises(TeslaMedError):
        preprocessor_of(load(folder).pipeline, Region())(volume(balls()[None]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../canary", "../canary", "con", "", "\x00"])
def test_names_of_classes_make_no_files(tmp_path, name):
    from nnunet_folder import balls, write_image

    from tesla_med.actions.predict import predict

    def change(_, dataset):
        dataset["labels"] = {"background": 0, name: 1, "b": 2}
        dataset["channel_names"] = {"0": name}

    folder = make_folder(tmp_path / "model", 2, change=change)
    write_image(tmp_path / "images" / "a_0000.nii.gz", balls((12, 10, 3)))
    before = set(tmp_path.rglob("*"))
    with suppress(TeslaMedError):
        predict(tmp_path / "images", folder, out=tmp_path / "out" / "run", device="cpu")
    made = set(tmp_path.rglob("*")) - before
    assert all(path.is_relative_to(tmp_path / "out") for path in made)
    assert not list(tmp_path.rglob("*canary*"))


def test_a_pipeline_is_made_without_looking_at_checkpoints(tmp_path):
    folder = make_folder(tmp_path, 2)
    (folder / CHECKPOINT).write_bytes(b"no checkpoint")
    assert pipeline_of(folder).model.name == "nnunet"


@pytest.mark.parametrize(
    ("inside", "given"),
    [
        ("", "."),
        ("", "fold_0"),
        ("", "./fold_0/../fold_0"),
        ("", CHECKPOINT),
        ("fold_0", "."),
        ("fold_0", ".."),
        ("fold_0", "checkpoint_final.pth"),
    ],
)
def test_a_path_that_ends_in_no_name_means_what_it_leads_to(tmp_path, monkeypatch, inside, given):
    def several(plans, dataset):
        plans["configurations"]["3d_lowres"] = dict(plans["configurations"]["3d_fullres"])

    folder = make_folder(tmp_path / "a", change=several)
    monkeypatch.chdir(folder / inside)
    found = load(Path(given))
    assert found.pipeline.model.params["folds"] == 1
    new = write_folder(Path(given), tmp_path / "b", found.model.state_dict(), {})
    assert new == tmp_path / "b" / folder.name
    assert (new / CHECKPOINT).is_file()


def test_a_checkpoint_beside_the_plans_is_written_into_a_fold(tmp_path):
    folder = make_folder(tmp_path / "a")
    (folder / CHECKPOINT).rename(folder / "checkpoint_final.pth")
    path = folder / "checkpoint_final.pth"
    new = write_folder(path, tmp_path / "b", load(path).model.state_dict(), {})
    assert (new / CHECKPOINT).is_file()
    assert load(new).pipeline.model.params["folds"] == 1


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    folder = make_folder(tmp_path / "a")
    init = torch.load(folder / CHECKPOINT, weights_only=False).get("init_args", {})
    rewrite(folder, init_args=init | {"configuration": "3d_lowres"})
    with pytest.raises(CheckpointError, match=r"trained as '3d_lowres', but .* '3d_fullres'"):
        load(folder)


def test_a_folder_that_is_no_fold_is_not_taken_for_one(tmp_path):
    folder = make_folder(tmp_path / "a")
    (folder / "fold_0").rename(folder / "fold_0_old")
    with pytest.raises(CheckpointError, match="no fold_k"):
        load(folder)
    (folder / "fold_0_old").rename(folder / "fold_all")
    assert load(folder).pipeline.model.params["folds"] == 1


def test_what_links_lead_to_outside_is_neither_copied_nor_said(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("a secret line", encoding="utf-8")
    folder = make_folder(tmp_path / "a")
    for name in ("dataset_fingerprint.json", "LICENSE"):
        (folder / name).symlink_to(secret)
    found = load(folder)
    assert not any("secret" in note for note in nnunet_notes(folder))
    new = write_folder(folder, tmp_path / "b", found.model.state_dict(), {})
    assert sorted(path.name for path in new.iterdir()) == ["dataset.json", "fold_0", "plans.json", PROVENANCE]
    (folder / "LICENSE").unlink()
    (folder / "LICENSE").write_text("MIT", encoding="utf-8")
    assert any("MIT" in note for note in nnunet_notes(folder))


def test_what_is_wrong_in_the_plans_is_said_of_the_plans(tmp_path):
    def spacing(plans, dataset):
        plans["configurations"]["3d_fullres"]["spacing"] = [0, 1, 1]

    folder = make_folder(tmp_path / "a")
    plans, dataset = plans_of(), dataset_of(regions=True)
    spacing(plans, dataset)
    write_plans(folder, plans, dataset)
    with pytest.raises(CheckpointError, match=r"plans\.json: spacing\.0 is 0: "):
        load(folder)
    write_plans(folder, plans_of(), dataset | {"regions_class_order": [1, 1]})
    with pytest.raises(CheckpointError, match="the same value"):
        load(folder)
    (folder / "plans.json").write_text("[" * 200_000, encoding="utf-8")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        load(folder)


def test_intensities_that_are_not_normalised_are_seen_in_their_own_range(tmp_path):
    def raw(plans, dataset):
        plans["configurations"]["3d_fullres"]["normalization_schemes"] = ["NoNormalization"]
        for seen in plans["foreground_intensity_properties_per_channel"].values():
            seen |= {"min": 12.0, "max": 380.0}

    found = load(make_folder(tmp_path / "a", change=raw))
    assert found.pipeline.preprocessing.model_range == (0.0, 380.0)
    assert not any("not normalised" in note for note in found.notes)
    found = load(make_folder(tmp_path / "b"))
    assert found.pipeline.preprocessing.model_range == (-3.0, 5.0)
    assert not any("not normalised" in note for note in found.notes)


def test_a_channel_that_is_not_normalised_beside_others_that_are_is_remarked_on(tmp_path):
    def mixed(plans, dataset):
        config = plans["configurations"]["3d_fullres"]
        config["normalization_schemes"] = ["ZScoreNormalization", "NoNormalization"]
        config["use_mask_for_norm"] = [False, False]
        dataset["channel_names"] = {"0": "T2", "1": "ADC"}

    notes = nnunet_notes(make_folder(tmp_path / "a", change=mixed))
    assert any(note.startswith("channel 1 of the images is not normalised") for note in notes)
