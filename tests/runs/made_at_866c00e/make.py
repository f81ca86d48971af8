"""Make the folders of ``runs.tar.xz`` as version 866c00e wrote them: volumes, their weights, three runs.

    git worktree add ../earlier 866c00e
    cd ../earlier && PYTHONPATH=$PWD:$PWD/tests python <this file> OUT

One run resets the state per case, one per site; both are killed after the second of three cases. The third
is of tiles and finished. A later version must read, resume and undo them.
"""

import os
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import small_site as small
import tile_site
import torch
from tesla_med.configfiles import load_pipeline
from tesla_med.tile_runs import adapt_tiles

from tesla_med.adapt import adapt_site
from tesla_med.models import checkpoint
from tesla_med.models.base import build_model

NARROW = (*small.SMALL, "model.params.width=1", *small.FEW, *small.BARE)
TILES = (*tile_site.SMALL, "model.params.width=0.05")
CASES, DONE = 3, 2
PICTURES = ("report/report.html", "report/reliability.png", "report/uncertain.png", "tensorboard")
"""What is left out of the archive because of its size."""


class Killed(BaseException):
    """What stops a run in its middle."""


def killed_after(count):
    """Return a progress function that stops the run once ``count`` units are done."""

    def progress(stage, done, total):
        if done >= count and stage == "cases":
            raise Killed

    return progress


def save(path, name, overrides):
    """Write weights of a new network; those of a large one are +-std, so that they compress well."""
    pipeline = load_pipeline(name, overrides)
    torch.manual_seed(0)
    network = build_model(pipeline)
    for parameter in network.parameters() if name == "kather" else ():
        if parameter.ndim > 1:
            parameter.data = parameter.data.std() * parameter.data.sign()
    images = 2 * torch.rand(4, pipeline.channels, 32, 32) - 1
    for _ in range(8):
        network.train()(images)
    checkpoint.save_checkpoint(path, network.eval(), checkpoint.make_card(pipeline, ("X0",)))


def main(out):
    """Write everything below ``out`` and pack it."""
    out.mkdir(parents=True)
    os.chdir(out)
    small.make_volumes(Path("volumes"), CASES, name="easy")
    save(Path("weights.safetensors"), "prostate", NARROW)
    for reset in ("case", "site"):
        with suppress(Killed):
            adapt_site(
                small.site(),
                "volumes",
                weights="weights.safetensors",
                out=reset,
                device="cpu",
                overrides=NARROW,
                reset=reset,
                progress=killed_after(DONE),
            )
    tile_site.make_tiles(Path("tiles"), 6, size=32)
    save(Path("tiles.safetensors"), "kather", TILES)
    adapt_tiles(
        tile_site.site(), "tiles", weights="tiles.safetensors", out="stream", device="cpu", overrides=TILES
    )
    with tarfile.open("../runs.tar.xz", "w:xz") as archive:
        archive.add(
            ".", filter=lambda item: None if item.name.removeprefix("./stream/") in PICTURES else item
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
