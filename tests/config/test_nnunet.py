"""What is read from plans.json and dataset.json, and what is refused by its name."""

from __future__ import annotations

import json

import pytest
from nnunet_folder import config_of, dataset_of, make_folder, pipeline_of, plans_of, write_plans
from pydantic import ValidationError

from tesla_med.config.nnunet import (
    ChannelNorm,
    NnunetPreprocessing,
    folds_of,
    nnunet_folder,
    read_model,
)
from tesla_med.errors import CheckpointError
from tesla_med.models.nnunet_files import left_out_folds

NAME = "nnUNetTrainer__nnUNetPlans__3d_fullres"


def read(tmp_path, plans=None, dataset=None, name=NAME):
    folder = tmp_path / name
    write_plans(folder, plans or plans_of(), dataset or dataset_of())
    return read_model(folder)


def changed(**more):
    """Return plans whose configuration is changed; None takes a key out."""
    plans = plans_of()
    config = plans["configurations"]["3d_fullres"]
    for key, value in more.items():
        if value is None:
            config.pop(key)
        else:
            config[key] = value
    return plans


def with_network(**more):
    plans = plans_of()
    plans["configurations"]["3d_fullres"]["architecture"]["arch_kwargs"] |= more
    return plans


def test_what_is_read(tmp_path):
    found = read(tmp_path)
    assert [(item["value"], item["name"]) for item in found["classes"]] == [
        (0, "background"),
        (1, "a"),
        (2, "b"),
    ]
    assert (found["channels"], found["regions"]) == (1, False)
    assert found["model"]["name"] == "nnunet"
    assert found["model"]["params"] == {
        "kind": "PlainConvUNet",
        "features": [4, 6],
        "kernels": [[3, 3, 3]] * 2,
        "strides": [[1, 1, 1], [2, 2, 2]],
        "blocks": [1, 2],
        "decoder_blocks": [1],
        "bias": True,
        "norm": "InstanceNorm",
        "norm_options": {"eps": 1e-05, "affine": True},
        "activation": "LeakyReLU",
        "activation_options": {"inplace": True},
        "activation_first": False,
        "stem": None,
        "regions": False,
        "patch": [8, 16, 16],
        "mirror": [],
    }
    preprocessing = found["preprocessing"]
    assert preprocessing["model_range"] == (-3.0, 5.0)
    assert preprocessing["nnunet"] == {
        "reorient": False,
        "transpose": [0, 1, 2],
        "spacing": [2.0, 1.0, 1.0],
        "channels": [{"scheme": "zscore", "masked": False}],
        "images": {"order": 3, "order_z": 0, "separate_z": None},
        "logits": {"order": 1, "order_z": 0, "separate_z": None},
    }


def test_lists_may_be_one_number(tmp_path):
    network = {"n_conv_per_stage": 2, "n_conv_per_stage_decoder": 3, "features_per_stage": 4}
    params = read(tmp_path, with_network(**network))["model"]["params"]
    assert (params["blocks"], params["decoder_blocks"], params["features"]) == ([2, 2], [3], [4, 4])


def test_configurations_inherit(tmp_path):
    plans = plans_of()
    plans["configurations"]["3d_small"] = {"inherits_from": "3d_fullres", "patch_size": [4, 8, 8]}
    found = read(tmp_path, plans, name="nnUNetTrainer__nnUNetPlans__3d_small")
    assert found["model"]["params"]["patch"] == [4, 8, 8]
    assert found["preprocessing"]["nnunet"]["spacing"] == [2.0, 1.0, 1.0]


