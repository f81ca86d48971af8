"""A small site of generated prostates with quickly trained weights, for tests of whole runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import torch

from tesla_med.adapt import adapt_site
from tesla_med.config.files import load_pipeline
from tesla_med.config.models import Files, MaskLayer, Region, SiteConfig
from tesla_med.demo.volumes import make_site, preset
from tesla_med.io.volumes import read_volume, save_image
from tesla_med.models.base import build_model
from tesla_med.models.checkpoint import make_card, save_checkpoint
from tesla_med.prepare.transforms import Preprocessor
from tesla_med.training.measure import compute_statistics

SMALL = (
    *("preprocessing.size=[32,32]", "model.params.width=4", "report.max_cases_with_overlays=1"),
    "scaling.candidates=[]",
    *("guard.enabled=false", "keep_largest=false"),  # their own tests switch them on
)
FEW = (
    *("protocols.N-O.tesla.batch_slices=3", "protocols.N-O.tesla.updates_per_case=2"),
    *("protocols.N-M.tesla.batch_slices=3", "protocols.N-M.tesla.epochs=2"),
    *("methods.tesla.weak_views=2", "methods.tesla.learning_rate=0.005"),
    *("methods.opttta.first_steps=1", "methods.opttta.later_steps=1", "methods.opttta.views=2"),
)
BARE = ("reports=[table]",)
SLICES = 4
_TRAINED: list[Path] = []


def settings(**changes):
    """Scanner settings of 32 x 32 x 4 voxels; the easy site's contrast unless ``name`` says otherwise."""
    name = changes.pop("name", "easy")
    return preset("prostate", name).model_copy(update={"matrix": 32, "slices": SLICES} | changes)


def make_volumes(folder: Path, count=2, *, seed=1, names=None, **changes) -> list[Path]:
    """Write cases with references, the file names as at the prostate sites."""
    return make_site(folder, "prostate", settings(**changes), count, seed, names)


def site(**changes) -> SiteConfig:
    """Return a prostate site named X of institution Nowhere."""
    layers = (MaskLayer(pattern="*_segmentation.nii.gz", write=1),)
    content = {
        "id": "X",
        "pipeline": "prostate",
        "institution": "Nowhere",
        "files": Files(image=("Case*.nii.gz",), masks=layers),
        "region": Region(),
        "terms": "Generated data.",
    }
    return SiteConfig(**(content | changes))


def train_weights(folder: Path) -> Path:
    """Return weights trained once a session, the first time in ``folder``."""
    if not _TRAINED:
        _TRAINED.append(_train(folder))
    return _TRAINED[0]


def weights_with_statistics(folder: Path) -> Path:
    """Return a copy of the trained weights in ``folder`` with source statistics beside it."""
    trained = train_weights(folder)
    path = folder / "own" / trained.name
    path.parent.mkdir()
    for name in (trained.name, trained.with_suffix(".json").name):
        shutil.copy(trained.parent / name, path.parent / name)
    make_volumes(folder / "labelled", 1, name="source")
    pipeline = load_pipeline("prostate", SMALL)
    compute_statistics(path, pipeline, [site()], folder / "labelled", device="cpu")
    return path


def _train(folder: Path) -> Path:
    """Train a width-4 U-Net on a few slices of the source site and save it with its card."""
    pipeline = load_pipeline("prostate", SMALL)
    prepare = Preprocessor(pipeline.preprocessing, Region(), 2)
    prepared = []
    for path in make_volumes(folder / "source", 3, seed=0, name="source"):
        mask = np.asarray(nib.load(str(path).replace(".nii.gz", "_segmentation.nii.gz")).dataobj)
        prepared.append(prepare(read_volume(path), None, mask))
    images = torch.cat([item.images for item in prepared])
    labels = torch.cat([item.labels for item in prepared])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build_model(pipeline)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network.train()(2 * images - 1), labels).backward()
        optimizer.step()
    path = folder / "weights" / "small.safetensors"
    save_checkpoint(path, network.eval(), make_card(pipeline, ("X0",)))
    return path


def run(volumes, weights, out, *, overrides=(), reports=BARE, **options):
    """Adapt site X (or ``site``) on the CPU with few updates and few reports."""
    chosen = options.pop("site", None) or site()
    texts = (*SMALL, *FEW, *reports, *overrides)
    return adapt_site(chosen, volumes, weights=weights, out=out, device="cpu", overrides=texts, **options)


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder by relative path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def masks(out: Path) -> dict[str, bytes]:
    """Return the bytes of every mask and source mask of a run."""
    parts = ("masks", "source_masks")
    return {f"{part}/{name}": data for part in parts for name, data in files_below(out / part).items()}


def labels(out: Path, name: str, part: str = "masks"):
    """Return one mask of a run as an array."""
    return np.asarray(nib.load(out / part / f"{name}_mask.nii.gz").dataobj)


def record(out: Path) -> dict:
    """Return run.json."""
    return json.loads((out / "run.json").read_text(encoding="utf-8"))


def copy_image(source: Path, target: Path, change=lambda array: array, *, shift_mm=0.0, dtype=np.int16):
    """Write a changed copy of an image; ``shift_mm`` moves its grid along x."""
    image = nib.load(source)
    affine = image.affine.copy()
    affine[0, 3] += shift_mm
    save_image(target, change(np.asarray(image.dataobj)), affine, dtype=dtype)
    return target


def truncate(path: Path, share=0.5):
    """Cut a file off."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
