"""Make the pictures of docs/gallery.md: the pages that a run, a comparison, a study and a watch write.

Example::

    python benchmarks/gallery.py --out docs/images

A small network is trained on generated prostates, and everything else is done with it on images of 64 x 64 x
8 voxels, so figures on the pictures say nothing about real data. Needs Chromium, which takes the pictures.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml
from PIL import Image

from tesla_med.cli.app import run
from tesla_med.demo.volumes import make_site, preset

SITES = {"alpha": 0.2, "beta": 0.6}
SITE = {
    "institution": "Generated",
    "files": {"image": "Case*.nii.gz", "masks": [{"pattern": "*_segmentation.nii.gz", "write": 1}]},
    "terms": "Generated data.",
}
SMALL = (
    *("preprocessing.size=[64,64]", "model.params.width=8", "train.batch_size=8"),
    *("train.steps=150", "train.validate_every=50"),
)
FEW = ("protocols.N-O.tesla.updates_per_case=4", "report.max_cases_with_overlays=2")
PICTURES = {
    "report": ("runs/beta/report/report.html", 1500),
    "comparison": ("comparison/comparison.html", 1300),
    "study": ("study/study.html", 560),
    "watch": ("watched/watch.html", 1250),
}
"""Page and height in pixels by picture."""
WIDTH, COLOURS = 1200, 96


def sets(texts: Sequence[str]) -> list[str]:
    """Return the words that set settings."""
    return [word for text in texts for word in ("--set", text)]


def images(folder: Path, strength: float, count: int, seed: int, *, references: bool = True) -> None:
    """Write generated images of a scanner so far on the way to the preset ``hard``."""
    settings = preset("prostate", "hard", shift=strength).model_copy(update={"matrix": 64, "slices": 8})
    make_site(folder, "prostate", settings, count, seed)
    if not references:
        for path in folder.glob("*_segmentation.nii.gz"):
            path.unlink()


def do(*words: str, allowed: Sequence[int] = (0,)) -> None:
    """Run a command of tesla-med.

    Raises:
        RuntimeError: it failed.
    """
    if run([*words, "--quiet"]) not in allowed:
        raise RuntimeError(f"tesla-med {' '.join(words)} failed")


def make_pages() -> None:
    """Train, adapt, compare, study and watch in the working folder."""
    device = ["--device", "cpu"]
    for number, (name, strength) in enumerate({"source": 0.0, **SITES}.items()):
        images(Path("nii", name), strength, 4, number)
        target = Path("site_configs", "prostate", f"{name}.yaml")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(yaml.safe_dump(SITE | {"institution": name}), encoding="utf-8")
    data = ["--volumes", "nii", *device]
    do(
        "train",
        "--pipeline",
        "prostate",
        "--sites",
        "prostate/source",
        *data,
        "--out",
        "source",
        *sets(SMALL),
    )
    weights = ["--weights", "source/source.safetensors"]
    do("adapt", "--site", "prostate/beta", *data, *weights, "--out", "runs/beta", *sets(FEW))
    methods = ["--methods", "source,bn,tent,tesla", "--seeds", "1", "--out", "comparison"]
    places = ["--pipeline", "prostate", "--sites", ",".join(SITES)]
    do("compare", *places, *data, *weights, *methods, *sets(FEW))
    study = {"name": "gallery", "volumes": "nii", "sites": [f"prostate/{name}" for name in SITES]}
    study |= {"weights": weights[1], "methods": ["source", "bn", "tesla"], "set": list(FEW)}
    Path("study.yaml").write_text(yaml.safe_dump(study), encoding="utf-8")
    do("study", "study.yaml", "--scheduler", "none", "--out", "study", *device)
    bare = [*sets([*FEW[:1], "reports=[table]"]), "--settle", "0", "--once", "--out", "watched", *device]
    for number, strength in enumerate((0.0, 0.0, 0.0, 0.25)):
        images(Path("new"), strength, 20, 10 + number, references=False)
        Path("incoming").mkdir(exist_ok=True)
        for path in Path("new").iterdir():
            shutil.move(path, Path("incoming", path.name.replace("Case", f"Case{number}")))
        do("watch", "incoming", "--site", "prostate/alpha", *weights, "--method", "bn", *bare)


def picture(page: Path, target: Path, height: int) -> None:
    """Take a picture of a page, with few colours so that it is small.

    Raises:
        RuntimeError: there is no Chromium, or it took none.
    """
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        raise RuntimeError("Chromium is needed to take the pictures")
    size = f"--window-size={WIDTH},{height}"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", size]
    words = [browser, *flags, f"--screenshot={target.resolve()}", page.resolve().as_uri()]
    subprocess.run(words, check=True, capture_output=True, timeout=120)  # noqa: S603
    with Image.open(target) as image:
        small = image.convert("RGB").quantize(COLOURS)
    small.save(target, optimize=True)


def main() -> None:
    """Make the pages and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--keep", type=Path, help="folder of the pages; default: one that is removed")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        make_pages()
        for name, (page, height) in PICTURES.items():
            picture(folder / page, out / f"gallery-{name}.png", height)
            print(f"{name}: {(out / f'gallery-{name}.png').stat().st_size / 1000:.0f} kB")
        os.chdir(out)


if __name__ == "__main__":
    sys.exit(main())
