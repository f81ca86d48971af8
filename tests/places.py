"""Sites of every task with data, weights and a finished run, and the shortest line of every command."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import small_site as small
import tile_site
import yaml

from tesla_med.cli.app import run
from tesla_med.config.files import load_pipeline
from tesla_med.tasks.base import TASKS
from tesla_med.training.measure import compute_statistics

SHORT = ("reports=[table]", "train.steps=2", "train.validate_every=1")
DATA = ("adapt", "predict", "train", "statistics", "evaluate", "compare", "study", "sites check")
"""Commands that read images of a user's."""


@dataclass
class Place:
    """A site of one task: data, weights, a finished run, all below one folder."""

    folder: Path
    task: str
    pipeline: str
    settings: tuple[str, ...]

    def sets(self, *more):
        return [word for text in (*self.settings, *more) for word in ("--set", text)]

    def base(self, command, out):
        """Return the words of the shortest useful line of a command."""
        data = ["--volumes", "nii", "--device", "cpu"]
        source = ["--pipeline", self.pipeline, "--sites", "X"]
        known = {
            "adapt": ["--site", f"{self.pipeline}/X", *data, "--weights", "w/source.safetensors"],
            "predict": ["--site", f"{self.pipeline}/X", *data, "--weights", "w/source.safetensors"],
            "train": [*source, *data],
            "statistics": [*source, *data, "--weights", "w/source.safetensors"],
            "compare": [*source, *data, "--weights", "w/source.safetensors"],
            "evaluate": ["--predictions", "done", "--references", "nii"],
            "rollback": [out, "--to-case", "source"],
            "sites check": [f"{self.pipeline}/X", "--volumes", "nii"],
            "demo": ["--device", "cpu"],
            "study": ["study.yaml", "--scheduler", "none", *data],
            "watch": ["nii", "--site", f"{self.pipeline}/X", "--device", "cpu", "--once", "--settle", "0"],
        }[command]
        if command == "watch":
            known = [*known, "--weights", "w/source.safetensors"]
        if command in ("adapt", "predict", "train", "compare", "study", "watch"):
            known = [*known, "--out", out]
        if command == "statistics":
            known = [*known, "--out", f"{out}.statistics.safetensors"]
        if command in ("adapt", "watch"):
            known = [*known, "--method", "source"]
        if command == "compare":
            known = [*known, "--methods", "source", "--seeds", "1"]
        takes_settings = command not in ("evaluate", "rollback", "demo")
        return [*command.split(), *known, *(self.sets() if takes_settings else [])]


def make_place(folder, task):
    """Write a site X with data, quickly trained weights with statistics, and a finished run."""
    folder.mkdir()
    if task == "segmentation":
        small.make_volumes(folder / "nii", 2)
        weights = small.weights_with_statistics(folder)
        place = Place(folder, task, "prostate", (*small.SMALL, *small.FEW, *SHORT))
        site = small.site()
    else:
        tile_site.make_tiles(folder / "nii", 3, seed=3, shift=0.6)
        weights = tile_site.train_weights(folder)
        place = Place(folder, task, "kather", (*tile_site.SMALL, *SHORT))
        site = tile_site.site()
    shutil.copytree(weights.parent, folder / "w", dirs_exist_ok=True)
    weights = folder / "w" / weights.name
    for suffix in (".safetensors", ".json"):
        path = weights.with_suffix(suffix)
        if path.stem != "source":
            shutil.copy(path, path.with_stem("source"))
    config = load_pipeline(place.pipeline, place.settings)
    compute_statistics(folder / "w" / "source.safetensors", config, [site], folder / "nii", device="cpu")
    content = site.model_dump(mode="json", exclude={"id", "pipeline"}, exclude_defaults=True)
    target = folder / "site_configs" / place.pipeline / "X.yaml"
    target.parent.mkdir(parents=True)
    target.write_text(yaml.safe_dump(content), encoding="utf-8")
    study = {"name": "least", "sites": [f"{place.pipeline}/X"], "methods": "source"}
    study |= {"weights": "w/source.safetensors"}
    (folder / "study.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")
    return place


def make_places(folder):
    """Make a place of every task, each with a finished run in ``done``."""
    made = {task: make_place(folder / task, task) for task in TASKS.names()}
    for place in made.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place.folder)
            assert run([*place.base("adapt", "done"), "--method", "bn"]) == 0
    return made