def test_plans_without_an_architecture(tmp_path):
    old = {
        "architecture": None,
        "UNet_class_name": "PlainConvUNet",
        "UNet_base_num_features": 8,
        "unet_max_num_features": 20,
        "n_conv_per_stage_encoder": [2, 2, 2],
        "n_conv_per_stage_decoder": [2, 2],
        "pool_op_kernel_sizes": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
        "conv_kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]],
    }
    params = read(tmp_path, changed(**old))["model"]["params"]
    assert params["features"] == [8, 16, 20]
    assert params["strides"] == old["pool_op_kernel_sizes"]
    assert params["kernels"] == old["conv_kernel_sizes"]
    assert (params["bias"], params["norm"], params["activation"]) == (True, "InstanceNorm", "LeakyReLU")
    with pytest.raises(CheckpointError, match="'OtherUNet' is not supported; known: PlainConvUNet"):
        read(tmp_path, changed(**(old | {"UNet_class_name": "OtherUNet"})))


def test_regions_are_in_the_order_of_painting(tmp_path):
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "rim": 3, "ignore": 4}
    dataset = dataset_of(labels=labels) | {"regions_class_order": [1, 3, 2]}
    found = read(tmp_path, dataset=dataset)
    assert [(item["value"], item["name"]) for item in found["classes"]] == [
        (0, "background"),
        (1, "whole"),
        (3, "core"),
        (2, "rim"),
    ]
    assert found["regions"]
    assert found["model"]["params"]["regions"]


def test_classes_are_in_the_order_of_their_values(tmp_path):
    found = read(tmp_path, dataset=dataset_of(labels={"b": 2, "background": 0, "a": [1], "ignore": 3}))
    assert [item["name"] for item in found["classes"]] == ["background", "a", "b"]
    assert not found["regions"]


def test_every_normalisation(tmp_path):
    names = ["ZScoreNormalization", "CTNormalization", "NoNormalization", "RescaleTo01Normalization"]
    names.append("RGBTo01Normalization")
    plans = changed(normalization_schemes=names, use_mask_for_norm=[True, False, False, False, False])
    found = read(tmp_path, plans, dataset_of(channels=5))
    norms = found["preprocessing"]["nnunet"]["channels"]
    assert [item["scheme"] for item in norms] == ["zscore", "ct", "none", "rescale", "rgb"]
    assert norms[0]["masked"]
    assert norms[1] == {"scheme": "ct", "masked": False, "mean": 1.0, "std": 0.5, "lower": 0.0, "upper": 2.0}


def test_images_of_0_to_1_keep_that_range(tmp_path):
    plans = changed(normalization_schemes=["RescaleTo01Normalization"])
    assert read(tmp_path, plans)["preprocessing"]["model_range"] == (0.0, 1.0)


def test_intensities_by_their_older_name(tmp_path):
    plans = changed(normalization_schemes=["CTNormalization"])
    plans["foreground_intensity_properties_by_modality"] = plans.pop(
        "foreground_intensity_properties_per_channel"
    )
    assert read(tmp_path, plans)["preprocessing"]["nnunet"]["channels"][0]["mean"] == 1.0


def test_what_resampling_leaves_out_is_what_nnunet_takes(tmp_path):
    found = read(tmp_path, changed(resampling_fn_data_kwargs={"order": 1}))["preprocessing"]["nnunet"]
    assert found["images"] == {"order": 1, "order_z": 0, "separate_z": False}
    found = read(tmp_path, changed(resampling_fn_probabilities_kwargs={"force_separate_z": True}))
    assert found["preprocessing"]["nnunet"]["logits"] == {"order": 3, "order_z": 0, "separate_z": True}


@pytest.mark.parametrize(("reader", "turned"), [("NibabelIO", False), ("NibabelIOWithReorient", True)])
def test_readers(tmp_path, reader, turned):
    found = read(tmp_path, plans_of() | {"image_reader_writer": reader})
    assert found["preprocessing"]["nnunet"]["reorient"] is turned


