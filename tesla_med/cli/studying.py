"""The command that works on many sites: study."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tesla_med.cli.console import Screen, duration
from tesla_med.cli.options import Device, Json, Quiet, Set, TrustCode, Verbose, path
from tesla_med.cli.results import SHOWN
from tesla_med.scoring.text import counted, metric_title, percent, points

app = typer.Typer()


@app.command(epilog="Example: tesla-med study study.yaml --out studies/prostate --jobs 4")
def study(
    file: Annotated[Path, typer.Argument(parser=path, help="STUDY.yaml: what is to be done.")],
    volumes: Annotated[
        Path | None,
        typer.Option(parser=path, help="Common root of the images of all sites. Default: that of the file."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Output folder. Default: studies/<name of the study>.")
    ] = None,
    scheduler: Annotated[
        str,
        typer.Option(
            help="local: processes on this machine; none: this process; tcp://HOST:PORT: a Dask scheduler; "
            "or a YAML file of a SLURM cluster."
        ),
    ] = "local",
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Workers of --scheduler local. Default: one per GPU, or one."),
    ] = None,
    device: Device = "auto",
    trust_code: TrustCode = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells, and which are done; write nothing.")
    ] = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Adapt to many sites: sites x weights x methods x protocols x seeds, on one machine or many (Dask).

    The same command goes on with what is missing.
    """
    from tesla_med.config.study import load_study
    from tesla_med.study.run import run_study, survey_study

    screen = Screen(quiet, verbose, as_json)
    chosen = load_study(file, volumes, tuple(overrides or ()))
    folder = Path("studies") / chosen.name if out is None else out
    common: dict[str, Any] = {"device": device, "trust_code": trust_code}
    with screen.progress() as progress:
        if dry_run:
            grid, done = survey_study(chosen, folder, **common, progress=progress)
        else:
            result = run_study(
                chosen,
                folder,
                scheduler=scheduler,
                jobs=jobs,
                **common,
                progress=progress,
                tell=screen.aside,
            )
    raise typer.Exit(_listed(screen, folder, grid, done) if dry_run else _shown(screen, result))


def _listed(screen: Screen, out: Path, grid: Any, done: frozenset[str]) -> int:
    """List the cells of a study, and return the exit code."""
    rows = [[cell.name, str(cell.count), "done" if cell.name in done else "to do"] for cell in grid.cells]
    screen.table(["cell", "items", "state"], rows)
    for site, reason in grid.problems:
        sys.stderr.write(f"Site {site}: {reason}\n")
    count = sum(cell.name in done for cell in grid.cells)
    screen.say(f"{count} of {counted(len(rows), 'cell')} done in {out}")
    cells = [{**cell.key, "items": cell.count, "done": cell.name in done} for cell in grid.cells]
    problems = [{"site": site, "error": reason} for site, reason in grid.problems]
    screen.result({"out": out, "cells": cells, "sites_without_cells": problems})
    return 1 if problems else 0


def _shown(screen: Screen, result: Any) -> int:
    """Show the outcome of a study, and return the exit code."""
    several = len({line.weights for line in result.summary}) > 1
    metrics = {line.metric for line in result.summary}
    metric = f"{metric_title(metrics.pop())} %" if len(metrics) == 1 else "%"
    columns = ["site", *(["weights"] if several else []), "method", "cells", "cases"]
    columns += [f"source {metric}", f"adapted {metric}", "change", "harmed", "failed", "time"]
    rows = [
        [
            *(line.site, *([line.weights] if several else []), f"{line.method} {line.protocol}"),
            *(str(line.cells), str(line.cases), percent(line.source), percent(line.adapted)),
            *(points(line.change), str(line.harmed), str(line.failed), duration(line.seconds)),
        ]
        for line in result.summary
    ]
    screen.table(columns, rows)
    screen.say(f"{result.done} cells done now, {result.skipped} before, of {result.cells} in {result.out}")
    for written in result.files:
        screen.say(f"Table: {written}")
    for name, text in result.remarks[:SHOWN]:
        sys.stderr.write(f"{name}: {text}\n")
    if len(result.remarks) > SHOWN:
        sys.stderr.write(f"and {len(result.remarks) - SHOWN} more; see study.csv and run.json of the cells\n")
    for name, reason in result.failed[:SHOWN]:
        sys.stderr.write(f"Set aside: {name}: {reason}\n")
    if len(result.failed) > SHOWN:
        sys.stderr.write(f"and {len(result.failed) - SHOWN} more; study.json lists all\n")
    screen.result(
        {
            "out": result.out,
            "cells": result.cells,
            "done": result.done,
            "skipped": result.skipped,
            "failed": dict(result.failed),
            "remarks": [{"cell": name, "text": text} for name, text in result.remarks],
            "summary": [asdict(line) for line in result.summary],
        }
    )
    return 0 if result.complete else 1
