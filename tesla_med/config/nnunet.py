"""What an nnU-Net v2 model folder says about itself, read from its JSON files without running anything.

A folder is ``nnUNetTrainer__nnUNetPlans__3d_fullres`` with plans.json, dataset.json and ``fold_k/``. What is
known of its network becomes ``model.params``, of its preprocessing ``preprocessing.nnunet``. Anything that
is not understood is refused by its name: a mask made with a step left out would look right and be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from tesla_med.config.licences import terms_of
from tesla_med.config.nnunet_labels import classes_of
from tesla_med.config.paths import whole_path
from tesla_med.config.section import Section
from tesla_med.errors import CheckpointError

PLANS, DATASET = "plans.json", "dataset.json"
CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")
Z_RANGE = (-3.0, 5.0)
"""Where z-scores lie, mapped to [0, 1] for augmentation; nothing is clipped in predictions."""
SCHEMES = {
    "ZScoreNormalization": "zscore",
    "CTNormalization": "ct",
    "NoNormalization": "none",
    "RescaleTo01Normalization": "rescale",
    "RGBTo01Normalization": "rgb",
}
NETWORKS = ("PlainConvUNet", "ResidualEncoderUNet")
STAGES = 16
"""Most that a network has."""
RESAMPLING = "resample_data_or_seg_to_shape"
READERS = {"SimpleITKIO": False, "NibabelIO": False, "NibabelIOWithReorient": True}
"""How nnU-Net reads images, and whether it turns them to RAS for that."""
_ORDERS: dict[str, dict[str, Any]] = {"data": {"order": 3}, "probabilities": {"order": 1}}
_Axis = Annotated[int, Field(ge=0, le=2)]
Axes = tuple[_Axis, _Axis, _Axis]


class Resampling(Section):
    """How arrays are resampled: spline order, and what applies across thick slices.

    ``order_z`` is used along an axis that is resampled apart from the others: where its spacing is more than
    three times the others', or as ``separate_z`` says.
    """

    order: int = Field(3, ge=0, le=5)
    order_z: int = Field(0, ge=0, le=5)
    separate_z: bool | None = None


class ChannelNorm(Section):
    """How the intensities of one channel are normalised.

    ``zscore`` by mean and standard deviation of the image, inside its nonzero part if ``masked``; ``ct``
    clips to ``lower`` and ``upper`` and uses ``mean`` and ``std`` of the training's foreground.
    """

    scheme: Literal["zscore", "ct", "none", "rescale", "rgb"] = "zscore"
    masked: bool = False
    mean: float = 0.0
    std: float = 1.0
    lower: float = 0.0
    upper: float = 1.0


class NnunetPreprocessing(Section):
    """From a volume to what an nnU-Net sees: transpose, crop to nonzero, normalise, resample.

    Axes are those of the file in reverse, (z, y, x), then ``transpose``; ``spacing`` in mm is in that order,
    of two axes for slices, whose first axis keeps its spacing. With ``reorient`` the file's axes are turned
    to right, anterior, superior before.
    """

    reorient: bool = False
    transpose: Axes = (0, 1, 2)
    spacing: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=2, max_length=3)
    channels: tuple[ChannelNorm, ...] = Field(min_length=1)
    images: Resampling = Resampling()
    logits: Resampling = Resampling(order=1)

    @model_validator(mode="after")
    def _every_axis(self) -> NnunetPreprocessing:
        if sorted(self.transpose) != [0, 1, 2]:
            raise ValueError("transpose must hold each of 0, 1 and 2 once")
        return self

    @property
    def dimensions(self) -> int:
        """3 for volumes, 2 for slices."""
        return len(self.spacing)


def nnunet_folder(path: Path) -> Path | None:
    """Return the model folder that a path means: itself, or that around a fold or a checkpoint; else None."""
    path = whole_path(path)
    for folder in (path, path.parent, path.parent.parent):
        if (folder / PLANS).is_file() and (folder / DATASET).is_file():
            return folder
    return None


def read_model(path: Path) -> dict[str, Any]:
    """Return what the JSON files of a model folder say, as content of a pipeline.

    Raises:
        CheckpointError: a file cannot be read, or holds what is not supported; it is named.
    """
    plans, dataset = _json(path / PLANS), _json(path / DATASET)
    try:
        content = _content(path, plans, dataset)
        NnunetPreprocessing.model_validate(content["preprocessing"]["nnunet"])
        return content
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path}: plans.json: {what} is {first['input']!r}: {first['msg']}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise CheckpointError(
            f"{path}: plans.json or dataset.json is not as nnU-Net v2 writes it: {what}"
        ) from None


def nnunet_notes(path: Path) -> tuple[str, ...]:
    """Return remarks on a model folder: licence and reference, and channels that views do not show whole."""
    keys = {"licence": "licence", "license": "licence", "reference": "reference"}
    preprocessing = read_model(path)["preprocessing"]
    norms = preprocessing["nnunet"]["channels"]
    raw = [str(index) for index, norm in enumerate(norms) if norm["scheme"] == "none"]
    found = [*terms_of(path, _json(path / DATASET), keys, "folder")]
    if raw and preprocessing["model_range"] == Z_RANGE:
        low, high = Z_RANGE
        found.append(
            f"channel {' and '.join(raw)} of the images is not normalised: predictions see it as it is, but "
            f"augmented views while adapting hold no values below {low:g} or above {high:g}"
        )
    return tuple(found)


def folds_of(path: Path) -> list[Path]:
    """Return the checkpoints of the numbered folds, in order: the final ones, or if there are none the best.

    ``fold_all`` counts where it is the only one.

    Raises:
        CheckpointError: there is none.
    """
    folders = [item for item in path.glob("fold_*") if item.is_dir()]
    folders.sort(key=lambda item: (len(item.name), item.name))
    numbered = [item for item in folders if item.name.removeprefix("fold_").isdigit()]
    of_all = [path / "fold_all"]  # no part of the ensemble, as in nnU-Net
    for some in (numbered, of_all):
        for name in CHECKPOINTS:
            if found := [folder / name for folder in some if (folder / name).is_file()]:
                return found
    raise CheckpointError(
        f"{path}: no fold_k/{CHECKPOINTS[0]} or {CHECKPOINTS[1]}; copy the folds of the training into it"
    )


def configuration_of(path: Path) -> str:
    """Return what the name of a model folder says of its configuration, TRAINER__PLANS__CONFIGURATION."""
    return path.name.rpartition("__")[2]


def ignored_label(path: Path) -> int | None:
    """Return the value of the label "ignore" of a model folder; None where it has none."""
    value = _json(path / DATASET).get("labels", {}).get("ignore")
    return value if isinstance(value, int) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def _content(path: Path, plans: Mapping[str, Any], dataset: Mapping[str, Any]) -> dict[str, Any]:
    config = _configuration(path, plans, configuration_of(path))
    dimensions = len(config["patch_size"])
    names = dataset.get("channel_names") or dataset["modality"]
    channels = len(names)
    classes, regions = classes_of(path, dataset["labels"], dataset.get("regions_class_order"))
    norms = _norms(path, plans, config, channels)
    scaled = {item["scheme"] for item in norms} <= {"rescale", "rgb"}
    params = _network(path, config, dimensions) | {
        "regions": regions,
        "patch": config["patch_size"],
        "mirror": [],
    }
    return {
        "classes": classes,
        "regions": regions,
        "channels": channels,
        "preprocessing": {
            "model_range": (0.0, 1.0) if scaled else _raw_range(plans, norms) or Z_RANGE,
            "nnunet": {
                "reorient": _reoriented(path, plans),
                "transpose": plans["transpose_forward"],
                "spacing": config["spacing"],
                "channels": norms,
                "images": _resampling(path, config, "data"),
                "logits": _resampling(path, config, "probabilities"),
            },
        },
        "model": {"name": "nnunet", "params": params},
    }


def _reoriented(path: Path, plans: Mapping[str, Any]) -> bool:
    """Return whether images are turned to RAS."""
    reader = plans.get("image_reader_writer", "SimpleITKIO")
    if reader not in READERS:
        raise CheckpointError(
            f"{path}: images read by {reader!r} are not supported; known: {', '.join(READERS)}"
        )
    manager = plans.get("label_manager", "LabelManager")
    if manager != "LabelManager":
        raise CheckpointError(f"{path}: label manager {manager!r} is not supported, only LabelManager")
    return READERS[reader]


def _configuration(path: Path, plans: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration with what it inherits."""
    every = plans["configurations"]
    if name not in every:
        if len(every) != 1:
            raise CheckpointError(
                f"{path}: the folder's name ends in {name!r}, which is none of the configurations of "
                f"its plans: {', '.join(sorted(every))}; name it TRAINER__PLANS__CONFIGURATION"
            )
        name = next(iter(every))
    chain, content = [name], dict(every[name])
    while "inherits_from" in content:
        parent = content.pop("inherits_from")
        if parent in chain:
            raise CheckpointError(f"{path}: configurations of the plans inherit from each other: {parent}")
        chain.append(parent)
        content = {**every[parent], **content}
    if content.get("previous_stage"):
        raise CheckpointError(f"{path}: the second stage of a cascade is not supported; use 3d_fullres or 2d")
    if len(content["patch_size"]) not in (2, 3):
        raise CheckpointError(f"{path}: patch size {content['patch_size']}: expected two or three axes")
    known = content.get("preprocessor_name", "DefaultPreprocessor")
    if known != "DefaultPreprocessor":
        raise CheckpointError(f"{path}: preprocessor {known!r} is not supported, only DefaultPreprocessor")
    return content


