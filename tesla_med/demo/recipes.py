"""What the demo of each task generates, and what it does differently from the task's pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tesla_med.demo.tiles import FOLDERS, TISSUE_CLASSES, make_tile_site, stain_preset
from tesla_med.demo.volumes import ScannerSettings, Task, make_site, preset

SITES = ("source", "easy", "hard")
POOR = 0.45
"""Dice of a source model that is poor but not lost."""
TERMS = "Generated data, no patient; free to use."


@dataclass(frozen=True)
class Recipe:
    """The demo of one task.

    Attributes:
        pipeline: by name; its sites' folder has the same name.
        overrides: of the pipeline: a narrow network learned from nothing on small images.
        counts: items of the source site (tiles: of each class), and of each other site.
        sites: the source site first.
        shifts: of the hard site, from which that is taken at which the trained model is nearest to ``POOR``.
        make: (folder, site, count, seed, shift) -> writes the images of ``source``, ``easy`` or ``hard``.
        describe: (site) -> what its configuration says beyond institution and terms.
    """

    pipeline: str
    overrides: tuple[str, ...]
    counts: tuple[int, int]
    make: Callable[[Path, str, int, int, float], object]
    describe: Callable[[str], dict[str, Any]]
    sites: tuple[str, ...] = SITES
    shifts: tuple[float, ...] = (1.0,)


_SMALL = (
    "model.params.width=8",
    "preprocessing.size=[64,64]",
    "train.batch_size=12",
    "train.learning_rate=0.01",
    "train.weight_decay=0.0001",
    "train.validate_every=50",
    "train.steps=220",
    "train.augment=mild",  # a model trained to transfer needs no adapting here
    "train.intensity=null",
    "train.held_out_for=1",  # so that the validation is that of the weights
    "report.overlays_per_case=1",
)
_TILE_SIZE = 64  # pixels
_SMALL_TILES = (
    "model.params.width=0.35",
    f"preprocessing.size=[{_TILE_SIZE},{_TILE_SIZE}]",
    "train.steps=200",
    "train.batch_size=32",
    "train.learning_rate=0.004",
    "train.validate_every=200",
    "methods.tesla.weak_views=3",
)


def settings_of(task: Task, site: str, shift: float = 1.0) -> ScannerSettings:
    """Return the scanner of a site of the demo; that of ``noise`` hardly shows anything."""
    if site == "noise":
        return preset(task).model_copy(update={"noise": 1.0, "blur_mm": 1.0})
    return preset(task, site, shift=shift)


def _make_volumes(task: Task, folder: Path, site: str, count: int, seed: int, shift: float) -> object:
    return make_site(folder, task, settings_of(task, site, shift), count, seed=seed)


def _describe_volumes(task: Task, image: str, masks: dict[str, int], site: str) -> dict[str, Any]:
    settings = settings_of(task, site)
    return {
        "description": f"generated images, {site}",
        "scanner": {
            "field_strength_t": settings.field_strength_t,
            "sequence": settings.sequence.replace("_", " "),
            "coil": "endorectal" if settings.endorectal else None,
        },
        "files": {
            "image": image,
            "masks": [{"pattern": name, "write": value} for name, value in masks.items()],
        },
        "region": {"kind": "whole"},
    }


def _make_tiles(folder: Path, site: str, count: int, seed: int, _: float) -> object:
    return make_tile_site(folder, stain_preset(site), count, seed=seed, size=_TILE_SIZE)


def _describe_tiles(site: str) -> dict[str, Any]:
    folders = FOLDERS["kather19"]
    return {
        "description": f"generated H&E tiles, {site}",
        "spacing": "nominal",
        "tiles": {folders[tissue]: index for index, tissue in enumerate(TISSUE_CLASSES)},
    }


RECIPES: dict[str, Recipe] = {
    "prostate": Recipe(
        "prostate",
        _SMALL,
        (12, 4),
        partial(_make_volumes, "prostate"),
        partial(_describe_volumes, "prostate", "Case*.nii.gz", {"*_segmentation.nii.gz": 1}),
        (*SITES, "noise"),
        shifts=(0.65, 0.75, 0.85, 1.0),
    ),
    "spinal_cord": Recipe(
        "spinal_cord",
        _SMALL,
        (12, 4),
        partial(_make_volumes, "spinal_cord"),
        partial(
            _describe_volumes,
            "spinal_cord",
            "*_T2starw.nii.gz",
            {"*_T2starw_seg-manual.nii.gz": 1, "*_T2starw_gmseg-manual.nii.gz": 2},
        ),
    ),
    "kather": Recipe("kather", _SMALL_TILES, (100, 80), _make_tiles, _describe_tiles),
}
