"""Predict with nnU-Net's own predictor and with tesla-med, and compare masks and logits.

Example::

    python benchmarks/nnunet_oracle.py --python nnunet-venv/bin/python --out nnunet_oracle.json

Model folders and images are made, and trained for a few steps, in an environment of nnU-Net's own
(``--python``; without it one is made in the work folder, where nnunetv2 is installed): one for each of
``CASES``, which differ in what nnU-Net lets them differ in. There ``nnUNetPredictor`` predicts them: step
0.5, Gaussian weights, mirrored over the axes of the checkpoint, all folds. Then ``tesla-med predict`` does.
A row of the table is one image:

* agreement, Dice: the share of voxels at which the two masks agree, and the smallest Dice of any class;
* Dice, exact: the same against the mask that nnU-Net makes of exact logits;
* input: the largest difference between what the networks see, in units of the normalised image;
* logits: the largest difference between logits on the network's grid, relative to the largest logit;
* half: the same for the logits that nnU-Net itself goes on with.

nnU-Net adds tiles up in half precision, with weights that are nearly 0 there far from the centre of a tile.
Its logits are off by the last column for that, most near the border of an image, and its masks by a few
voxels at which two classes are as likely. Exact logits are added up in double precision: nnU-Net's
preprocessing, network, tiles, Gaussian and mirroring, tile by tile in float32, then nnU-Net's resampling and
painting.

Exit code 1 unless agreement >= 99.99 %, exact Dice >= 0.999 and logits <= 1e-3 for every image.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
LEAST_PERCENT, LEAST_DICE, MOST = 99.99, 0.999, 1e-3
INSTALL = ("nnunetv2==2.8.1",)
QUICK = ("3d", "2d regions folds", "anisotropic")
OBLIQUE = (0.936293, -0.275096, 0.218351, 0.289629, 0.956425, -0.036957, -0.198669, 0.097843, 0.975170)

CASES: dict[str, dict[str, Any]] = {
    "3d": {},
    "2d regions folds": {
        "dimensions": 2,
        "norm": "batch",
        "labels": {"background": 0, "whole": [1, 2], "core": 2, "ignore": 3},
        "regions": [1, 2],
        "transpose": [2, 0, 1],
        "folds": 2,
    },
    "norm by trainer": {"trainer": "nnUNetTrainerBN"},
    "numpy scalars": {"records": True},
    "residual": {"residual": True},
    "anisotropic": {
        "spacing": [4.0, 1.2, 1.1],
        "images": [[[14, 44, 48], [5.0, 1.0, 1.0]], [[12, 50, 40], [6.0, 0.8, 0.9]]],
    },
    "three sizes": {
        "spacing": [1.5, 1.0, 0.9],
        "patch": [16, 24, 40],
        "images": [[[20, 44, 60], [1.7, 1.1, 0.8]], [[24, 30, 70], [1.3, 1.4, 0.7]]],
    },
    "small crop": {"border": [7, 13, 12]},
    "oblique": {
        "direction": OBLIQUE,
        "images": [[[24, 45, 50], [2.1, 0.9, 0.9]], [[23, 43, 47], [1.9, 1.3, 0.8]]],
    },
    "thin axis": {
        "direction": OBLIQUE,
        "spacing": [0.9, 0.9, 0.25],
        "images": [[[40, 44, 60], [0.8, 0.8, 0.22]]] * 2,
    },
    "half a voxel": {
        "direction": OBLIQUE,
        "spacing": [1.8, 0.8, 0.8],
        "images": [[[25, 45, 47], [0.9, 0.4, 1.2]]] * 2,
    },
    "two channels": {
        "channels": ["CT", "MR"],
        "schemes": ["CTNormalization", "ZScoreNormalization"],
        "masked": [False, True],
        "border": [2, 6, 5],
    },
    "rescaled": {"schemes": ["RescaleTo01Normalization"]},
    "old plans": {"old": True},
    "transposed": {
        "transpose": [1, 0, 2],
        "patch": [32, 16, 32],
        "strides": [[1, 1, 1], [2, 1, 2], [2, 2, 2]],
    },
    "five labels": {
        "steps": 150,
        "labels": {"background": 0, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5},
    },
    "nibabel": {"reader": "NibabelIO", "direction": OBLIQUE},
    "reoriented": {"reader": "NibabelIOWithReorient", "direction": (0, 0, -1, 1, 0, 0, 0, -1, 0)},
}
"""What makes each case another than the first; sizes are z, y, x, those of the model transposed."""
GIVEN: dict[str, Any] = {
    "dimensions": 3,
    "norm": "instance",
    "labels": {"background": 0, "shell": 1, "core": 2},
    "regions": None,
    "transpose": [0, 1, 2],
    "folds": 1,
    "trainer": "nnUNetTrainer",
    "records": False,
    "residual": False,
    "old": False,
    "spacing": None,
    "patch": None,
    "strides": None,
    "images": [[[24, 48, 48], [2.0, 1.0, 1.0]], [[20, 56, 50], [2.4, 0.8, 0.9]]],
    "border": None,
    "direction": (1, 0, 0, 0, 1, 0, 0, 0, 1),
    "channels": ["T2"],
    "schemes": ["ZScoreNormalization"],
    "masked": [False],
    "reader": "SimpleITKIO",
    "steps": 60,
}


# ------------------------------------------------------------ in nnU-Net's environment


def plans_of(case: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the configuration's name, plans.json and dataset.json of a case."""
    axes = case["dimensions"]
    name = "2d" if axes == 2 else "3d_fullres"
    order = case["transpose"]
    spacing = case["spacing"] or [[2.0, 1.0, 1.0][axis] for axis in order]
    strides = case["strides"] or [[1, 1, 1], [1, 2, 2], [2, 2, 2]]
    strides = [item[-axes:] for item in strides]
    kinds = {"instance": "instancenorm.InstanceNorm", "batch": "batchnorm.BatchNorm"}
    layers = "n_blocks_per_stage" if case["residual"] else "n_conv_per_stage"
    arguments = {
        "n_stages": 3,
        "features_per_stage": [8, 16, 32],
        "conv_op": f"torch.nn.modules.conv.Conv{axes}d",
        "kernel_sizes": [[3] * axes] * 3,
        "strides": strides,
        layers: [1, 2, 2],
        "n_conv_per_stage_decoder": [1, 2],
        "conv_bias": True,
        "norm_op": f"torch.nn.modules.{kinds[case['norm']]}{axes}d",
        "norm_op_kwargs": {"eps": 1e-05, "affine": True},
        "dropout_op": None,
        "dropout_op_kwargs": None,
        "nonlin": "torch.nn.LeakyReLU",
        "nonlin_kwargs": {"inplace": True},
    }
    kind = "ResidualEncoderUNet" if case["residual"] else "PlainConvUNet"
    architecture = {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
        "arch_kwargs": arguments,
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }
    spline = {"is_seg": False, "order": 3, "order_z": 0, "force_separate_z": None}
    config: dict[str, Any] = {
        "data_identifier": f"nnUNetPlans_{name}",
        "preprocessor_name": "DefaultPreprocessor",
        "batch_size": 2,
        "patch_size": case["patch"] or ([32, 32] if axes == 2 else [16, 32, 32]),
        "median_image_size_in_voxels": [24.0, 48.0, 48.0][-axes:],
        "spacing": spacing[-axes:],
        "normalization_schemes": case["schemes"],
        "use_mask_for_norm": case["masked"],
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": spline,
        "resampling_fn_seg": "resample_data_or_seg_to_shape",
        "resampling_fn_seg_kwargs": spline | {"is_seg": True, "order": 1},
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": spline | {"order": 1},
        "batch_dice": axes == 2,
    }
    if case["old"]:
        config |= {
            "UNet_class_name": kind,
            "UNet_base_num_features": 8,
            "unet_max_num_features": 24,
            "n_conv_per_stage_encoder": [1, 2, 2],
            "n_conv_per_stage_decoder": [1, 2],
            "num_pool_per_axis": [1, 2, 2],
            "pool_op_kernel_sizes": strides,
            "conv_kernel_sizes": [[3] * axes] * 3,
        }
    else:
        config["architecture"] = architecture
    seen = {"max": 900.0, "mean": 310.0, "median": 300.0, "min": -300.0, "std": 140.0}
    seen |= {"percentile_00_5": 20.0, "percentile_99_5": 560.0}
    plans = {
        "dataset_name": "Dataset999_Oracle",
        "plans_name": "nnUNetPlans",
        "original_median_spacing_after_transp": spacing,
        "original_median_shape_after_transp": [24, 48, 48],
        "image_reader_writer": case["reader"],
        "transpose_forward": order,
        "transpose_backward": [order.index(axis) for axis in range(3)],
        "configurations": {name: config},
        "experiment_planner_used": "ExperimentPlanner",
        "label_manager": "LabelManager",
        "foreground_intensity_properties_per_channel": {
            str(key): seen for key in range(len(case["channels"]))
        },
    }
    dataset = {
        "channel_names": {str(key): text for key, text in enumerate(case["channels"])},
        "labels": case["labels"],
        "numTraining": 2,
        "file_ending": ".nii.gz",
    }
    if case["regions"]:
        dataset["regions_class_order"] = case["regions"]
    return name, plans, dataset


