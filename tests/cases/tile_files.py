"""Pictures for the tests of tiles, and what the source model makes of them."""

from __future__ import annotations

import csv

import numpy as np
import torch
from lines import adapt, write_site


def smooth(size=64, seed=0):
    """Return a smooth 8-bit RGB picture (H, W, 3)."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear")
    return (255 * fine[0].permute(1, 2, 0)).round().numpy().astype(np.uint8)


def classify(folder, weights, monkeypatch, *more):
    """Run the source model on the tiles below nii/; return the exit code and predictions.csv by tile."""
    write_site(folder, "kather")
    monkeypatch.chdir(folder)
    code = adapt(weights, "--method", "source", *more, pipeline="kather")
    with (folder / "out/predictions.csv").open(encoding="utf-8", newline="") as stream:
        return code, {row["tile"]: row for row in csv.DictReader(stream)}


def probabilities(row):
    """Return the probabilities of a tile as numbers."""
    return np.array([float(value) for name, value in row.items() if name.startswith("p_")])


def tiles(folder):
    """Return the folder nii/ for tiles without labels."""
    (folder / "nii").mkdir()
    return folder / "nii"
