"""How long a full-size nnU-Net takes to adapt to one volume, against the passes that it cannot do without.

Example::

    python benchmarks/nnunet_speed.py --device cuda --precision float32 bfloat16 --out nnunet_speed.json
    python benchmarks/nnunet_speed.py --device cpu --quick

The folder is made on the spot, as nnU-Net writes it: a plain 3-D U-Net with instance norm, about 30 million
random weights, patches of 16x256x256, mirrored along all axes. The volume is noise. The floor is what the
passes of the recipe take by themselves in the same run: of every update the teacher's views and three passes
with a backward pass (policy, and the student twice), and every tile of every prediction, those of the guard
included. ``end to end`` is `tesla-med adapt` from the file to the mask and its report.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import torch
from speed import synchronise, timed
from torch import Tensor

from tesla_med.adapt import adapt_site
from tesla_med.config.nnunet import read_model
from tesla_med.config.resolve import resolve
from tesla_med.engine.driver import Driver
from tesla_med.engine.predictor import Predictor
from tesla_med.models.base import default_device, device_name, parameter_count
from tesla_med.models.checkpoint import versions
from tesla_med.models.loading import LoadedModel, load_model
from tesla_med.models.nnunet import Nnunet, NnunetParams
from tesla_med.models.tiling import starts
from tesla_med.tta.base import MethodContext, TTAMethod, make_method

NAME = "nnUNetTrainer__nnUNetPlans__3d_fullres"
SPACING = (3.0, 0.625, 0.625)
"""mm along z, y, x, of volume and plans."""
FULL = {
    "shape": (24, 320, 320),
    "patch": [16, 256, 256],
    "features": [32, 64, 128, 256, 320, 320],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2], [2, 2, 2], [1, 2, 2], [1, 2, 2]],
}
QUICK = {
    "shape": (12, 48, 48),
    "patch": [8, 32, 32],
    "features": [4, 8, 8],
    "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]],
}
FORWARD, BOTH, TILE = "forward", "forward and backward", "tile"


def plans(size: dict[str, Any], spacing: Sequence[float] = SPACING) -> dict[str, Any]:
    """Return the content of plans.json."""
    stages, spline = len(size["features"]), {"is_seg": False, "order": 3, "order_z": 0}
    spline["force_separate_z"] = None
    architecture = {
        "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
        "arch_kwargs": {
            "n_stages": stages,
            "features_per_stage": size["features"],
            "conv_op": "torch.nn.modules.conv.Conv3d",
            "kernel_sizes": [[1, 3, 3]] + [[3, 3, 3]] * (stages - 1),
            "strides": size["strides"],
            "n_conv_per_stage": [2] * stages,
            "n_conv_per_stage_decoder": [2] * (stages - 1),
            "conv_bias": True,
            "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
            "norm_op_kwargs": {"eps": 1e-05, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }
    configuration = {
        "preprocessor_name": "DefaultPreprocessor",
        "patch_size": size["patch"],
        "spacing": list(spacing),
        "normalization_schemes": ["ZScoreNormalization"],
        "use_mask_for_norm": [False],
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": spline,
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities_kwargs": spline | {"order": 1},
        "architecture": architecture,
    }
    return {
        "plans_name": "nnUNetPlans",
        "image_reader_writer": "SimpleITKIO",
        "label_manager": "LabelManager",
        "transpose_forward": [0, 1, 2],
        "transpose_backward": [0, 1, 2],
        "configurations": {"3d_fullres": configuration},
        "foreground_intensity_properties_per_channel": {
            "0": {"mean": 1.0, "std": 0.5, "percentile_00_5": 0.0, "percentile_99_5": 2.0}
        },
    }


def make_folder(parent: Path, size: dict[str, Any]) -> Path:
    """Write a model folder with seeded random weights and return it."""
    folder = parent / NAME
    (folder / "fold_0").mkdir(parents=True)
    dataset = {
        "channel_names": {"0": "T2"},
        "labels": {"background": 0, "organ": 1},
        "file_ending": ".nii.gz",
    }
    for name, content in (("plans.json", plans(size)), ("dataset.json", dataset)):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    torch.manual_seed(0)
    params = NnunetParams.model_validate(read_model(folder)["model"]["params"])
    network = Nnunet(params, 1, 2)
    saved = {
        "network_weights": network.folds[0].state_dict(),
        "trainer_name": "nnUNetTrainer",
        "init_args": {"configuration": "3d_fullres", "fold": 0},
        "inference_allowed_mirroring_axes": (0, 1, 2),
    }
    torch.save(saved, folder / "fold_0" / "checkpoint_final.pth")
    return folder


@contextmanager
def watched() -> Iterator[list[int]]:
    """Give a list to which the tiles of every prediction are added, mirrored ones included."""
    tiles: list[int] = []
    plain = Nnunet.whole

    def whole(self: Nnunet, images: Tensor) -> Tensor:
        patch = self.patch or images.shape[2:]
        places = [len(starts(max(a, b), b)) for a, b in zip(images.shape[2:], patch, strict=True)]
        tiles.append(len(images) * math.prod(places) * 2 ** len(self.mirror))
        return plain(self, images)

    Nnunet.whole = whole  # type: ignore[method-assign]
    try:
        yield tiles
    finally:
        Nnunet.whole = plain  # type: ignore[method-assign]


def passes(method: TTAMethod, patch: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Return the seconds of a pass of a batch without and with its backward pass, and of a tile."""
    device, model = method.context.device, method.model
    count = method.params.batch_slices or 1
    batch = torch.randn(count, 1, *patch, device=device)

    def forward(images: Tensor) -> None:
        with torch.no_grad(), method.autocast():
            model(images)

    def both() -> None:
        model.zero_grad(set_to_none=True)
        with method.autocast():
            loss = model(batch).float().mean()
        loss.backward()  # type: ignore[no-untyped-call]

    found = {
        FORWARD: timed(lambda: forward(batch), device, repeats),
        BOTH: timed(both, device, repeats),
        TILE: timed(lambda: forward(batch[:1]), device, repeats),
    }
    model.zero_grad(set_to_none=True)
    return found


