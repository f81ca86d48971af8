"""Which parts of a MONAI bundle are taken: those that its workflow runs, as it runs them."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest
from bundles import (
    READ,
    SIGMOID,
    SIGMOID_STEPS,
    STEPS,
    agreement,
    config,
    load,
    make_bundle,
    make_image,
    mask,
    metadata,
    of_monai,
)

from tesla_med.actions.predict import predict
from tesla_med.config.bundle_config import BundleConfig
from tesla_med.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ("reports=[]",)
EVALUATOR = {"_target_": "SupervisedEvaluator", "network": "@network", "inferer": "@inferer"}
CODE = "$lambda x: x"


def steps(bundle):
    return [(step.name, step.arguments) for step in load(bundle).pipeline.preprocessing.bundle.steps]


def composed(*steps, **given):
    return {"_target_": "Compose", "transforms": list(steps)} | given


# ------------------------------------------------------------ what the evaluator refers to


@pytest.mark.parametrize("inline", [False, True])
def test_what_the_evaluator_runs_comes_before_the_usual_keys(tmp_path, inline):
    window = config()["inferer"] | {"roi_size": [8, 8, 8]}
    parts = {"inferer": window, "postprocessing": SIGMOID}
    refers = parts if inline else {key: f"@my_{key}" for key in parts}
    content = config(evaluator=EVALUATOR | refers, **{f"my_{key}": value for key, value in parts.items()})
    loaded = load(make_bundle(tmp_path / "b", content, metadata(3, ["whole", "core", "rim"])))
    assert loaded.model.patch == (8, 8, 8)
    assert loaded.pipeline.model.params["regions"] is True


@pytest.mark.parametrize(
    "change",
    [
        {"dataset": {"_target_": "Dataset", "transform": "@other"}},
        {"evaluator": EVALUATOR | {"val_data_loader": "@loader"}, "loader": {"dataset": "@data"}},
        {"dataloader": {"dataset": {"transform": composed(*READ, STEPS[0])}}},
    ],
)
def test_the_transform_of_the_dataset_comes_before_the_usual_key(tmp_path, change):
    other = {"other": composed(*READ, STEPS[0]), "data": {"transform": "@other"}}
    bundle = make_bundle(tmp_path / "b", config(**other, **change))
    assert steps(bundle) == [("Orientationd", {"axcodes": "RAS"})]


def test_the_network_that_runs_is_built_not_another_that_is_defined(tmp_path):
    usual = config()["network_def"]
    content = config(network_def=usual | {"act": "RELU"}, network=usual | {"act": "ELU"})
    bundle, image = make_bundle(tmp_path / "b", content), make_image(tmp_path / "i" / "c.nii.gz")
    predict(image, bundle, out=tmp_path / "out", overrides=QUICK)
    file = bundle / "configs" / "inference.json"
    file.write_text(json.dumps(content | {"network_def": content["network"]}))
    assert agreement(mask(tmp_path / "out"), of_monai(bundle, image)[0]) == (1.0, 1.0)


def test_the_only_evaluator_counts_whatever_it_is_called(tmp_path):
    mine = EVALUATOR | {"_target_": "monai.engines.SupervisedEvaluator", "inferer": "@mine"}
    content = config(validator=mine, mine=config()["inferer"] | {"roi_size": [8, 8, 8]})
    assert load(make_bundle(tmp_path / "b", content)).model.patch == (8, 8, 8)
    two = make_bundle(tmp_path / "two", content | {"other": EVALUATOR})
    assert load(two).model.patch == (16, 16, 8)
    assert any("several evaluators" in note for note in load(two).notes)


@pytest.mark.parametrize(
    ("evaluator", "words"),
    [
        ({"_target_": "EnsembleEvaluator", "inferer": "@inferer"}, "predicts with EnsembleEvaluator"),
        (EVALUATOR | {"iteration_update": "$scripts.update"}, "iteration_update of the bundle"),
        (EVALUATOR | {"inferer": None}, "names no inferer"),
    ],
)
def test_other_evaluators_are_said(tmp_path, evaluator, words):
    bundle = make_bundle(tmp_path / "b", config(evaluator=evaluator))
    assert any(words in note for note in load(bundle).notes)
    assert not any("evaluator" in note for note in load(make_bundle(tmp_path / "plain")).notes)


# ------------------------------------------------------------ reading


@pytest.mark.parametrize("trust", [False, True])
def test_a_reader_that_turns_images_turns_them(tmp_path, trust):
    generator = np.random.default_rng(0)
    array = (200 * generator.random((24, 24, 16))).astype(np.float32)
    array[:12] *= 0.3
    (tmp_path / "i").mkdir()
    image = tmp_path / "i" / "c.nii.gz"
    nib.save(nib.Nifti1Image(array, np.diag([-1.0, 1, 1, 1])), image)
    loader = READ[0] | {"reader": "NibabelReader", "as_closest_canonical": True}
    own = [{"_target_": "Lambdad", "keys": "image", "func": CODE}] if trust else []
    content = config(preprocessing=composed(loader, READ[1], STEPS[2], *own))
    bundle = make_bundle(tmp_path / "b", content)
    predict(image, bundle, out=tmp_path / "out", overrides=QUICK, trust_code=trust)
    theirs = of_monai(bundle, image)[0][::-1]  # on the grid that the reader makes
    assert agreement(mask(tmp_path / "out"), theirs) == (1.0, 1.0)
    assert len(np.unique(theirs)) > 1


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"reader": "ITKReader", "affine_lps_to_ras": False}, "affine_lps_to_ras"),
        ({"reader": "$scripts.Reader"}, "reader"),
        ({"reader": "PILReader"}, "reader"),
        ({"reader": {"_target_": "ITKReader", "reverse_indexing": True}}, "reverse_indexing"),
        ({"dtype": "$np.uint8"}, "dtype"),
        ({"channel_dim": 0}, "channel_dim"),
        ({"something": 1}, "something"),
    ],
)
def test_what_changes_how_images_are_read_is_refused(tmp_path, given, key):
    bundle = make_bundle(tmp_path / "b", config(preprocessing=composed(READ[0] | given, READ[1], *STEPS)))
    with pytest.raises(CheckpointError, match=rf"transforms::0::.*{key}"):
        load(bundle)


@pytest.mark.parametrize(
    "given",
    [
        {"reader": "ITKReader", "affine_lps_to_ras": True},
        {"reader": {"_target_": "monai.data.NibabelReader"}, "dtype": "$torch.float32"},
        {"image_only": False, "ensure_channel_first": True, "meta_keys": ["a"]},
    ],
)
def test_what_changes_nothing_is_left_out(tmp_path, given):
    bundle = make_bundle(tmp_path / "b", config(preprocessing=composed(READ[0] | given, READ[1], STEPS[0])))
    assert [name for name, _ in steps(bundle)] == ["Orientationd"]


def test_code_that_reads_otherwise_is_refused_by_name(tmp_path):
    own = {"_target_": "Lambdad", "keys": "image", "func": CODE}
    content = config(preprocessing=composed(READ[0] | {"dtype": "$np.uint8"}, READ[1], *STEPS, own))
    bundle, image = make_bundle(tmp_path / "b", content), make_image(tmp_path / "i" / "c.nii.gz")
    result = predict(image, bundle, out=tmp_path / "out", overrides=QUICK, trust_code=True)
    assert "uint8" in result.results[0].reason


# ------------------------------------------------------------ steps


def test_steps_of_other_keys_do_nothing_to_the_image(tmp_path):
    scale = {"_target_": "ScaleIntensityd", "keys": "prior"}
    bundle = make_bundle(tmp_path / "b", config(preprocessing=composed(*READ, scale, STEPS[0])))
    assert [name for name, _ in steps(bundle)] == ["Orientationd"]
    other = json.loads(json.dumps(config()["preprocessing"]).replace('"image"', '"scan"'))
    assert len(steps(make_bundle(tmp_path / "o", config(preprocessing=other)))) == 5
    two = composed({"_target_": "LoadImaged", "keys": ["t1", "t2"]}, STEPS[0])
    with pytest.raises(CheckpointError, match="expected the image"):
        load(make_bundle(tmp_path / "t", config(preprocessing=two)))


def test_a_foreground_of_another_key_is_refused(tmp_path):
    crop = STEPS[3] | {"source_key": "prior"}
    with pytest.raises(CheckpointError, match=r"transforms::2::source_key is 'prior'"):
        load(make_bundle(tmp_path / "b", config(preprocessing=composed(*READ, crop))))


@pytest.mark.parametrize(
    ("preprocessing", "words"),
    [
        (composed(*READ, *STEPS, _disabled_=True), "switched off"),
        (composed(*READ, *STEPS, _target_="scripts.Compose"), "not a class of MONAI"),
    ],
)
def test_only_a_compose_of_monai_that_runs_is_one(tmp_path, preprocessing, words):
    with pytest.raises(CheckpointError, match=words):
        load(make_bundle(tmp_path / "b", config(preprocessing=preprocessing)))


def test_a_compose_in_another_is_read(tmp_path):
    inner = [composed(*READ), composed(STEPS[0], composed(STEPS[1])), composed(STEPS[2], _disabled_=True)]
    bundle = make_bundle(
        tmp_path / "b",
        config(preprocessing=composed(*inner), postprocessing=composed(composed(*SIGMOID_STEPS))),
        metadata(3, ["whole", "core", "rim"]),
    )
    assert [name for name, _ in steps(bundle)] == ["Orientationd", "Spacingd"]
    assert load(bundle).pipeline.model.params["regions"] is True
    loop = composed(*READ)
    loop["transforms"].append("@preprocessing")
    with pytest.raises(CheckpointError, match=r"inference\.json"):
        load(make_bundle(tmp_path / "loop", config(preprocessing=loop)))


@pytest.mark.parametrize(
    "change",
    [
        {"cfg": {"on": "@on"}, "pixdim": "$[1, 1, 1] if @cfg['on'] else [2, 2, 2]"},
        {"cfg": [["@on"]], "pixdim": "$[1, 1, 1] if @cfg[0][0] else [2, 2, 2]"},
        {"cfg": {"on": ["@on"]}, "pixdim": "$[1, 1, 1] if @cfg['on'] == [False] else [2, 2, 2]"},
        {"cfg": {"on": "@on"}, "pixdim": "$[1, 1, 1] if @cfg == @cfg else [2, 2, 2]"},
    ],
)
def test_what_a_mapping_refers_to_is_not_taken_for_text(tmp_path, change):
    with pytest.raises(CheckpointError, match="pixdim"):
        load(make_bundle(tmp_path / "b", config(on=False, **change)))
    assert (
        BundleConfig(make_bundle(tmp_path / "c", config(a={"b": 2}, c="$@a['b'] + 1"))).plain("@c", "c") == 3
    )


@pytest.mark.parametrize("size", [-1, None])
def test_windows_along_a_whole_axis_take_sizes_that_the_network_does_not_divide(tmp_path, size):
    content = config(inferer={"_target_": "SlidingWindowInferer", "roi_size": [16, 16, size]})
    bundle, image = make_bundle(tmp_path / "b", content), make_image(tmp_path / "i" / "c.nii.gz")
    predict(image, bundle, out=tmp_path / "out", overrides=QUICK)
    assert len(np.unique(mask(tmp_path / "out"))) > 1
    with pytest.raises(CheckpointError, match="whole numbers"):
        load(
            make_bundle(tmp_path / "f", config(inferer=content["inferer"] | {"roi_size": "$[32 / 2, 16, 8]"}))
        )