REFUSED = {
    "the second stage of a cascade": (changed(previous_stage="3d_lowres"), None, "use 3d_fullres or 2d"),
    "an unknown network": (
        changed(architecture={"network_class_name": "my.lab.SwinUNETR", "arch_kwargs": {}}),
        None,
        r"'my\.lab\.SwinUNETR' is not supported; known: PlainConvUNet, ResidualEncoderUNet",
    ),
    "a known network from elsewhere": (
        changed(architecture={"network_class_name": "my.lab.PlainConvUNet", "arch_kwargs": {}}),
        None,
        "is not supported",
    ),
    "an unknown layer": (
        with_network(nonlin="torch.nn.Hardswish"),
        None,
        r"layer 'torch\.nn\.Hardswish' is not supported; known: LeakyReLU",
    ),
    "a norm of other axes": (
        with_network(norm_op="torch.nn.modules.instancenorm.InstanceNorm2d"),
        None,
        "InstanceNorm2d' is not supported; known: InstanceNorm, BatchNorm",
    ),
    "a convolution of other axes": (with_network(conv_op="torch.nn.modules.conv.Conv2d"), None, "conv_op"),
    "an unknown argument": (with_network(squeeze_excitation=True), None, "not supported: squeeze_excitation"),
    "an unknown normalisation": (
        changed(normalization_schemes=["MyNorm"]),
        None,
        "'MyNorm' of channel 0 is not supported; known: ZScoreNormalization",
    ),
    "other resampling": (
        changed(resampling_fn_data="resample_torch_simple"),
        None,
        "'resample_torch_simple' is not supported, only resample_data_or_seg_to_shape",
    ),
    "resampling as of labels": (
        changed(resampling_fn_data_kwargs={"is_seg": True}),
        None,
        "resampling_fn_data_kwargs",
    ),
    "another threshold": (
        changed(resampling_fn_probabilities_kwargs={"separate_z_anisotropy_threshold": 2}),
        None,
        "resampling_fn_probabilities_kwargs",
    ),
    "an unknown key of resampling": (changed(resampling_fn_data_kwargs={"fast": 1}), None, r"\['fast'\]"),
    "another preprocessor": (
        changed(preprocessor_name="MyPreprocessor"),
        None,
        "'MyPreprocessor' is not supported",
    ),
    "another reader": (
        plans_of() | {"image_reader_writer": "Tiff3DIO"},
        None,
        "'Tiff3DIO' are not supported; known: SimpleITKIO",
    ),
    "another label manager": (plans_of() | {"label_manager": "Mine"}, None, "label manager 'Mine'"),
    "missing channels": (plans_of(), dataset_of(channels=2), "2 channels, but 1 normalisations"),
    "no background": (plans_of(), dataset_of(labels={"a": 1}), "no label 'background'"),
    "labels with a gap": (
        plans_of(),
        dataset_of(labels={"background": 0, "a": 1, "b": 3}),
        r"\[1, 3\] are not 1 to 2",
    ),
    "too few regions": (
        plans_of(),
        dataset_of(regions=True) | {"regions_class_order": [1]},
        r"2 regions and regions_class_order \[1\]",
    ),
    "no order of regions": (
        plans_of(),
        dataset_of(labels={"background": 0, "a": [1, 2]}),
        "regions_class_order None",
    ),
    "one axis": (changed(patch_size=[8]), None, "expected two or three axes"),
    "no spacing": (changed(spacing=None), None, "no 'spacing'"),
    "no channel names": (plans_of(), {"labels": {"background": 0, "a": 1}}, "no 'modality'"),
    "labels by value": (plans_of(), dataset_of() | {"labels": {"0": "background", "1": "a"}}, "nnU-Net v1"),
    "a number as text": (
        plans_of(),
        dataset_of() | {"labels": {"background": "0", "a": 1}},
        "of the number 0",
    ),
    "labels that are a list": (plans_of(), dataset_of() | {"labels": [0, 1]}, "not as nnU-Net v2 writes it"),
    "configurations that are a list": (
        plans_of() | {"configurations": []},
        None,
        "none of the configurations|not as",
    ),
    "a circle": (
        plans_of()
        | {"configurations": {"3d_fullres": {"inherits_from": "b"}, "b": {"inherits_from": "3d_fullres"}}},
        None,
        "inherit from each other",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(tmp_path, what):
    plans, dataset, words = REFUSED[what]
    with pytest.raises(CheckpointError, match=words) as caught:
        read(tmp_path, plans, dataset)
    assert NAME in str(caught.value)


def test_a_name_without_its_configuration(tmp_path):
    assert read(tmp_path, name="renamed")["model"]["params"]["patch"] == [8, 16, 16]  # there is but one
    plans = plans_of()
    plans["configurations"]["2d"] = config_of(2)
    with pytest.raises(
        CheckpointError, match=r"none of the configurations of its plans: 2d, 3d_fullres.*name it"
    ):
        read(tmp_path, plans, name="renamed")


@pytest.mark.parametrize("name", ["plans.json", "dataset.json"])
@pytest.mark.parametrize("content", ["", "[1, 2]", "{", "\x00"])
def test_files_that_are_no_objects(tmp_path, name, content):
    write_plans(tmp_path, plans_of(), dataset_of())
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        read_model(tmp_path)


def test_which_folder_a_path_means(tmp_path):
    folder = tmp_path / NAME
    write_plans(folder, plans_of(), dataset_of())
    fold = folder / "fold_0"
    for path in (folder, fold, fold / "checkpoint_final.pth"):
        assert nnunet_folder(path) == folder
    (folder / "plans.json").unlink()
    assert nnunet_folder(folder) is None


# ------------------------------------------------------------ folds


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def names_of(folder):
    return [path.relative_to(folder).as_posix() for path in folds_of(folder)]


def test_folds_are_in_the_order_of_their_numbers(tmp_path):
    final = [f"fold_{index}/checkpoint_final.pth" for index in (2, 10, 0)]
    touch(tmp_path, *final, "fold_1/checkpoint_latest.pth")
    assert names_of(tmp_path) == [final[2], final[0], final[1]]


def test_final_checkpoints_go_before_the_best(tmp_path):
    touch(tmp_path, "fold_0/checkpoint_best.pth", "fold_1/checkpoint_best.pth")
    assert names_of(tmp_path) == ["fold_0/checkpoint_best.pth", "fold_1/checkpoint_best.pth"]
    touch(tmp_path, "fold_1/checkpoint_final.pth")
    assert names_of(tmp_path) == ["fold_1/checkpoint_final.pth"]  # fold 0 is still being trained
    left = f"{tmp_path.name}: fold_0 without checkpoint_final.pth; 1 of 2 folds are used"
    assert left_out_folds(tmp_path) == (left,)
    touch(tmp_path, "fold_0/checkpoint_final.pth", "fold_all/checkpoint_final.pth")
    assert left_out_folds(tmp_path) == ()


def test_fold_all_is_no_part_of_an_ensemble(tmp_path):
    touch(tmp_path, "fold_all/checkpoint_final.pth")
    assert names_of(tmp_path) == ["fold_all/checkpoint_final.pth"]
    touch(tmp_path, "fold_3/checkpoint_final.pth")
    assert names_of(tmp_path) == ["fold_3/checkpoint_final.pth"]


def test_no_fold(tmp_path):
    touch(tmp_path, "fold_0/model.onnx", "checkpoint_final.pth")
    with pytest.raises(CheckpointError, match=r"no fold_k/checkpoint_final\.pth.*copy the folds"):
        folds_of(tmp_path)


# ------------------------------------------------------------ as a pipeline


@pytest.mark.parametrize("transpose", [(0, 1, 1), (0, 1, 3), (0, 1)])
def test_a_transposition_holds_every_axis_once(transpose):
    with pytest.raises(ValidationError):
        NnunetPreprocessing(transpose=transpose, spacing=(1, 1), channels=(ChannelNorm(),))


def test_a_folder_makes_a_pipeline(tmp_path):
    pipeline = pipeline_of(make_folder(tmp_path, 2, regions=True))
    assert pipeline.name == "nnunet"
    assert pipeline.regions
    assert [item.name for item in pipeline.classes] == ["background", "whole", "core"]
    assert pipeline.preprocessing.nnunet.dimensions == 2
    json.dumps(pipeline.model_dump(mode="json"))
