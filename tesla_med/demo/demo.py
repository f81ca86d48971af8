"""The whole loop on generated data: make sites, train a source, adapt it, compare."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from tesla_med import __version__
from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.demo.tile_demo import TileDemoResult, run_tile_demo
from tesla_med.demo.volumes import TASKS, Task, make_site, preset
from tesla_med.errors import ConfigError, OutputError
from tesla_med.io.files import LOCK_NAME, output_lock, write_json, write_text
from tesla_med.registry import unknown_name
from tesla_med.types import Progress

DEMO_TASKS: tuple[str, ...] = (*TASKS, "kather")
MARKER = "demo.json"
FOLDERS = ("volumes", "site_configs", "source", "runs")
TARGETS = ("easy", "hard")
SOURCE_CASES, TARGET_CASES = 12, 4


@dataclass(frozen=True)
class Recipe:
    """What the demo of one task does differently from the task's pipeline."""

    overrides: tuple[str, ...]
    masks: tuple[dict[str, Any], ...]
    image: str
    region: dict[str, Any]


_SMALL = (
    "model.params.width=8",
    "preprocessing.size=[64,64]",
    "train.batch_size=12",
    "train.learning_rate=0.01",
    "train.weight_decay=0.0001",
    "train.validate_every=50",
    "train.steps=220",
    "report.overlays_per_case=1",
)
RECIPES: dict[Task, Recipe] = {
    "prostate": Recipe(
        overrides=_SMALL,
        image="Case*.nii.gz",
        masks=({"pattern": "*_segmentation.nii.gz", "write": 1},),
        region={"kind": "whole"},
    ),
    "spinal_cord": Recipe(
        overrides=_SMALL,
        image="*_T2starw.nii.gz",
        masks=(
            {"pattern": "*_T2starw_seg-manual.nii.gz", "write": 1},
            {"pattern": "*_T2starw_gmseg-manual.nii.gz", "write": 2},
        ),
        region={"kind": "whole"},
    ),
}


@dataclass(frozen=True)
class DemoRow:
    """One target site: mean over cases of the mean foreground Dice, in [0, 1]."""

    site: str
    cases: int
    dice_source: float
    dice: float
    report: Path


