"""Tiny nnU-Net v2 model folders for tests: our own network under the names of nnU-Net."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import numpy as np

NAME = "nnUNetTrainer__nnUNetPlans__"


def config_of(dimensions=3, *, norm="InstanceNorm", residual=False, patch=None, spacing=(2.0, 1.0, 1.0)):
    """Return one configuration of plans.json."""
    spline = {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None}
    strides = [[1, 1, 1], [2, 2, 2]]
    layers = "n_blocks_per_stage" if residual else "n_conv_per_stage"
    kind = "ResidualEncoderUNet" if residual else "PlainConvUNet"
    return {
        "preprocessor_name": "DefaultPreprocessor",
        "patch_size": patch or ([16, 16] if dimensions == 2 else [8, 16, 16]),
        "spacing": list(spacing[-dimensions:]),
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": spline,
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": spline | {"order": 1},
        "architecture": {
            "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
            "arch_kwargs": {
                "n_stages": 2,
                "features_per_stage": [4, 6],
                "conv_op": f"torch.nn.modules.conv.Conv{dimensions}d",
                "kernel_sizes": [[3] * dimensions] * 2,
                "strides": [item[-dimensions:] for item in strides],
                layers: [1, 2],
                "n_conv_per_stage_decoder": [1],
                "conv_bias": True,
                "norm_op": f"torch.nn.modules.{norm.lower()}.{norm}{dimensions}d",
                "norm_op_kwargs": {"eps": 1e-05, "affine": True},
                "dropout_op": None,
                "dropout_op_kwargs": None,
                "nonlin": "torch.nn.LeakyReLU",
                "nonlin_kwargs": {"inplace": True},
            },
            "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
        },
    }


def plans_of(dimensions=3, transpose=(0, 1, 2), **more):
    """Return the content of plans.json."""
    seen = {"mean": 1.0, "std": 0.5, "percentile_00_5": 0.0, "percentile_99_5": 2.0}
    return {
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "label_manager": "LabelManager",
        "transpose_forward": list(transpose),
        "transpose_backward": np.argsort(transpose).tolist(),
        "configurations": {configuration(dimensions): config_of(dimensions, **more)},
        "foreground_intensity_properties_per_channel": {str(index): seen for index in range(4)},
    }


def dataset_of(*, regions=False, labels=None, channels=1):
    """Return the content of dataset.json."""
    given = {"background": 0, "whole": [1, 2], "core": 2} if regions else {"background": 0, "a": 1, "b": 2}
    content = {
        "channel_names": {str(index): f"channel {index}" for index in range(channels)},
        "labels": labels or given,
        "file_ending": ".nii.gz",
    }
    return content | ({"regions_class_order": [1, 2]} if regions else {})


def configuration(dimensions):
    """Return the name of the configuration."""
    return "2d" if dimensions == 2 else "3d_fullres"


def their_names(state, dropout=False):
    """Return a fold's state dict with every tensor under all the names that nnU-Net has for it."""
    found = {}
    for name, value in state.items():
        found[name] = value
        block, _, leaf = name.rpartition(".")
        block, _, layer = block.rpartition(".")
        if layer in ("conv", "norm"):
            number = 0 if layer == "conv" else 1 + dropout
            found[f"{block}.all_modules.{number}.{leaf}"] = value
    encoder = {name: value for name, value in found.items() if name.startswith("encoder.")}
    return found | {f"decoder.{name}": value for name, value in encoder.items()}


def write_plans(folder, plans, dataset):
    """Write plans.json and dataset.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plans.json").write_text(json.dumps(plans), encoding="utf-8")
    (folder / "dataset.json").write_text(json.dumps(dataset), encoding="utf-8")


def make_folder(
    parent: Path,
    dimensions=3,
    *,
    regions=False,
    folds=1,
    channels=1,
    mirror="all",
    by_trainer=False,
    checkpoint="checkpoint_final.pth",
    change=None,
    seed=0,
    **more,
):
    """Write a model folder and return it.

    Args:
        parent: where it is made.
        dimensions: 2 or 3.
        regions: overlapping regions in place of labels.
        folds: number of folds.
        channels: of the images.
        mirror: axes of the checkpoint, or all of them.
        by_trainer: weights of batch norm, of which the plans say nothing.
        checkpoint: name of the checkpoints.
        change: changes (plans, dataset) in place before they are written.
        seed: of the weights.
        more: arguments of :func:`plans_of`.
    """
    import torch

    from tesla_med.config.nnunet import read_model
    from tesla_med.models.nnunet import Nnunet, NnunetParams

    plans, dataset = plans_of(dimensions, **more), dataset_of(regions=regions, channels=channels)
    config = plans["configurations"][configuration(dimensions)]
    config["normalization_schemes"] *= channels
    config["use_mask_for_norm"] *= channels
    plain = deepcopy((plans, dataset))
    if change is not None:
        change(plans, dataset)
    folder = parent / (NAME + configuration(dimensions))
    write_plans(folder, *plain)
    content = read_model(folder)  # of plans that say all
    write_plans(folder, plans, dataset)
    params = NnunetParams.model_validate(content["model"]["params"])
    if by_trainer:
        params = params.model_copy(update={"norm": "BatchNorm"})
    outputs = len(content["classes"]) - regions
    for index in range(folds):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + index)
            network = Nnunet(params, channels, outputs)
            if params.norm == "BatchNorm":
                with torch.no_grad():
                    for _ in range(3):
                        network.train()(torch.randn(4, channels, *params.patch))
        saved = {
            "network_weights": their_names(network.folds[0].state_dict()),
            "optimizer_state": {},
            "grad_scaler_state": None,
            "logging": {"ema_fg_dice": [np.float64(0.5)], "train_losses": [np.float32(1.5)]},
            "_best_ema": np.float64(0.5),
            "current_epoch": 1,
            "trainer_name": "nnUNetTrainer",
            "init_args": {"configuration": configuration(dimensions), "fold": index},
            "inference_allowed_mirroring_axes": tuple(range(dimensions)) if mirror == "all" else mirror,
        }
        (folder / f"fold_{index}").mkdir()
        torch.save(saved, folder / f"fold_{index}" / checkpoint)
    return folder


def pipeline_of(weights):
    """Return the pipeline of a model folder, as commands resolve it."""
    from tesla_med.config.resolve import resolve

    return resolve(None, None, (), weights)[1]


def load(weights):
    """Return the loaded model of a folder."""
    from tesla_med.models.loading import load_model

    return load_model(weights, pipeline_of(weights))


def volume(array, spacing=(1.0, 1.0, 2.0), affine=None, path="image.nii.gz"):
    """Return a volume of (C, I, J, K) values."""
    from tesla_med.types import Volume

    array = np.asarray(array, np.float32)
    matrix = np.diag([*spacing, 1.0]) if affine is None else np.asarray(affine, float)
    steps = tuple(float(item) for item in np.linalg.norm(matrix[:3, :3], axis=0))
    return Volume(array, matrix, steps, None, Path(path))


def write_image(path, array, spacing=(1.0, 1.0, 2.0)):
    """Write (I, J, K) values as NIfTI."""
    import nibabel

    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(np.asarray(array, np.float32), np.diag([*spacing, 1.0])), path)
    return path


def balls(shape=(20, 18, 10), seed=0):
    """Return a smooth ball in noise, (I, J, K) float32."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, n) for n in shape], indexing="ij"))
    inside = (grid**2).sum(0) < 0.4
    return (inside + 0.2 * rng.standard_normal(shape) + 2).astype(np.float32)
