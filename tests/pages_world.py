"""A working folder that holds, on generated images, everything that the commands of the pages name."""

from __future__ import annotations

import shutil
from pathlib import Path

import small_site as small
import tile_site
import yaml
from nnunet_folder import make_folder

from tesla_med.cli.app import run
from tesla_med.config.files import load_site

ROOT = Path(__file__).resolve().parent.parent
VOLUMES = {"A": 2, "B": 2, "D": 2, "E": 2, "F": 8}
"""Cases of the sites of the prostate pipeline."""
NAMED = """\
institution: G
files:
  image: '{image}'
  masks: [{{pattern: '{mask}', write: 1}}]
"""
MONAI = """\
extends: prostate
model:
  name: monai
  params:
    class_name: UNet
    arguments: {channels: [4, 8], strides: [2], norm: batch}
"""
OF_VOLUMES = (*small.SMALL[2:], *small.FEW, *small.BARE)
"""Without the size of images and network, which the card of the weights says."""
OF_NNUNET = ("protocols.N-O.tesla.updates_per_case=2", "reports=[table]", "guard.enabled=false")
OF_TILES = (*tile_site.SMALL, "reports=[calibration]")


def sets(texts):
    return [word for text in texts for word in ("--set", text)]


def make_world(folder: Path) -> Path:
    """Write images, labels, weights, a study and finished runs under the names of the pages."""
    folder.mkdir()
    _volumes(folder)
    _tiles(folder)
    _weights(folder)
    _others(folder)
    return folder


def _volumes(folder: Path) -> None:
    for number, (name, count) in enumerate(VOLUMES.items()):
        site = load_site(f"prostate/{name}", roots=[ROOT])
        small.make_volumes(folder / "nii" / site.institution, count, seed=number)
        _with_weights(folder, "prostate", name, "source/source.safetensors")
    for image, mask, place in (
        ("{}_T2w.nii.gz", "{}_T2w_seg.nii.gz", "nii/G"),
        ("imagesTr/p_{}.nii.gz", "labelsTr/p_{}.nii.gz", "Task05"),
    ):
        for number, path in enumerate(small.make_volumes(folder / "made", 2, seed=20)):
            own = path.with_name(path.name.replace(".nii.gz", "_segmentation.nii.gz"))
            for source, target in ((path, image), (own, mask)):
                made = folder / place / target.format(f"{number:02d}")
                made.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, made)
    for number, path in enumerate(small.make_volumes(folder / "made", 2, seed=21)):
        (folder / "images").mkdir(exist_ok=True)
        shutil.copy(path, folder / "images" / f"P{number + 1}_0000.nii.gz")
    for place in ("new-images", "incoming"):
        (folder / place).mkdir()
        shutil.copy(path, folder / place / path.name)
    shutil.rmtree(folder / "made")


def _with_weights(folder: Path, pipeline: str, name: str, weights: str) -> None:
    """Write a copy of a site's file that names weights of its own."""
    text = (ROOT / "site_configs" / pipeline / f"{name}.yaml").read_text(encoding="utf-8")
    target = folder / "site_configs" / pipeline / f"{name}.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(yaml.safe_dump(yaml.safe_load(text) | {"weights": weights}), encoding="utf-8")


def write_site_g(folder: Path, page: str) -> None:
    """Write site G as a page describes it."""
    image, mask = ("imagesTr/*.nii.gz", "labelsTr/*.nii.gz")
    if page != "dataset-layouts":
        image, mask = ("*_T2w.nii.gz", "*_T2w_seg.nii.gz")
    target = folder / "site_configs" / "prostate" / "G.yaml"
    target.write_text(NAMED.format(image=image, mask=mask), encoding="utf-8")


def _tiles(folder: Path) -> None:
    for number, name in enumerate(("kather19", "kather16")):
        site = load_site(f"kather/{name}", roots=[ROOT])
        tile_site.make_tiles(folder / "made", 4, seed=number, shift=0.5 * number)
        for own, value in tile_site.FOLDERS.items():
            theirs = next(key for key, label in site.tiles.items() if label == value)
            for path in (folder / "made" / own).iterdir():
                target = folder / "tiles" / site.institution / theirs / f"{own}-{path.name}"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, target)
    _with_weights(folder, "kather", "kather16", "source-tiles/source.safetensors")
    labelled = ("tumour", "stroma", "lymphocytes", "mucosa")
    for own, theirs in zip(("01_TUMOR", "02_STROMA", "04_LYMPHO", "06_MUCOSA"), labelled, strict=True):
        shutil.copytree(folder / "tiles" / "kather16" / own, folder / "labelled-tiles" / theirs)


def _weights(folder: Path) -> None:
    for name, made in (
        ("source", small.train_weights(folder / "trained")),
        ("source-tiles", tile_site.train_weights(folder / "trained-tiles")),
    ):
        (folder / name).mkdir()
        for suffix in (".safetensors", ".json"):
            shutil.copy(made.with_suffix(suffix), folder / name / f"source{suffix}")
    for name in ("source", "elsewhere"):
        for suffix in (".safetensors", ".json"):
            shutil.copy(folder / "source" / f"source{suffix}", folder / f"{name}{suffix}")
    make_folder(folder, spacing=(3.6, 4.6, 4.6))  # that of the images: few patches


def _others(folder: Path) -> None:
    (folder / "pipelines").mkdir()
    (folder / "pipelines" / "my_prostate.yaml").write_text(MONAI, encoding="utf-8")
    study = {"name": "prostate", "volumes": "nii", "sites": ["prostate/D"], "methods": ["source", "bn"]}
    study |= {"weights": ["source/source.safetensors"], "set": list(OF_VOLUMES)}
    (folder / "study.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")


def make_runs(folder: Path) -> None:
    """Make the runs that the pages name; the working folder is ``folder``."""
    volumes = ["adapt", "--site", "F", "--volumes", "nii", "--device", "cpu", "--quiet", *sets(OF_VOLUMES)]
    tiles = ["adapt", "--site", "kather16", "--volumes", "tiles", "--device", "cpu", "--quiet"]
    bare = ["--method", "bn", *sets(["report.max_cases_with_overlays=0"])]
    assert run([*volumes, "--protocol", "N-M", "--out", "runs/F"]) == 0
    mask = next((folder / "runs/F/masks").rglob("*_mask.nii.gz"))
    corrected = folder / "corrected" / mask.relative_to(folder / "runs/F/masks")
    corrected.parent.mkdir(parents=True)
    shutil.copy(mask, corrected)
    assert run([*volumes, "--protocol", "N-O", "--out", "runs/F/tesla-N-O", *bare]) == 0
    write_site_g(folder, "dataset-layouts")
    layout = ["adapt", "--site", "prostate/G", "--volumes", "Task05", "--weights", "source.safetensors"]
    line = [*layout, "--device", "cpu", "--quiet", *sets(OF_VOLUMES), *bare, "--out", "runs/G/tesla-N-O"]
    assert run(line) == 0
    assert run([*tiles, "--out", "runs/kather16", *sets(OF_TILES), "--method", "bn"]) == 0
    rows = (folder / "runs/kather16/predictions.csv").read_text(encoding="utf-8")
    (folder / "other-tool.csv").write_text(rows, encoding="utf-8")
    header, *lines = [line.split(",") for line in rows.splitlines()]
    tile, label = header.index("tile"), header.index("label")
    told = "\n".join(f"{line[tile]},{line[label]}" for line in lines)
    (folder / "labels.csv").write_text(f"tile,label\n{told}\n", encoding="utf-8")
