"""Networks of nnU-Net: built from folders, names of weights, ensembles, regions; the two shared folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from nnunet_folder import balls, load, make_folder, pipeline_of, write_image

from tesla_med.adapt import adapt_site
from tesla_med.errors import CheckpointError, ConfigError
from tesla_med.losses import overlapping
from tesla_med.models.nnunet import Nnunet, NnunetParams, our_name, own_names
from tesla_med.models.nnunet_files import read_folds

pytestmark = pytest.mark.usefixtures("one_thread")


def patches(network, count=2, channels=1):
    return torch.randn(count, channels, *network.patch, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dimensions", [2, 3])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("norm", ["InstanceNorm", "BatchNorm"])
def test_a_folder_becomes_its_network(tmp_path, dimensions, residual, norm):
    folder = make_folder(tmp_path, dimensions, residual=residual, norm=norm)
    loaded = load(folder)
    network = loaded.model
    assert network.patch == ((16, 16) if dimensions == 2 else (8, 16, 16))
    assert network.mirror == tuple(range(dimensions))
    assert (network.state_dict().keys()) == {
        f"folds.0.{name}" for name in own_names(read_folds(folder)[0].weights)
    }
    with torch.no_grad():
        found = network.eval()(patches(network))
    assert found.shape == (2, 3, *network.patch)
    assert torch.isfinite(found).all()


def test_a_trainer_with_batch_norm_is_told_by_its_running_statistics(tmp_path):
    folder = make_folder(tmp_path, by_trainer=True)
    assert pipeline_of(folder).model.params["norm"] == "InstanceNorm"
    loaded = load(folder)
    assert loaded.pipeline.model.params["norm"] == "BatchNorm"
    assert any(isinstance(layer, torch.nn.BatchNorm3d) for layer in loaded.model.modules())
    assert not any(isinstance(layer, torch.nn.InstanceNorm3d) for layer in loaded.model.modules())
    mean = next(v for k, v in read_folds(folder)[0].weights.items() if k.endswith("running_mean"))
    assert torch.equal(next(iter(loaded.model.buffers())), mean)
    assert mean.abs().max() > 0


def test_an_ensemble_is_the_mean_of_the_logits(tmp_path):
    whole = load(make_folder(tmp_path, folds=3)).model.eval()
    folder = next(tmp_path.iterdir())
    single = [load(folder / f"fold_{index}").model.eval() for index in range(3)]
    images = patches(whole)
    with torch.no_grad():
        mean = sum(network(images) for network in single) / 3
        assert torch.allclose(whole(images), mean, atol=1e-5)
        assert torch.allclose(whole.whole(images), sum(net.whole(images) for net in single) / 3, atol=1e-5)
        assert not torch.allclose(single[0](images), mean, atol=1e-2)


def test_an_ensemble_of_regions_is_averaged_before_it_becomes_classes(tmp_path):
    network = load(make_folder(tmp_path, 2, regions=True, folds=2)).model.eval()
    images = patches(network)
    with torch.no_grad():
        mean = sum(fold(images) for fold in network.folds) / 2
        assert torch.allclose(overlapping(network.logits(images)), mean, atol=1e-4)


def test_images_of_any_size(tmp_path):
    network = load(make_folder(tmp_path)).model.eval()
    with torch.no_grad():
        for shape in ((3, 5, 7), (8, 16, 16), (9, 20, 31)):
            images = torch.randn(1, 1, *shape)
            assert network(images).shape == (1, 3, *shape)
            assert network.whole(images).shape == (1, 3, *shape)


def test_a_whole_image_of_one_patch_without_mirroring_is_one_pass(tmp_path):
    network = load(make_folder(tmp_path, mirror=None)).model.eval()
    images = patches(network)
    assert network.mirror == ()
    with torch.no_grad():
        assert torch.equal(network.whole(images), network(images))


def test_outputs_of_deep_supervision_do_not_learn(tmp_path):
    network = load(make_folder(tmp_path)).model
    heads = network.folds[0].decoder.seg_layers
    assert all(item.requires_grad for item in heads[-1].parameters())
    params = NnunetParams.model_validate(
        {
            "features": [2, 3, 4],
            "kernels": [[3, 3]] * 3,
            "strides": [[1, 1], [2, 2], [2, 2]],
            "blocks": [1, 1, 1],
            "decoder_blocks": [1, 1],
        }
    )
    deep = Nnunet(params, 1, 2).folds[0].decoder.seg_layers
    assert [item.requires_grad for layer in deep for item in layer.parameters()] == [False] * 2 + [True] * 2


@pytest.mark.parametrize("dropout", [False, True])
def test_every_name_of_a_weight_means_ours(tmp_path, dropout):
    from nnunet_folder import their_names

    network = load(make_folder(tmp_path, residual=True)).model.folds[0]
    own = network.state_dict()
    theirs = their_names(own, dropout)
    assert len(theirs) > 2 * len(own)
    for name, value in theirs.items():
        assert own[our_name(name, value, own)] is own[name] if name in own else True
        assert torch.equal(own[our_name(name, value, own)], value)
    with pytest.raises(KeyError, match=r"no\.such"):
        our_name("no.such", torch.zeros(1), own)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks": [1]}, "features of 2 stages"),
        ({"kernels": [[3, 3, 3], [3, 3]]}, "two or three axes"),
        ({"kernels": [[3, 3], [2, 3]]}, "must be odd"),
        ({"mirror": [2]}, "names an axis"),
        ({"patch": [8, 8, 8]}, "two or three axes"),
        ({"activation": "Hardswish"}, "activation"),
    ],
)
def test_parameters_that_fit_no_network(change, words):
    given = Nnunet.example | change
    with pytest.raises(ValueError, match=words):
        NnunetParams.model_validate(given)


def test_an_option_that_a_layer_does_not_know():
    params = NnunetParams.model_validate(Nnunet.example | {"norm_options": {"no_such": 1}})
    with pytest.raises(ConfigError, match="no_such"):
        Nnunet.build(params, 1, 2)


# ------------------------------------------------------------ from a folder to masks


def predict(folder, images, out):
    from tesla_med.actions.predict import predict as predict_masks

    return predict_masks(images, folder, out=out, device="cpu")


def test_masks_are_the_argmax_of_the_tiled_logits(tmp_path):
    """Here the grid is the model's own, so that nothing is resampled."""
    import nibabel

    folder = make_folder(tmp_path / "model", 3)
    image = balls()
    write_image(tmp_path / "images" / "case_0000.nii.gz", image)
    predict(folder, tmp_path / "images", tmp_path / "out")
    mask = np.asanyarray(nibabel.load(next((tmp_path / "out" / "masks").glob("*.nii.gz"))).dataobj)
    scaled = ((image - image.mean()) / image.std()).transpose(2, 1, 0)
    network = load(folder).model.eval()
    with torch.no_grad():
        logits = network.whole(torch.from_numpy(scaled.copy())[None, None])
    expected = logits[0].argmax(0).numpy().transpose(2, 1, 0)
    assert len(np.unique(expected)) > 1
    assert (mask == expected).mean() > 0.999  # float32 rounding decides ties