def _norms(
    path: Path, plans: Mapping[str, Any], config: Mapping[str, Any], channels: int
) -> list[dict[str, Any]]:
    schemes, masks = config["normalization_schemes"], config["use_mask_for_norm"]
    if len(schemes) != channels or len(masks) != channels:
        raise CheckpointError(f"{path}: {channels} channels, but {len(schemes)} normalisations in the plans")
    result = []
    for index, (scheme, masked) in enumerate(zip(schemes, masks, strict=True)):
        if scheme not in SCHEMES:
            raise CheckpointError(
                f"{path}: normalisation {scheme!r} of channel {index} is not supported; "
                f"known: {', '.join(SCHEMES)}"
            )
        norm: dict[str, Any] = {"scheme": SCHEMES[scheme], "masked": bool(masked)}
        if scheme == "CTNormalization":
            name = "foreground_intensity_properties_"
            seen = (plans.get(f"{name}per_channel") or plans[f"{name}by_modality"])[str(index)]
            norm |= {"mean": seen["mean"], "std": seen["std"]}
            norm |= {"lower": seen["percentile_00_5"], "upper": seen["percentile_99_5"]}
        result.append(norm)
    return result


def _raw_range(plans: Mapping[str, Any], norms: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Return where intensities lie that no channel normalises, by what the training saw; None if unknown."""
    name = "foreground_intensity_properties_"
    seen = plans.get(f"{name}per_channel") or plans.get(f"{name}by_modality") or {}
    found = [seen.get(str(index), {}) for index in range(len(norms))]
    if any(norm["scheme"] != "none" for norm in norms) or not all(
        {"min", "max"} <= set(item) for item in found
    ):
        return None
    low, high = min(0.0, *(float(item["min"]) for item in found)), max(float(item["max"]) for item in found)
    return (low, high) if high > low else None


def _resampling(path: Path, config: Mapping[str, Any], of: str) -> dict[str, Any]:
    function = config.get(f"resampling_fn_{of}", RESAMPLING)
    if function != RESAMPLING:
        raise CheckpointError(f"{path}: resampling by {function!r} is not supported, only {RESAMPLING}")
    given = dict(config.get(f"resampling_fn_{of}_kwargs") or {"force_separate_z": None} | _ORDERS[of])
    if given.pop("is_seg", False) or given.pop("separate_z_anisotropy_threshold", 3) != 3:
        raise CheckpointError(f"{path}: resampling_fn_{of}_kwargs ask for what is not supported")
    result = {"order": given.pop("order", 3), "order_z": given.pop("order_z", 0)}
    result["separate_z"] = given.pop("force_separate_z", False)  # as in nnU-Net where the plans leave it out
    if given:
        raise CheckpointError(f"{path}: resampling_fn_{of}_kwargs {sorted(given)} are not supported")
    return result


def _network(path: Path, config: Mapping[str, Any], dimensions: int) -> dict[str, Any]:
    """Return the parameters of the network, of plans of either age."""
    if "architecture" not in config:
        return _older_network(path, config)
    class_name = str(config["architecture"]["network_class_name"])
    kind = class_name.rpartition(".")[2]
    if kind not in NETWORKS or not class_name.startswith("dynamic_network_architectures."):
        raise CheckpointError(
            f"{path}: network {class_name!r} is not supported; known: {', '.join(NETWORKS)}"
        )
    given = dict(config["architecture"]["arch_kwargs"])
    for name in ("conv_op", "norm_op", "dropout_op", "nonlin", "deep_supervision"):
        given.setdefault(name, None)
    expected = f"torch.nn.modules.conv.Conv{dimensions}d"
    if given.pop("conv_op") != expected:
        raise CheckpointError(f"{path}: conv_op of the plans is not {expected}, as its patch size asks for")
    given.pop("deep_supervision")
    given.pop("dropout_op")  # it has no weights, and is off in prediction and adaptation
    given.pop("dropout_op_kwargs", None)
    blocks = given.pop("n_conv_per_stage", None) or given.pop("n_blocks_per_stage", None)
    params = {
        "kind": kind,
        "features": given.pop("features_per_stage"),
        "kernels": given.pop("kernel_sizes"),
        "strides": given.pop("strides"),
        "blocks": blocks,
        "decoder_blocks": given.pop("n_conv_per_stage_decoder"),
        "bias": given.pop("conv_bias", False),
        "norm": _layer(path, given.pop("norm_op"), ("InstanceNorm", "BatchNorm"), dimensions),
        "norm_options": given.pop("norm_op_kwargs", None) or {},
        "activation": _layer(
            path, given.pop("nonlin"), ("LeakyReLU", "ReLU", "ELU", "GELU", "SiLU", "PReLU"), 0
        ),
        "activation_options": given.pop("nonlin_kwargs", None) or {},
        "activation_first": given.pop("nonlin_first", False),
        "stem": given.pop("stem_channels", None),
    }
    stages = given.pop("n_stages", len(params["strides"]))
    if stages not in range(2, STAGES + 1):
        raise CheckpointError(f"{path}: n_stages {stages!r}: expected 2 to {STAGES}")
    unknown = sorted(name for name, value in given.items() if value is not None)
    if unknown:
        raise CheckpointError(
            f"{path}: arguments of the network that are not supported: {', '.join(unknown)}"
        )
    for name in ("features", "kernels", "strides", "blocks"):
        params[name] = params[name] if isinstance(params[name], list) else [params[name]] * stages
    if not isinstance(params["decoder_blocks"], list):
        params["decoder_blocks"] = [params["decoder_blocks"]] * (stages - 1)
    return params


def _layer(path: Path, name: str | None, known: tuple[str, ...], dimensions: int) -> str | None:
    """Return the short name of a layer of torch that is on the list; None where there is none."""
    if name is None:
        return None
    short = name.rpartition(".")[2]
    base = short.removesuffix(f"{dimensions}d") if dimensions else short
    if not name.startswith("torch.nn.") or base not in known:
        raise CheckpointError(
            f"{path}: layer {name!r} is not supported; known: {', '.join(known)} of torch.nn"
        )
    return base


def _older_network(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a network from plans that do not spell it out (nnU-Net before 2.4)."""
    kind = config["UNet_class_name"]
    if kind not in NETWORKS:
        raise CheckpointError(f"{path}: network {kind!r} is not supported; known: {', '.join(NETWORKS)}")
    base, most = config["UNet_base_num_features"], config["unet_max_num_features"]
    blocks = config["n_conv_per_stage_encoder"]
    return {
        "kind": kind,
        "features": [min(base * 2**stage, most) for stage in range(len(blocks))],
        "kernels": config["conv_kernel_sizes"],
        "strides": config["pool_op_kernel_sizes"],
        "blocks": blocks,
        "decoder_blocks": config["n_conv_per_stage_decoder"],
        "bias": True,
        "norm": "InstanceNorm",
        "norm_options": {"eps": 1e-5, "affine": True},
        "activation": "LeakyReLU",
        "activation_options": {"inplace": True},
    }
