"""The whole loop on generated data: make sites, train a source model, adapt it, compare."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tesla_med import __version__
from tesla_med.config.files import load_pipeline, load_site
from tesla_med.config.models import PipelineConfig, SiteConfig
from tesla_med.config.paths import user_path
from tesla_med.config.request import check_seed
from tesla_med.demo.recipes import POOR, RECIPES, TERMS, Recipe
from tesla_med.errors import ConfigError, OutputError
from tesla_med.io.files import write_json, write_text
from tesla_med.io.locks import in_folder, output_lock
from tesla_med.registry import unknown_name
from tesla_med.types import Progress

DEMO_TASKS: tuple[str, ...] = tuple(RECIPES)
MARKER = "demo.json"
FOLDERS = ("volumes", "site_configs", "source", "runs")


@dataclass(frozen=True)
class DemoRow:
    """One target site: mean of the headline metric over its cases or tiles, in [0, 1].

    ``untrusted`` counts the cases on which the guard trusts no mask.
    """

    site: str
    items: int
    source: float
    adapted: float
    report: Path
    untrusted: int = 0

    @property
    def cases(self) -> int:
        """Number of cases or tiles."""
        return self.items

    @property
    def dice_source(self) -> float:
        """The headline metric of the unadapted model, of volumes their Dice."""
        return self.source

    @property
    def dice(self) -> float:
        """The headline metric after adaptation, of volumes their Dice."""
        return self.adapted


@dataclass(frozen=True)
class DemoResult:
    """What the demo did.

    Attributes:
        task: prostate, spinal_cord or kather.
        out: the folder.
        weights: the source weights.
        metric: name of the headline metric: dice or accuracy.
        item: what is counted: case or tile.
        validation: metric of the source model on held-out source items, in [0, 1].
        rows: one per target site.
        seconds: time in all.
    """

    task: str
    out: Path
    weights: Path
    metric: str
    item: str
    validation: float
    rows: tuple[DemoRow, ...]
    seconds: float

    @property
    def validation_dice(self) -> float:
        """The metric of the source model, of volumes their Dice."""
        return self.validation

    def table(self) -> str:
        """Return the table as text: the metric in percent, source and adapted, one line per site.

        Where the guard trusts no mask of some cases, their number stands in a further column.
        """
        doubts = any(row.untrusted for row in self.rows)
        head = f"{'site':<16}{self.item + 's':>6}{'source':>9}{'adapted':>9}{'change':>9}"
        lines = [head + (f"{'not trusted':>13}" if doubts else "")]
        for row in self.rows:
            before, after = 100 * row.source, 100 * row.adapted
            line = f"{row.site:<16}{row.items:>6}{before:>9.1f}{after:>9.1f}{after - before:>+9.1f}"
            lines.append(line + (f"{row.untrusted:>13}" if doubts else ""))
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """Return what ``demo.json`` keeps of it."""
        rows = [
            {
                "site": row.site,
                f"{self.item}s": row.items,
                f"{self.metric}_source": row.source,
                self.metric: row.adapted,
                "untrusted": row.untrusted,
                "report": row.report.relative_to(self.out).as_posix(),
            }
            for row in self.rows
        ]
        return {
            "task": self.task,
            f"validation_{self.metric}": self.validation,
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
) -> DemoResult:
    """Generate sites, train on the first, adapt to the others, and report.

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
        ConfigError: unknown task, a seed that is none, or the device is not available.
        OutputError: ``out`` holds anything but an earlier demo, or cannot be written.
    """
    from tesla_med.models.base import default_device

    start = time.perf_counter()
    if task not in RECIPES:
        raise ConfigError(unknown_name("demo task", task, list(DEMO_TASKS)))
    check_seed(seed)
    default_device(device)
    folder = user_path(out)
    _check_folder(folder)
    with output_lock(folder):
        _clear(folder)
        write_json(folder / MARKER, {"writer": f"tesla-med {__version__}", "kind": "demo", "complete": False})
        tell = progress or (lambda *_: None)
        result = _run(task, folder, device, seed, tell, lambda: time.perf_counter() - start)
        head = {"writer": f"tesla-med {__version__}", "kind": "demo", "complete": True, "seed": seed}
        write_json(folder / MARKER, head | result.record())
    return result


def _run(
    task: str, folder: Path, device: str, seed: int, tell: Progress, seconds: Callable[[], float]
) -> DemoResult:
    from tesla_med.adapt import adapt_site
    from tesla_med.tasks.base import task_of
    from tesla_med.training.train import train_source

    recipe = RECIPES[task]
    pipeline = load_pipeline(recipe.pipeline, recipe.overrides)
    known = [name for name in recipe.sites if name != "hard"]  # that one's images follow from the model
    sites = {}
    for number, name in enumerate(known, 1):
        sites[name] = _site(folder, recipe, name, seed)
        tell("images", number, len(known))
    volumes, source = folder / "volumes", folder / "source"
    trained = train_source(
        pipeline, [sites["source"]], volumes, source, seed=seed, device=device, progress=tell
    )
    shift = _poor_shift(recipe, pipeline, trained.weights, seed, device)
    sites["hard"] = _site(folder, recipe, "hard", seed, shift)
    rows = []
    for name in recipe.sites[1:]:
        site = sites[name]
        result = adapt_site(
            site,
            volumes,
            pipeline=pipeline,
            weights=trained.weights,
            out=folder / "runs" / site.id,
            seed=seed,
            device=device,
            progress=partial(_tell_of, tell, site.id),
        )
        report = result.out / "report" / "report.html"
        figures = result.mean_source or 0.0, result.mean or 0.0
        untrusted = sum(getattr(item, "trusted", True) is False for item in result.results)
        rows.append(DemoRow(site.id, len(result.results), *figures, report, untrusted))
    return DemoResult(
        *(task, folder, trained.weights, trained.metric, task_of(pipeline).item, trained.validation),
        rows=tuple(rows),
        seconds=seconds(),
    )


def _poor_shift(recipe: Recipe, pipeline: PipelineConfig, weights: Path, seed: int, device: str) -> float:
    """Return the shift of the hard site at which the source model is nearest to ``POOR``.

    How far a model reaches depends on the seed that it was trained with, so a site that is hard for one is
    easy for the next. The choice is made before anything is adapted, and knows the source model alone.
    """
    from tesla_med.adapt import adapt_site

    if len(recipe.shifts) == 1:
        return recipe.shifts[0]
    plain = pipeline.model_copy(update={"reports": ()})
    found = {}
    for shift in recipe.shifts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            site = _site(folder, recipe, "hard", seed, shift)
            result = adapt_site(
                site,
                folder / "volumes",
                pipeline=plain,
                weights=weights,
                out=folder / "run",
                method="source",
                seed=seed,
                device=device,
            )
            found[shift] = result.mean or 0.0
    return min(found, key=lambda shift: abs(found[shift] - POOR))


def _tell_of(tell: Progress, name: str, stage: str, done: int, total: int) -> None:
    tell(f"{name}: {stage}", done, total)


def _site(folder: Path, recipe: Recipe, name: str, seed: int, shift: float = 1.0) -> SiteConfig:
    """Write the images and the configuration of one site, and return what was written."""
    institution, order = f"Phantom{name.capitalize()}", recipe.sites.index(name)
    count = recipe.counts[0 if name == "source" else 1]
    recipe.make(folder / "volumes" / institution, name, count, 1000 * seed + order, shift)
    content = {"institution": institution, **recipe.describe(name), "terms": TERMS}
    path = folder / "site_configs" / recipe.pipeline / f"phantom-{name}.yaml"
    write_text(path, yaml.safe_dump(content, sort_keys=False))
    return load_site(str(path))


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise OutputError(f"{folder}: expected a folder, found a file; choose another output folder")
    held = [item.name for item in in_folder(folder)]
    if held and not _is_demo(folder):
        raise OutputError(
            f"{folder}: holds {', '.join(sorted(held)[:3])} and is not an earlier demo; choose another folder"
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
