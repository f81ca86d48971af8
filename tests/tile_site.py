"""Small made-up H&E-like tiles of four classes, two scanners, and quickly trained weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tesla_med.adapt import run_plan
from tesla_med.config.files import load_pipeline
from tesla_med.config.models import SiteConfig
from tesla_med.plan import RunRequest, make_plan
from tesla_med.training.train import train_source

SMALL = (
    *("preprocessing.size=[64,64]", "model.params.width=0.25", "train.steps=120", "train.batch_size=16"),
    "train.learning_rate=0.005",
    *("train.validate_every=20", "methods.tesla.batch_slices=8", "methods.tesla.weak_views=2"),
    *("protocols.N-M.tesla.epochs=1", "protocols.N-M.tesla.batch_slices=8"),
)
FOLDERS = {"TUM": 0, "STR": 1, "LYM": 2, "NORM": 3}
COLOURS = ((150, 60, 140), (230, 150, 180), (90, 60, 150), (210, 170, 200))
_TRAINED: list[Path] = []


def site(**changes) -> SiteConfig:
    """Return a site of tiles."""
    content = {
        "id": "X",
        "pipeline": "kather",
        "institution": "Nowhere",
        "tiles": FOLDERS,
        "terms": "Generated.",
    }
    return SiteConfig(**(content | changes))


def make_tiles(folder: Path, count=8, *, seed=0, shift=0.0, size=64) -> list[Path]:
    """Write ``count`` tiles a class: a colour and a texture each; ``shift`` darkens them like a scanner."""
    generator = torch.Generator().manual_seed(seed)
    paths = []
    for (name, _), colour, period in zip(FOLDERS.items(), COLOURS, (3, 12, 5, 20), strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            grid = torch.arange(size) * (2 * np.pi / period)
            phase = 6.3 * torch.rand(2, generator=generator)
            waves = torch.sin(grid[:, None] + phase[0]) * torch.sin(grid[None] + phase[1])
            noise = torch.randn(size, size, 3, generator=generator)
            array = torch.tensor(colour) + 25 * waves[..., None] + 8 * noise
            array = 255 * (array.clamp(0, 255) / 255) ** (1 + shift) * (1 - 0.3 * shift)
            path = folder / name / f"{index}.png"
            Image.fromarray(array.round().numpy().astype(np.uint8)).save(path)
            paths.append(path)
    return paths


def make_network(name: str, seed=0):
    """Return a small classifier of four classes, its running statistics settled on noise."""
    from tesla_med.models.base import MODELS

    kind = MODELS.get(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = kind.build(kind.Params.model_validate(kind.example), 3, 4)
    images = make_batch(6, seed=100 + seed)
    with torch.no_grad():
        for _ in range(4):
            network.train()(2 * images - 1)
    return network.eval()


def make_batch(count: int, seed=0, size=32) -> torch.Tensor:
    """Return tiles (count, 3, size, size) in [0, 1]: smooth colours and some noise."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    return (smooth + 0.1 * torch.randn(smooth.shape, generator=generator)).clamp(0, 1)


def adapt_tiles(site, folder, *, resume=False, overwrite=False, carry=None, progress=None, **options):
    """Adapt to tiles; ``carry`` as of ``run_plan``."""
    plan = make_plan(RunRequest(site, folder, **options))
    return run_plan(plan, resume=resume, overwrite=overwrite, carry=carry, progress=progress)


def read(result):
    """Return how many tiles were read."""
    return sum(item.probs is not None for item in result.results)


def train_weights(folder: Path) -> Path:
    """Return weights trained once a session."""
    if not _TRAINED:
        make_tiles(folder / "source", 12, seed=7)
        result = train_source(
            load_pipeline("kather", SMALL), [site()], folder / "source", folder / "out", device="cpu"
        )
        _TRAINED.append(result.weights)
    return _TRAINED[0]