@dataclass(frozen=True)
class DemoResult:
    """What the demo did.

    Attributes:
        task: prostate or spinal_cord.
        out: the folder.
        weights: the source weights.
        validation_dice: of the source model on held-out source cases, in [0, 1].
        rows: one a target site.
        seconds: time in all.
    """

    task: str
    out: Path
    weights: Path
    validation_dice: float
    rows: tuple[DemoRow, ...]
    seconds: float

    def table(self) -> str:
        """Return the table as text: Dice in percent, source and adapted, a line a site."""
        lines = [f"{'site':<16}{'cases':>6}{'source':>9}{'adapted':>9}{'change':>9}"]
        for row in self.rows:
            before, after = 100 * row.dice_source, 100 * row.dice
            lines.append(f"{row.site:<16}{row.cases:>6}{before:>9.1f}{after:>9.1f}{after - before:>+9.1f}")
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return what ``demo.json`` keeps of it."""
        rows = [{**asdict(row), "report": row.report.relative_to(self.out).as_posix()} for row in self.rows]
        return {
            "task": self.task,
            "validation_dice": self.validation_dice,
            "sites": rows,
            "seconds": self.seconds,
        }


def run_demo(
    task: str = "prostate",
    out: str | Path = "demo",
    *,
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
) -> DemoResult | TileDemoResult:
    """Generate three sites, train on the first, adapt to the other two, and report.

    ``OUT`` receives ``volumes/<Site>/``, ``site_configs/<task>/<id>.yaml``, ``source/`` (weights)
    and ``runs/<id>/`` (masks or predictions, and reports), and ``demo.json``. An earlier demo there is
    replaced.

    Args:
        task: ``"prostate"``, ``"spinal_cord"`` or ``"kather"`` (H&E tiles).
        out: a new or empty folder, or that of an earlier demo.
        device: auto, cpu or cuda.
        seed: of the images, the training and the adaptation.
        progress: called with (stage, done, total).

    Raises:
        ConfigError: unknown task, or the device is not available.
        OutputError: ``out`` holds anything but an earlier demo, or cannot be written.
    """
    from tesla_med.models.base import default_device

    start = time.perf_counter()
    if task not in DEMO_TASKS:
        raise ConfigError(unknown_name("demo task", task, list(DEMO_TASKS)))
    default_device(device)
    folder = Path(out)
    _check_folder(folder)
    with output_lock(folder):
        _clear(folder)
        write_json(folder / MARKER, {"writer": f"tesla-med {__version__}", "kind": "demo", "complete": False})
        tell = progress or (lambda stage, done, total: None)
        result: DemoResult | TileDemoResult
        if task == "kather":
            weights, accuracy, tile_rows = run_tile_demo(folder, device, seed, tell)
            result = TileDemoResult(task, folder, weights, accuracy, tile_rows, time.perf_counter() - start)
        else:
            known = next(item for item in TASKS if item == task)
            weights, dice, rows = _run_volumes(known, folder, device, seed, tell)
            result = DemoResult(task, folder, weights, dice, rows, time.perf_counter() - start)
        head = {"writer": f"tesla-med {__version__}", "kind": "demo", "complete": True, "seed": seed}
        write_json(folder / MARKER, head | result.record())
    return result


def _run_volumes(
    task: Task, folder: Path, device: str, seed: int, tell: Progress
) -> tuple[Path, float, tuple[DemoRow, ...]]:
    pipeline = load_pipeline(task, RECIPES[task].overrides)
    sites = {name: _site(folder, task, name, seed, tell) for name in ("source", *TARGETS)}
    weights, validation = _train(pipeline, sites["source"], folder, device, seed, tell)
    rows = tuple(_adapt(pipeline, sites[name], weights, folder, device, seed, tell) for name in TARGETS)
    return weights, validation, rows


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError(f"{folder}: expected a folder, found a file; choose another output folder")
    held = [item.name for item in folder.iterdir() if item.name != LOCK_NAME]
    if held and not _is_demo(folder):
        raise OutputError(
            f"{folder}: holds {', '.join(sorted(held)[:3])} and is no earlier demo; choose another folder"
        )


def _is_demo(folder: Path) -> bool:
    try:
        content = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("kind") == "demo"


def _clear(folder: Path) -> None:
    """Remove what an earlier demo made, and nothing else."""
    try:
        for name in FOLDERS:
            path = folder / name
            if path.is_symlink():
                path.unlink()
            elif path.exists():
                shutil.rmtree(path)
        (folder / MARKER).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: the earlier demo cannot be removed: {error}") from None


def _site(folder: Path, task: Task, name: str, seed: int, tell: Progress) -> SiteConfig:
    """Write the images and the configuration of one site, and return what was written."""
    recipe, settings = RECIPES[task], preset(task, name)
    institution = f"Phantom{name.capitalize()}"
    count = SOURCE_CASES if name == "source" else TARGET_CASES
    order = ("source", *TARGETS).index(name)
    make_site(folder / "volumes" / institution, task, settings, count, seed=1000 * seed + order)
    content = {
        "institution": institution,
        "description": f"generated images, {name}",
        "scanner": {
            "field_strength_t": settings.field_strength_t,
            "sequence": settings.sequence.replace("_", " "),
            "coil": "endorectal" if settings.endorectal else None,
        },
        "files": {"image": recipe.image, "masks": [dict(layer) for layer in recipe.masks]},
        "region": recipe.region,
        "terms": "Generated data, no patient; free to use.",
    }
    path = folder / "site_configs" / task / f"phantom-{name}.yaml"
    write_text(path, yaml.safe_dump(content, sort_keys=False))
    tell("images", order + 1, 1 + len(TARGETS))
    return load_site(str(path))


def _train(
    pipeline: PipelineConfig, site: SiteConfig, folder: Path, device: str, seed: int, tell: Progress
) -> tuple[Path, float]:
    from tesla_med.training.train import train_source

    result = train_source(
        pipeline, [site], folder / "volumes", folder / "source", seed=seed, device=device, progress=tell
    )
    return result.weights, result.validation_dice


def _adapt(
    pipeline: PipelineConfig,
    site: SiteConfig,
    weights: Path,
    folder: Path,
    device: str,
    seed: int,
    tell: Progress,
) -> DemoRow:
    from tesla_med.adapt import adapt_site

    result = adapt_site(
        site,
        folder / "volumes",
        pipeline=pipeline,
        weights=weights,
        out=folder / "runs" / site.id,
        seed=seed,
        device=device,
        progress=lambda stage, done, total: tell(f"{site.id}: {stage}", done, total),
    )
    return DemoRow(
        site=site.id,
        cases=len(result.results),
        dice_source=result.mean_dice_source or 0.0,
        dice=result.mean_dice or 0.0,
        report=result.out / "report" / "report.html",
    )