def write_images(case: dict[str, Any], out: Path, rng: np.random.Generator) -> None:
    """Write images of nested balls in noise, and their labels."""
    import SimpleITK as sitk  # noqa: N813

    count = max(
        value if isinstance(value, int) else max(value)
        for key, value in case["labels"].items()
        if key != "ignore"
    )
    for number, (shape, spacing) in enumerate(case["images"]):
        extent = np.array(shape) * spacing
        grid = np.stack(
            np.meshgrid(
                *[(np.arange(n) + 0.5) * s for n, s in zip(shape, spacing, strict=True)], indexing="ij"
            ),
            -1,
        )
        labels = np.zeros(shape, np.uint8)
        for value in range(1, count + 1):
            centre, radii = extent / 2, extent * (0.36 if value == 1 else 0.2)
            if count > 2:  # each in a part of its own
                angle = 2 * np.pi * value / count
                centre = centre + extent * [0, 0.28 * np.sin(angle), 0.28 * np.cos(angle)]
                radii = extent * 0.16
            labels[(((grid - centre) / radii) ** 2).sum(-1) < 1] = value
        for channel in range(len(case["channels"])):
            image = 100 + 90 * labels.astype(float) + 45 * rng.standard_normal(shape)
            if channel:
                image = 500 - image
            if case["border"]:
                inside = tuple(slice(width, -width) for width in case["border"])
                kept = image[inside].copy()
                image[:] = 0
                image[inside] = kept
            save(
                sitk,
                image.astype(np.float32),
                case,
                spacing,
                out / f"images/case_{number:03d}_{channel:04d}.nii.gz",
            )
        save(sitk, labels, case, spacing, out / f"labels/case_{number:03d}.nii.gz")


