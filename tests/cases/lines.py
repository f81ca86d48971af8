"""Command lines over small sites of volumes and of tiles, with the site file that they need."""

from __future__ import annotations

import sys
from unittest.mock import patch

import small_site as small
import tile_site

from tesla_med.__main__ import main

VOLUMES = """\
institution: Nowhere
files:
  image: Case*.nii.gz
  masks:
    - {pattern: '*_segmentation.nii.gz', write: 1}
"""
TILES = """\
institution: Nowhere
tiles: {TUM: 0, STR: 1, LYM: 2, NORM: 3}
"""


def run(words):
    """Run a command line in this process, as ``python -m tesla_med`` would; return its exit code."""
    with patch.object(sys, "argv", ["tesla-med", *map(str, words)]):
        try:
            main()
        except SystemExit as stop:
            return stop.code or 0
    return 0


def write_site(folder, pipeline="prostate", text=None):
    """Write site X of a pipeline into a working folder; return the path of its file."""
    path = folder / "site_configs" / pipeline / "X.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text or {"prostate": VOLUMES, "kather": TILES}[pipeline], encoding="utf-8")
    return path


def work_there(folder, monkeypatch, count):
    """Make a folder with volumes below nii/ and their site, and change into it."""
    small.make_volumes(folder / "nii", count)
    write_site(folder)
    monkeypatch.chdir(folder)
    return folder


def sets(*texts):
    """Return the words that give settings."""
    return [word for text in texts for word in ("--set", text)]


def adapt(weights, *more, pipeline="prostate", reports="[table]", out="out"):
    """Adapt site X, below nii/, quickly; return the exit code."""
    texts = (*small.SMALL, *small.FEW) if pipeline == "prostate" else tile_site.SMALL
    words = ["adapt", "--site", f"{pipeline}/X", "--volumes", "nii", "--weights", str(weights)]
    words += ["--out", out, "--device", "cpu", *sets(*texts, f"reports={reports}")]
    return run([*words, *map(str, more)])