def test_channels_are_files_named_as_nnunet_does(tmp_path):
    folder = make_folder(tmp_path / "model", 2, channels=2)
    for index in range(2):
        write_image(tmp_path / f"images/a_{index:04d}.nii.gz", balls((12, 10, 3), seed=index))
    result = predict(folder, tmp_path / "images", tmp_path / "out")
    assert [item.case for item in result.results] == ["a_0000"]
    assert result.failed == ()
    (tmp_path / "images/a_0001.nii.gz").unlink()
    result = predict(folder, tmp_path / "images", tmp_path / "again")
    assert len(result.failed) == 1
    assert "channel 2 has no file" in result.failed[0].reason
    assert "_0001" in result.failed[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nnunet_3d_instancenorm", "nnunet_2d_batchnorm_regions_2folds"])
def test_masks_are_those_of_nnunet(shared, tmp_path, name):
    import nibabel

    source = shared / "foreign" / name
    if not source.is_dir():
        pytest.skip(f"needs the nnU-Net folder {name} of the development data")
    folder = next(source.glob("nnUNetTrainer__*"))
    predict(folder, source / "images", tmp_path / "out")
    for path in sorted((source / "pred").glob("*.nii.gz")):
        theirs = nibabel.load(path)
        (ours,) = (tmp_path / "out" / "masks").glob(f"{path.name.removesuffix('.nii.gz')}*.nii.gz")
        mask = nibabel.load(ours)
        first, second = (np.asanyarray(item.dataobj) for item in (theirs, mask))
        assert np.allclose(theirs.affine, mask.affine, atol=1e-4)
        assert (first > 0).any()
        assert (first == second).mean() >= 0.9999
        for value in np.unique(first):
            overlap = 2 * ((first == value) & (second == value)).sum()
            assert overlap / ((first == value).sum() + (second == value).sum()) >= 0.999


@pytest.mark.slow
@pytest.mark.parametrize(("dimensions", "regions"), [(2, True), (3, False)])
def test_from_a_folder_to_adapted_masks_and_back(tmp_path, dimensions, regions):
    import nibabel

    from tesla_med.adapt import adapt_site

    folder = make_folder(tmp_path / "model", dimensions, regions=regions, norm="BatchNorm", folds=2)
    for name in ("a", "b"):
        write_image(tmp_path / f"images/{name}_0000.nii.gz", balls((18, 16, 10), seed=ord(name)))
    few = ["protocols.N-O.tesla.updates_per_case=2", "methods.tesla.weak_views=2", "guard.enabled=false"]
    result = adapt_site(
        None, tmp_path / "images", weights=folder, out=tmp_path / "run", device="cpu", overrides=few
    )
    assert result.failed == ()
    assert result.diverged == 0
    adapted = tmp_path / "run" / "checkpoints" / "a_0000.safetensors"
    again = predict(adapted, tmp_path / "images", tmp_path / "again")
    assert again.failed == ()

    def mask(run, case):
        return np.asanyarray(nibabel.load(tmp_path / run / f"masks/{case}_mask.nii.gz").dataobj)

    assert mask("run", "a_0000").shape == (18, 16, 10)
    assert (mask("run", "a_0000") == mask("again", "a_0000")).mean() > 0.98


def test_the_licence_of_a_folder_is_repeated_in_run_json_and_report(tmp_path):
    def change(_, dataset):
        dataset.update(licence="CC BY-NC 4.0", reference="Somebody et al., 2024")

    folder = make_folder(tmp_path, 2, change=change)
    (folder / "LICENSE").write_text("\nFor research only\nmore\n", encoding="utf-8")
    said = [
        "licence of the model: CC BY-NC 4.0",
        "reference of the model: Somebody et al., 2024",
        "licence of the model (LICENSE of its folder): For research only",
    ]
    assert list(load(folder).notes) == said
    write_image(tmp_path / "images" / "a_0000.nii.gz", balls())
    out = tmp_path / "run"
    adapt_site(None, tmp_path / "images", weights=folder, method="source", out=out, device="cpu")
    assert set(said) <= set(json.loads((out / "run.json").read_text(encoding="utf-8"))["notes"])
    page = (out / "report" / "report.html").read_text(encoding="utf-8")
    assert all(text in page for text in said)


def test_the_path_of_a_checkpoint_or_a_fold_means_that_fold(tmp_path):
    folder = make_folder(tmp_path, folds=2)
    fold = folder / "fold_1"
    assert len(load(folder).model.folds) == 2
    for path in (fold, fold / "checkpoint_final.pth"):
        network = load(path).model
        assert len(network.folds) == 1
        own = read_folds(folder)[1].weights
        assert torch.equal(
            network.state_dict()["folds.0.encoder.stages.0.0.convs.0.conv.weight"],
            own["encoder.stages.0.0.convs.0.conv.weight"],
        )


def test_the_hash_of_weights_is_that_of_every_file(tmp_path):
    from tesla_med.models.loading import weights_sha256

    folder = make_folder(tmp_path, 2, folds=2)
    before = weights_sha256(folder)
    assert before == weights_sha256(Path(str(folder)))
    other = folder / "fold_1" / "checkpoint_final.pth"
    content = other.read_bytes()
    other.write_bytes(content + b"x")
    assert weights_sha256(folder) != before
    other.write_bytes(content)
    assert weights_sha256(folder) == before


def test_folds_of_other_trainings_are_refused(tmp_path):
    folder = make_folder(tmp_path / "a", 2, folds=2)
    other = make_folder(tmp_path / "b", 2, by_trainer=True)
    (other / "fold_0" / "checkpoint_final.pth").replace(folder / "fold_1" / "checkpoint_final.pth")
    with pytest.raises(CheckpointError, match=r"fold_1.*not a fold of the training of .*fold_0"):
        load(folder)