def save(sitk: Any, array: np.ndarray, case: dict[str, Any], spacing: list[float], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = sitk.GetImageFromArray(array)
    image.SetSpacing(spacing[::-1])
    image.SetOrigin((10.0, -20.0, 30.0))
    image.SetDirection(case["direction"])
    sitk.WriteImage(image, str(path))


def train(
    network: Any,
    cases: list[tuple[Any, Any]],
    case: dict[str, Any],
    patch: list[int],
    rng: np.random.Generator,
) -> None:
    """Train a few steps on patches, so that masks are no noise."""
    import torch

    optimiser = torch.optim.Adam(network.parameters(), 4e-3)
    network.train()
    for _ in range(case["steps"]):
        images, targets = [], []
        for _ in range(2 if len(patch) == 3 else 8):
            image, labels = cases[rng.integers(len(cases))]
            if len(patch) == 2:
                index = rng.integers(image.shape[1])
                image, labels = image[:, index], labels[index]
            pad = [max(side - size, 0) for side, size in zip(patch, labels.shape, strict=True)]
            image = np.pad(image, [(0, 0), *((0, width) for width in pad)])
            labels = np.pad(labels, [(0, width) for width in pad])
            low = [rng.integers(size - side + 1) for side, size in zip(patch, labels.shape, strict=True)]
            spot = tuple(slice(a, a + b) for a, b in zip(low, patch, strict=True))
            images.append(image[(slice(None), *spot)])
            targets.append(labels[spot])
        x, y = torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(targets)).long().clamp_min(0)
        output = network(x)
        if case["regions"]:
            parts = [value for key, value in case["labels"].items() if key not in ("background", "ignore")]
            parts = [torch.tensor(part if isinstance(part, list) else [part]) for part in parts]
            truth = torch.stack([torch.isin(y, part) for part in parts], 1).float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(output, truth)
        else:
            loss = torch.nn.functional.cross_entropy(output, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def make(case: dict[str, Any], out: Path) -> Path:
    """Write images, labels and a model folder, and return the folder."""
    import torch
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
    from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    write_images(case, out, rng)
    name, plans, dataset = plans_of(case)
    folder = out / f"{case['trainer']}__nnUNetPlans__{name}"
    folder.mkdir()
    (folder / "plans.json").write_text(json.dumps(plans, indent=2))
    (folder / "dataset.json").write_text(json.dumps(dataset, indent=2))
    manager = PlansManager(json.loads(json.dumps(plans)))
    config = manager.get_configuration(name)
    prepare = DefaultPreprocessor(verbose=False)
    found = []
    for labels in sorted((out / "labels").iterdir()):
        files = [str(path) for path in sorted((out / "images").glob(labels.name[:8] + "_*"))]
        data, target, _ = prepare.run_case(files, str(labels), manager, config, dataset)
        found.append((np.asarray(data), np.asarray(target[0])))
    trainer = recursive_find_trainer_class_by_name(case["trainer"])
    heads = manager.get_label_manager(dataset).num_segmentation_heads
    for fold in range(case["folds"]):
        network = trainer.build_network_architecture(manager, config, len(case["channels"]), heads, False)
        train(network, found, case, config.patch_size, rng)
        records = {
            "train_losses": [np.float32(0.5)],
            "ema_fg_dice": [np.float64(0.75)],
            "epoch_end_timestamps": [1.5],
        }
        content = {
            "network_weights": network.state_dict(),
            "optimizer_state": {},
            "grad_scaler_state": None,
            "logging": records if case["records"] else {},
            "_best_ema": np.float64(0.75) if case["records"] else None,
            "current_epoch": np.int64(1) if case["records"] else 1,
            "trainer_name": case["trainer"],
            "init_args": {"plans": plans, "configuration": name, "fold": fold, "dataset_json": dataset},
            "inference_allowed_mirroring_axes": tuple(range(case["dimensions"])),
        }
        (folder / f"fold_{fold}").mkdir()
        torch.save(content, folder / f"fold_{fold}" / "checkpoint_final.pth")
    return folder


def predict(folder: Path, out: Path, device: str) -> None:
    """Write the masks of nnU-Net's predictor to pred/, and inputs and logits of every image to logits/."""
    import torch
    from nnunetv2.inference.export_prediction import (
        convert_predicted_logits_to_segmentation_with_correct_shape,
    )
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
    from nnunetv2.inference.sliding_window_prediction import compute_gaussian

    predictor = nnUNetPredictor(0.5, True, True, device=torch.device(device), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(folder), None)
    (out / "pred").mkdir()
    predictor.predict_from_files_sequential(str(out / "images"), str(out / "pred"))
    (out / "logits").mkdir()
    config = predictor.configuration_manager
    prepare = config.preprocessor_class(verbose=False)
    patch = tuple(config.patch_size)
    weight = compute_gaussian(patch, 1 / 8, 10, dtype=torch.float64, device=torch.device("cpu"))
    for first in sorted((out / "images").glob("*_0000.nii.gz")):
        name = first.name.removesuffix("_0000.nii.gz")
        files = [str(path) for path in sorted((out / "images").glob(f"{name}_*"))]
        data, _, known = prepare.run_case(
            files, None, predictor.plans_manager, config, predictor.dataset_json
        )
        data = torch.from_numpy(np.asarray(data, np.float32))
        logits = torch.stack(
            [in_double(predictor, item, data, patch, weight) for item in predictor.list_of_parameters]
        ).mean(0)
        mask = convert_predicted_logits_to_segmentation_with_correct_shape(
            logits, predictor.plans_manager, config, predictor.label_manager, known
        )
        half = predictor.predict_logits_from_preprocessed_data(data)
        kept = {"data": data, "logits": logits.numpy(), "half": half.float().numpy(), "mask": mask}
        np.savez_compressed(out / f"logits/{name}.npz", **kept)


def in_double(predictor: Any, weights: Any, data: Any, patch: tuple[int, ...], gaussian: Any) -> Any:
    """Return the logits of one fold, tiles in float32 added up in double precision."""
    import torch
    from acvl_utils.cropping_and_padding.padding import pad_nd_image

    predictor.network.load_state_dict(weights)
    predictor.network.to(predictor.device).eval()
    padded, inside = pad_nd_image(data, patch, "constant", {"value": 0}, True, None)
    total: Any = 0
    count = torch.zeros(padded.shape[1:], dtype=torch.float64)
    for spot in predictor._internal_get_sliding_window_slicers(padded.shape[1:]):
        tile = padded[spot][None].to(predictor.device)
        logits = predictor._internal_maybe_mirror_and_predict(tile)[0].cpu().double()
        if isinstance(total, int):
            total = torch.zeros((len(logits), *padded.shape[1:]), dtype=torch.float64)
        total[spot] += logits * gaussian
        count[spot[1:]] += gaussian
    return (total / count)[(slice(None), *inside[1:])]


def other_side(options: argparse.Namespace) -> int:
    """Make a case and let nnU-Net predict it; runs in nnU-Net's environment."""
    import torch

    torch.set_num_threads(options.threads)
    from importlib.metadata import version

    case = GIVEN | CASES[options.cases[0]]
    folder = make(case, options.work)
    predict(folder, options.work, options.device)
    names = ("nnunetv2", "torch", "numpy", "scipy", "scikit-image", "SimpleITK")
    text = json.dumps({name: version(name) for name in names})
    (options.work / "versions.json").write_text(text)
    return 0


# ------------------------------------------------------------ in this environment


def environment(work: Path) -> Path:
    """Return a Python that has nnunetv2, in a virtual environment made for it."""
    python = work / "nnunet" / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", str(work / "nnunet")], check=True)  # noqa: S603
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *INSTALL], check=True)  # noqa: S603
    return python


