"""Small studies: two sites with one common root, a study file, and what was written of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import small_site as small
import yaml

from tesla_med.cli.app import run

SITES = {"alpha": "easy", "beta": "hard"}
SITE = """\
institution: {name}
files:
  image: Case*.nii.gz
  masks:
    - {{pattern: '*_segmentation.nii.gz', write: 1}}
"""
SETTINGS = [*small.SMALL, *small.FEW, *small.BARE]


def make_sites(folder: Path, count=1, names=tuple(SITES)) -> None:
    """Write volumes below nii/<site>/ and a site file for each."""
    for place, name in enumerate(names):
        small.make_volumes(folder / "nii" / name, count, seed=3 + place, name=SITES.get(name, "easy"))
        path = folder / "site_configs" / "prostate" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SITE.format(name=name), encoding="utf-8")


def write_study(folder: Path, source: Path, name="study.yaml", **changes) -> Path:
    """Write a study of 8 cells: two sites, bn and tesla, N-O and N-M (bn has one seed, tesla one)."""
    content = {
        "name": "small",
        "volumes": "nii",
        "sites": ["prostate/alpha", "prostate/beta"],
        "weights": str(source),
        "methods": ["bn", "tesla"],
        "protocols": ["N-O", "N-M"],
        "seeds": [0],
        "set": SETTINGS,
        **changes,
    }
    path = folder / name
    kept = {key: value for key, value in content.items() if value is not None}
    path.write_text(yaml.safe_dump(kept), encoding="utf-8")
    return path


def rows(out: Path) -> list[dict[str, str]]:
    """Return study.csv without its times."""
    with (out / "study.csv").open(encoding="utf-8", newline="") as stream:
        return [
            {key: value for key, value in row.items() if key != "seconds"} for row in csv.DictReader(stream)
        ]


def record(out: Path) -> dict:
    """Return study.json."""
    return json.loads((out / "study.json").read_text(encoding="utf-8"))


def results(out: Path) -> dict[str, bytes]:
    """Return the bytes of every mask, table of metrics and adapted weights of a study."""
    found = small.files_below(out / "cells")
    return {
        name: data
        for name, data in found.items()
        if name.endswith((".nii.gz", "metrics.csv", ".safetensors", "labels.json"))
    }


def do_study(folder: Path, weights: Path) -> Path:
    """Do the study of 8 cells in this process, in ``folder``/one, and return ``folder``."""
    make_sites(folder)
    write_study(folder, weights)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(["study", "study.yaml", "--scheduler", "none", "--device", "cpu", "--out", "one"]) == 0
    return folder
