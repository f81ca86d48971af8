"""Do adapted nnU-Net folders, read by nnU-Net's own predictor, give the masks that ``adapt`` wrote?

Example::

    python benchmarks/nnunet_return.py --python nnunet-venv/bin/python --weights MODEL --volumes IMAGES

``MODEL`` is a folder of a trainer (``nnUNetTrainer__nnUNetPlans__3d_fullres``), ``IMAGES`` holds cases in
nnU-Net's naming, ``--python`` belongs to an environment with nnunetv2. Every case is adapted to without the
guard (N-O, a larger learning rate than the recipe's, so that masks do change); ``nnUNetPredictor`` then
predicts each case with the folder that was written for it: step 0.5, Gaussian weights, mirroring, all folds.
Exit code 1 unless they agree in at least 99.99 % of the voxels of every case, and adaptation changed every
mask.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from tesla_med.adapt import adapt_site
from tesla_med.models.checkpoint import versions

LEAST_PERCENT = 99.99
PREDICT = """
import sys, torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
if __name__ == "__main__":
    folder, out, *images = sys.argv[1:]
    predictor = nnUNetPredictor(0.5, True, True, device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(folder, None)
    predictor.predict_from_files_sequential([images], [out], save_probabilities=False)
"""


def labels(path: Path) -> np.ndarray:
    """Return the label values (I, J, K) of a mask."""
    return np.asarray(nib.load(path).dataobj).astype(np.int64)


def theirs(python: Path, folder: Path, images: Sequence[Path], out: Path) -> Path:
    """Let nnU-Net predict one case; return the file of its mask."""
    empty = {name: str(out.parent) for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")}
    command = [str(python), "-c", PREDICT, str(folder), str(out), *map(str, images)]
    done = subprocess.run(  # noqa: S603 - the interpreter that the user names
        command, env=empty, capture_output=True, text=True, check=False
    )
    found = out.with_name(out.name + ".nii.gz")
    if done.returncode or not found.is_file():
        raise SystemExit(f"nnU-Net could not predict with {folder}:\n{done.stderr[-2000:]}")
    return found


def measure(options: argparse.Namespace, work: Path) -> list[dict[str, Any]]:
    """Adapt to every case, and return how the masks of nnU-Net agree with ours, case by case."""
    run = work / "run"
    texts = (
        f"protocols.N-O.tesla.updates_per_case={options.updates}",
        f"methods.tesla.learning_rate={options.rate}",
        "reports=[table]",
    )
    adapt_site(None, options.volumes, weights=options.weights, out=run, guard=False, overrides=texts)
    rows = []
    for mask in sorted((run / "masks").glob("*_mask.nii.gz")):
        case = mask.name.removesuffix("_mask.nii.gz")
        folder = run / "checkpoints" / f"{case}.model" / options.weights.name
        stem = case.removesuffix("_0000")
        images = sorted(options.volumes.glob(f"{stem}_[0-9][0-9][0-9][0-9].nii.gz"))
        ours, other = labels(mask), labels(theirs(options.python, folder, images, work / case))
        before = labels(run / "source_masks" / mask.name)
        row = {
            "model": options.weights.name,
            "case": case,
            "voxels": int(ours.size),
            "agreement_percent": float(100 * (ours == other).mean()),
            "moved_percent": float(100 * (ours != before).mean()),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    lines = ["| model | case | voxels | agreement | moved by adaptation |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['model']} | {row['case']} | {row['voxels']} | {row['agreement_percent']:.4f} % "
        f"| {row['moved_percent']:.2f} % |"
        for row in rows
    ]
    return "\n".join(lines)


def good(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether every case agrees, and adaptation changed every mask."""
    return bool(rows) and all(
        row["agreement_percent"] >= LEAST_PERCENT and row["moved_percent"] > 0 for row in rows
    )


def main(words: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, required=True, help="of an environment with nnunetv2")
    parser.add_argument("--weights", type=Path, required=True, help="folder of a trainer")
    parser.add_argument("--volumes", type=Path, required=True, help="images in nnU-Net's naming")
    parser.add_argument("--updates", type=int, default=3, help="per case")
    parser.add_argument("--rate", type=float, default=0.003, help="learning rate")
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        rows = measure(options, Path(name))
    print(table(rows))
    if options.out:
        content = {"versions": versions(), "updates": options.updates, "rate": options.rate, "rows": rows}
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0 if good(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