def ours(folder: Path, work: Path, device: str) -> dict[str, tuple[Any, Any]]:
    """Return input and logits on the network's grid, (C, D, H, W), by case; masks go to ours/."""
    import torch

    from tesla_med.actions.predict import predict as predict_masks
    from tesla_med.config.resolve import resolve
    from tesla_med.losses import overlapping
    from tesla_med.models.base import default_device, to_model_range
    from tesla_med.models.loading import load_model
    from tesla_med.tasks.volumes import Volumes

    predict_masks(work / "images", folder, out=work / "ours", device=device)
    site, pipeline = resolve(None, None, (), folder)
    loaded = load_model(folder, pipeline)
    task = Volumes(site, loaded.pipeline)
    place = default_device(device)
    network = loaded.model.to(place).eval()
    found = {}
    for ref in task.refs(task.find(work / "images", ()), seed=0, size=1):
        images = to_model_range(task.load(ref).images, loaded.pipeline.preprocessing.model_range)
        with torch.no_grad():
            logits = network.whole(images.to(place)).cpu()
        if loaded.pipeline.regions:
            logits = overlapping(logits)
        pair = [images, logits]
        pair = [item[0] if item.dim() == 5 else item.movedim(0, 1) for item in pair]
        found[ref.name[:8]] = (pair[0].numpy(), pair[1].numpy())
    return found