def peak(device: torch.device) -> float:
    """Return the peak memory in MiB: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(
    folder: Path, size: dict[str, Any], precision: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Return what adapting to one volume takes in one precision."""
    _, pipeline = resolve(None, None, (f"precision={precision}", *options.set), folder)
    device, loaded = default_device(options.device), load_model(folder, pipeline)
    method, predictor = build(loaded, device, precision)
    patch = tuple(size["patch"])
    alone = passes(method, patch, options.repeats)
    images = torch.randn(1, 1, *size["shape"], generator=torch.Generator().manual_seed(0))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    whole = clock(lambda: predictor.source.predict(images), device)
    first = clock(lambda: predictor(images), device)
    with watched() as tiles:
        seconds = clock(lambda: predictor(images), device)
    params = method.params
    updates = params.epochs * method.updates(1)
    views = params.weak_views + len(params.corrected_views)
    learning = updates * (views * alone[FORWARD] + 3 * alone[BOTH])
    predicting = sum(tiles) * alone[TILE]
    return {
        "precision": precision,
        "parameters": parameter_count(loaded.model),
        "updates": updates,
        "patches": params.batch_slices,
        "tiles": sum(tiles),
        "milliseconds": {name: 1e3 * value for name, value in alone.items()},
        "seconds": seconds,
        "first_seconds": first,
        "predict_seconds": whole,
        "floor_learning": learning,
        "floor_predicting": predicting,
        "ratio": seconds / (learning + predicting),
        "peak_memory_mib": peak(device),
    }


def build(loaded: LoadedModel, device: torch.device, precision: Any) -> tuple[TTAMethod, Predictor]:
    """Return TeSLA as the pipeline has it, and what adapts and judges with it."""
    pipeline = loaded.pipeline
    told = MethodContext(device, 1, pipeline.preprocessing.model_range, precision, pipeline.predict_batch)
    source = make_method("source", loaded.model, {}, told)
    method = make_method("tesla", loaded.model, pipeline.method_params("tesla", "N-O"), told)
    return method, Predictor(source, method, Driver(method, "N-O", "case"), pipeline.guard)


def clock(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call."""
    synchronise(device)
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def end_to_end(folder: Path, root: Path, size: dict[str, Any], precision: str, device: str) -> float:
    """Return the seconds from the file to the mask and its report."""
    images = root / "images"
    images.mkdir(exist_ok=True)
    array = np.random.default_rng(0).standard_normal(size["shape"][::-1]).astype(np.float32)
    nib.save(nib.Nifti1Image(array, np.diag([*SPACING[::-1], 1.0])), images / "case_0000.nii.gz")
    start = time.perf_counter()
    given = {"overrides": (f"precision={precision}",), "device": device, "overwrite": True}
    adapt_site(None, images, weights=folder, out=root / "run", **given)
    return time.perf_counter() - start


def table(rows: list[dict[str, Any]]) -> str:
    """Return the figures as Markdown."""
    heads = ["precision", "seconds", "learning", "predicting", "ratio", "first", "end to end", "memory"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        values = [row[key] for key in ("seconds", "floor_learning", "floor_predicting")]
        cells = [row["precision"], *(f"{value:.1f}" for value in values), f"{row['ratio']:.2f}"]
        cells += [f"{row['first_seconds']:.1f}", f"{row['end_to_end']:.1f}"]
        lines.append("| " + " | ".join([*cells, f"{row['peak_memory_mib']:.0f} MiB"]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], help="key=value over the pipeline")
    parser.add_argument("--quick", action="store_true", help="a tiny network and volume")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(Path(name) / "models", size)
        for precision in options.precision:
            row = measure(folder, size, precision, options)
            row["end_to_end"] = end_to_end(folder, Path(name), size, precision, options.device)
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(table(rows))
    if options.out:
        device = default_device(options.device)
        content = {
            "command": " ".join(["python", "benchmarks/nnunet_speed.py", *sys.argv[1:]]),
            "device": device_name(device),
            "versions": versions(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
