"""The demo on tiles: make three laboratories' H&E, train on one, adapt to the other two."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.demo.tiles import FOLDERS, TISSUE_CLASSES, make_tile_site, stain_preset
from tesla_med.io.files import write_text
from tesla_med.types import Progress

TARGETS = ("easy", "hard")
SOURCE_TILES, TARGET_TILES, TILE_SIZE = 100, 80, 64  # tiles a class, pixels
OVERRIDES: tuple[str, ...] = (
    "model.params.width=0.35",
    f"preprocessing.size=[{TILE_SIZE},{TILE_SIZE}]",
    "train.steps=200",
    "train.batch_size=32",
    "train.learning_rate=0.004",
    "train.validate_every=200",
    "methods.tesla.weak_views=3",
)
"""What the demo does differently from the pipeline: a narrow network learned from nothing on small tiles."""


@dataclass(frozen=True)
class TileDemoRow:
    """One target site: shares of tiles that are right, in [0, 1]."""

    site: str
    tiles: int
    accuracy_source: float
    accuracy: float
    report: Path


@dataclass(frozen=True)
class TileDemoResult:
    """What the demo on tiles did.

    Attributes:
        task: kather.
        out: the folder.
        weights: the source weights.
        validation_accuracy: of the source model on held-out source tiles, in [0, 1].
        rows: one a target site.
        seconds: time in all.
    """

    task: str
    out: Path
    weights: Path
    validation_accuracy: float
    rows: tuple[TileDemoRow, ...]
    seconds: float

    def table(self) -> str:
        """Return the table as text: tiles that are right in percent, source and adapted, a line a site."""
        lines = [f"{'site':<16}{'tiles':>6}{'source':>9}{'adapted':>9}{'change':>9}"]
        for row in self.rows:
            before, after = 100 * row.accuracy_source, 100 * row.accuracy
            lines.append(f"{row.site:<16}{row.tiles:>6}{before:>9.1f}{after:>9.1f}{after - before:>+9.1f}")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return what ``demo.json`` keeps of it."""
        rows = [{**asdict(row), "report": row.report.relative_to(self.out).as_posix()} for row in self.rows]
        return {
            "task": self.task,
            "validation_accuracy": self.validation_accuracy,
            "sites": rows,
            "seconds": self.seconds,
        }


def run_tile_demo(
    folder: Path, device: str, seed: int, tell: Progress
) -> tuple[Path, float, tuple[TileDemoRow, ...]]:
    """Generate tiles, train and adapt below ``folder``, which the caller has checked and cleared.

    Returns:
        The weights, their accuracy on held-out source tiles, and a row a target site.
    """
    from tesla_med.training.tiles import train_tiles

    pipeline = load_pipeline("kather", OVERRIDES)
    sites = {name: _site(folder, name, seed, tell) for name in ("source", *TARGETS)}
    trained = train_tiles(
        pipeline,
        [sites["source"]],
        folder / "volumes",
        folder / "source",
        seed=seed,
        device=device,
        progress=tell,
    )
    rows = tuple(
        _adapt(pipeline, sites[name], trained.weights, folder, device, seed, tell) for name in TARGETS
    )
    return trained.weights, trained.validation_accuracy, rows


def _site(folder: Path, name: str, seed: int, tell: Progress) -> SiteConfig:
    """Write the tiles and the configuration of one site, and return what was written."""
    institution = f"Phantom{name.capitalize()}"
    order = ("source", *TARGETS).index(name)
    make_tile_site(
        folder / "volumes" / institution,
        stain_preset(name),
        SOURCE_TILES if name == "source" else TARGET_TILES,
        seed=1000 * seed + order,
        size=TILE_SIZE,
    )
    folders = FOLDERS["kather19"]
    content = {
        "institution": institution,
        "description": f"generated H&E tiles, {name}",
        "spacing": "nominal",
        "tiles": {folders[tissue]: place for place, tissue in enumerate(TISSUE_CLASSES)},
        "terms": "Generated data, no patient; free to use.",
    }
    path = folder / "site_configs" / "kather" / f"phantom-{name}.yaml"
    write_text(path, yaml.safe_dump(content, sort_keys=False))
    tell("images", order + 1, 1 + len(TARGETS))
    return load_site(str(path))


def _adapt(
    pipeline: PipelineConfig,
    site: SiteConfig,
    weights: Path,
    folder: Path,
    device: str,
    seed: int,
    tell: Progress,
) -> TileDemoRow:
    from tesla_med.tasks.tile_runs import adapt_tiles

    result = adapt_tiles(
        site,
        folder / "volumes",
        pipeline=pipeline,
        weights=weights,
        out=folder / "runs" / site.id,
        seed=seed,
        device=device,
        progress=lambda stage, done, total: tell(f"{site.id}: {stage}", done, total),
    )
    return TileDemoRow(
        site=site.id,
        tiles=result.tiles,
        accuracy_source=result.accuracy_source or 0.0,
        accuracy=result.accuracy or 0.0,
        report=result.out / "report" / "report.html",
    )