def in_file_order(mask: np.ndarray, name: str, affine: np.ndarray) -> np.ndarray:
    """Return a mask (z, y, x) of nnU-Net's reader in the order of a file with an affine."""
    import nibabel

    mask = mask.transpose(2, 1, 0)
    if CASES[name].get("reader") != "NibabelIOWithReorient":
        return mask
    orientations = nibabel.orientations
    turn = orientations.ornt_transform(orientations.axcodes2ornt("RAS"), nibabel.io_orientation(affine))
    return orientations.apply_orientation(mask, turn)


def least_dice(first: np.ndarray, second: np.ndarray) -> float:
    """Return the smallest Dice of any value of two masks."""
    values = set(np.unique(first)) | set(np.unique(second))
    both = {value: ((first == value).sum() + (second == value).sum()) for value in values}
    return float(min(2 * ((first == k) & (second == k)).sum() / total for k, total in both.items()))


def compare(name: str, work: Path, found: dict[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
    """Return a row for each image of a case."""
    import nibabel

    rows = []
    for image, (data, logits) in found.items():
        kept = np.load(work / f"logits/{image}.npz")
        path = work / f"pred/{image}.nii.gz"
        theirs = np.asanyarray(nibabel.load(path).dataobj)
        paths = sorted((work / "ours/masks").glob(f"{image}*.nii.gz"))
        mask = np.asanyarray(nibabel.load(paths[0]).dataobj)
        fits = kept["data"].shape == data.shape and kept["logits"].shape == logits.shape
        scale = np.abs(kept["logits"]).max()
        rows.append(
            {
                "case": name,
                "image": image,
                "voxels": int(theirs.size),
                "classes": len(np.unique(theirs)),
                "foreground_percent": float(100 * (theirs > 0).mean()),
                "agreement_percent": float(100 * (theirs == mask).mean()),
                "least_dice": least_dice(theirs, mask),
                "least_dice_exact": least_dice(
                    in_file_order(kept["mask"], name, nibabel.load(path).affine), mask
                ),
                "input_difference": float(np.abs(kept["data"] - data).max()) if fits else None,
                "logit_difference_relative": float(np.abs(kept["logits"] - logits).max() / scale)
                if fits
                else None,
                "half_difference_relative": float(np.abs(kept["logits"] - kept["half"]).max() / scale),
            }
        )
    return rows


def passed(row: dict[str, Any]) -> bool:
    """Return whether a row is within the limits."""
    logits = row["logit_difference_relative"]
    fits = row["agreement_percent"] >= LEAST_PERCENT and row["least_dice_exact"] >= LEAST_DICE
    return fits and logits is not None and logits <= MOST


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    head = "case | image | voxels | classes | agreement | least Dice | exact | input | logits | half"
    lines = [f"| {head} |", "|---" * 10 + "|"]
    for row in rows:
        numbers = [
            row[key] for key in ("input_difference", "logit_difference_relative", "half_difference_relative")
        ]
        cells = ["other size" if value is None else f"{value:.0e}" for value in numbers]
        dices = [f"{row[key]:.5f}" for key in ("least_dice", "least_dice_exact")]
        first = [row["case"], row["image"], str(row["voxels"]), str(row["classes"])]
        first += [f"{row['agreement_percent']:.4f} %", *dices, *cells]
        lines.append(f"| {' | '.join(first)} |" + ("" if passed(row) else " FAILED"))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", type=Path, help="a Python with nnunetv2; default: made in the work folder"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("nnunet_oracle"), help="folder for models, images and masks"
    )
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), metavar="CASE", help=f"of {', '.join(CASES)}"
    )
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} cases: {', '.join(QUICK)}")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("nnunet_oracle.json"))
    parser.add_argument("--other-side", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.other_side:
        return other_side(options)

    import torch

    from tesla_med.models.checkpoint import versions

    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    python = options.python or environment(options.work)
    rows, theirs, begun = [], {}, time.perf_counter()
    for name in options.cases or (QUICK if options.quick else CASES):
        work = options.work.resolve() / name.replace(" ", "_")
        if not (work / "versions.json").is_file():
            command = [
                str(python),
                str(Path(__file__).resolve()),
                "--other-side",
                "--cases",
                name,
                "--work",
                str(work),
            ]
            command += ["--device", options.device, "--threads", str(options.threads)]
            work.mkdir()
            kept = os.environ | {
                key: str(work) for key in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
            }
            done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)  # noqa: S603
            if done.returncode:
                raise SystemExit(f"{name}:\n{done.stderr[-3000:]}")
        theirs = json.loads((work / "versions.json").read_text(encoding="utf-8"))
        folder = next(work.glob("*__*__*"))
        if (work / "ours").is_dir():
            import shutil

            shutil.rmtree(work / "ours")
        rows += compare(name, work, ours(folder, work, options.device))
        print(table(rows[-len(GIVEN["images"]) :]).splitlines()[-1], flush=True)
    print(table(rows))
    record = {
        "command": " ".join(sys.argv),
        "versions": versions(),
        "versions_of_nnunet": theirs,
        "device": options.device,
        "seconds": time.perf_counter() - begun,
        "limits": {
            "agreement_percent": LEAST_PERCENT,
            "least_dice_exact": LEAST_DICE,
            "logit_difference_relative": MOST,
        },
        "images": rows,
    }
    options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if all(passed(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
