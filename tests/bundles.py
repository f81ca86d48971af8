"""Tiny MONAI bundles, and what MONAI itself makes of an image with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

READ = [{"_target_": "LoadImaged", "keys": "image"}, {"_target_": "EnsureChannelFirstd", "keys": "image"}]
STEPS = [
    {"_target_": "Orientationd", "keys": ["image"], "axcodes": "RAS"},
    {"_target_": "Spacingd", "keys": "image", "pixdim": "@pixdim", "mode": "bilinear"},
    {
        "_target_": "ScaleIntensityRanged",
        "keys": "image",
        "a_min": 0,
        "a_max": "$@top / 2",
        "b_min": 0,
        "b_max": 1,
    }
    | {"clip": True},
    {"_target_": "CropForegroundd", "keys": "image", "source_key": "image", "select_fn": "$lambda x: x > 0"},
    {"_target_": "EnsureTyped", "keys": "image", "device": "@device", "dtype": "$torch.float32"},
]


def after(*steps: dict[str, Any], place: int = 1, nearest: bool | None = False) -> dict[str, Any]:
    """Return a postprocessing with an inverse after the first steps; None leaves its interpolation out."""
    back = {"_target_": "Invertd", "keys": "pred", "transform": "@preprocessing", "orig_keys": "image"}
    back |= {} if nearest is None else {"nearest_interp": nearest}
    return {"_target_": "Compose", "transforms": [*steps[:place], back, *steps[place:]]}


SOFTMAX_STEPS = (
    {"_target_": "Activationsd", "keys": "pred", "softmax": True},
    {"_target_": "AsDiscreted", "keys": "pred", "argmax": True},
)
SIGMOID_STEPS = (
    {"_target_": "Activationsd", "keys": "pred", "sigmoid": True},
    {"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.5},
)
SOFTMAX, SIGMOID = after(*SOFTMAX_STEPS), after(*SIGMOID_STEPS)


def config(axes: int = 3, outputs: int = 3, **changes: Any) -> dict[str, Any]:
    """Return an inference configuration; None takes a key away."""
    content = {
        "imports": ["$import glob"],
        "bundle_root": "/where/it/was/made",
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "pixdim": [1.0, 1.0, 2.0],
        "top": 400,
        "network_def": {
            "_target_": "monai.networks.nets.UNet",
            "spatial_dims": axes,
            "in_channels": 1,
            "out_channels": outputs,
            "channels": [4, 8],
            "strides": [2],
            "norm": "batch",
        },
        "network": "$@network_def.to(@device)",
        "preprocessing": {"_target_": "Compose", "transforms": READ + STEPS},
        "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [16, 16, 8], "overlap": 0.5}
        | {"mode": "gaussian", "sw_device": "@device"},
        "postprocessing": SOFTMAX,
        "checkpointloader": {
            "_target_": "CheckpointLoader",
            "load_path": "$@bundle_root + '/models/model.pt'",
        },
        "run": ["$@evaluator.run()"],
    }
    return {key: value for key, value in (content | changes).items() if value is not None}


def metadata(outputs: int = 3, names: Any = None, channels: int = 1) -> dict[str, Any]:
    names = ["background", *[f"part {index}" for index in range(1, outputs)]] if names is None else names
    return {
        "copyright": "of somebody",
        "network_data_format": {
            "inputs": {"image": {"num_channels": channels, "value_range": [0, 1]}},
            "outputs": {
                "pred": {
                    "num_channels": outputs,
                    "channel_def": {str(index): name for index, name in enumerate(names)},
                }
            },
        },
    }


def make_network(content: dict[str, Any], seed: int = 3) -> Any:
    """Return MONAI's network of a configuration, its weights far from zero and its norms settled."""
    import torch
    from monai.networks import nets

    given = {key: value for key, value in content["network_def"].items() if key != "_target_"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nets.UNet(**given)
        axes = given["spatial_dims"]
        with torch.no_grad():
            for _ in range(8):
                network.train()(torch.rand(2, given["in_channels"], *[16] * axes))
    return network.eval()


def make_bundle(folder: Path, content: dict[str, Any] | None = None, about: Any = None, **saved: Any) -> Path:
    """Write a bundle; ``saved`` are other files in ``models/`` and what torch saves in them."""
    import torch

    content = config() if content is None else content
    (folder / "configs").mkdir(parents=True)
    (folder / "models").mkdir()
    (folder / "configs" / "inference.json").write_text(json.dumps(content), encoding="utf-8")
    (folder / "configs" / "metadata.json").write_text(json.dumps(about or metadata()), encoding="utf-8")
    (folder / "LICENSE").write_text("\nMade-up licence 1.0\nmore\n", encoding="utf-8")
    if not saved and isinstance(content.get("network_def"), dict):
        torch.save({"model": make_network(content).state_dict(), "epoch": 3}, folder / "models" / "model.pt")
    for name, value in saved.items():
        torch.save(value, folder / "models" / f"{name}.pt")
    return folder


def make_image(path: Path, seed: int = 0, shape: tuple[int, int, int] = (32, 28, 12)) -> Path:
    """Write an image with axes turned, spacing of its own, and nothing at its border."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(*[np.linspace(-1, 1, size) for size in shape], indexing="ij"))
    ball = 1 / (1 + np.exp(-12 * (0.6 - np.sqrt((grid**2).sum(0)))))
    array = (200 * ball + 40 * rng.random(shape)) * (np.abs(grid).max(0) < 0.85)
    affine = np.array([[-1.1, 0, 0, 10], [0, 0, 1.6, -5], [0, -0.9, 0, 3], [0, 0, 0, 1.0]])
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array.astype(np.float32), affine), path)
    return path


def of_monai(bundle: Path, image: Path, name: str = "model.pt", key: str = "model") -> Any:
    """Return the mask that MONAI makes of an image: (C, I, J, K) as its postprocessing leaves it.

    ``name`` and ``key`` are the file of weights and its part that the configuration names.
    """
    import torch
    from monai.bundle import ConfigParser
    from monai.data import decollate_batch, list_data_collate

    parser = ConfigParser()
    parser.read_config(str(bundle / "configs" / "inference.json"))
    parser["bundle_root"] = str(bundle)
    network = parser.get_parsed_content("network_def")
    state = torch.load(bundle / "models" / name, weights_only=True)
    network.load_state_dict(state[key])
    batch = list_data_collate([parser.get_parsed_content("preprocessing")({"image": str(image)})])
    with torch.no_grad():
        batch["pred"] = parser.get_parsed_content("inferer")(batch["image"], network.eval())
    done = [parser.get_parsed_content("postprocessing")(item) for item in decollate_batch(batch)]
    return np.asarray(done[0]["pred"])


def mask(out: Path, kind: str = "masks") -> Any:
    """Return the first mask of a run."""
    return np.asarray(nib.load(next(iter((out / kind).glob("*.nii.gz")))).dataobj)


def agreement(ours: Any, theirs: Any) -> tuple[float, float]:
    """Return the share of voxels that agree, and the smallest Dice of a class."""
    values = set(np.unique(ours)) | set(np.unique(theirs))
    pairs = [(ours == value, theirs == value) for value in values]
    return (ours == theirs).mean(), min(2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in pairs)


def load(path: Path, *overrides: str, trust: bool = False) -> Any:
    """Return the network of a bundle with its pipeline."""
    from tesla_med.config.resolve import resolve
    from tesla_med.models.loading import load_model

    _, pipeline = resolve(None, None, overrides, path, trust_code=trust)
    return load_model(path, pipeline)
