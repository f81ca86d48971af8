"""Commands that make models: demo, train, statistics."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from shutil import which
from typing import Annotated

import typer

from tesla_med.cli.console import Screen
from tesla_med.cli.options import (
    Device,
    Json,
    Overwrite,
    Pipeline,
    Quiet,
    Resume,
    Seed,
    Set,
    Verbose,
    Volumes,
    choice,
    load_sites,
    path,
)
from tesla_med.scoring.text import change, metric_title, percent

app = typer.Typer()


@app.command(epilog="Example: tesla-med demo --task spinal_cord --out demo-cord")
def demo(
    task: Annotated[str, typer.Option(help="prostate, spinal_cord or kather (tiles).")] = "prostate",
    out: Annotated[
        Path, typer.Option(parser=path, help="Output folder; an earlier demo there is replaced.")
    ] = Path("demo"),
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Show the whole workflow on generated data: train, adapt, report. About 3 minutes on 2 idle cores."""
    from tesla_med.demo.demo import DEMO_TASKS, run_demo

    choice("--task", task, DEMO_TASKS)
    screen = Screen(quiet, verbose, as_json)
    screen.say(f"Generating {task} sites, training on the first, adapting to the others ...")
    with screen.progress() as progress:
        result = run_demo(task, out, device=device, progress=progress)
    metric = metric_title(result.metric)
    rows = [
        [row.site, str(row.items), percent(row.source), percent(row.adapted), change(row.source, row.adapted)]
        for row in result.rows
    ]
    columns = ["site", f"{result.item}s", f"source {metric} %", f"adapted {metric} %", "change"]
    if any(row.untrusted for row in result.rows):
        columns.append("not trusted")
        rows = [[*cells, str(row.untrusted)] for cells, row in zip(rows, result.rows, strict=True)]
    screen.table(columns, rows)
    screen.say(
        f"Took {result.seconds:.0f} s. The data are generated: the figures say nothing about real scanners."
    )
    for row in result.rows:
        screen.say(f"Report of {row.site}: {row.report}")
    screen.say(f"Curves: {_program()} tensorboard {result.out}")
    screen.result({"out": result.out, "weights": result.weights, **result.record()})


def _program() -> str:
    """Return how this program is called: by its path where the virtual environment is not active."""
    beside = Path(sys.executable).with_name("tesla-med")
    active = which("tesla-med") is not None or not beside.is_file()
    return "tesla-med" if active else os.path.relpath(beside)


@app.command(epilog="Example: tesla-med train --pipeline prostate --sites A,B --volumes ./nii --out source")
def train(
    pipeline: Annotated[str, typer.Option(help="Pipeline by name, or a YAML file.")],
    sites: Annotated[str, typer.Option(help="Labelled source sites, separated by commas.")],
    volumes: Volumes,
    out: Annotated[Path, typer.Option(parser=path, help="Output folder.")],
    width: Annotated[
        int | None,
        typer.Option(min=1, help="Width of the network, model.params.width. Default: the pipeline's."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: the pipeline's.")] = None,
    seed: Seed = 0,
    device: Device = "auto",
    resume: Resume = False,
    overwrite: Overwrite = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Train a source model on labelled sites; save weights, card and feature statistics."""
    from tesla_med.config.files import load_pipeline
    from tesla_med.training.train import train_source

    screen = Screen(quiet, verbose, as_json)
    shortcuts = [f"model.params.width={width}"] if width else []
    shortcuts += [f"train.steps={steps}"] if steps else []
    texts = (*shortcuts, *(overrides or ()))
    config = load_pipeline(pipeline, texts)
    with screen.progress() as progress:
        result = train_source(
            config,
            load_sites(sites, config.sites, texts),
            volumes,
            out,
            seed=seed,
            device=device,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
    metric = metric_title(result.metric)
    where = "held-out" if result.validation_cases else "training"
    joined = result.validation_step < result.best_step
    then = "; after it they were trained on too" if joined else ""
    screen.say(
        f"{metric} on {where} data: {percent(result.validation)} % at step {result.validation_step}{then}."
    )
    if result.left_out:
        screen.say(f"Left out: {len(result.left_out)}, listed in train.json; the first: {result.left_out[0]}")
    screen.say(f"Weights: {result.weights}")
    screen.say(f"Feature statistics: {result.statistics}")
    screen.result({**vars(result), f"validation_{result.metric}": result.validation})


@app.command(epilog="Example: tesla-med statistics --weights source.safetensors --sites A --volumes ./nii")
def statistics(
    weights: Annotated[Path, typer.Option(parser=path, help="Source weights.")],
    sites: Annotated[str, typer.Option(help="Labelled source sites, separated by commas.")],
    volumes: Volumes,
    pipeline: Pipeline = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Output file. Default: beside the weights.")
    ] = None,
    device: Device = "auto",
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Measure the source feature statistics of existing weights."""
    from tesla_med.config.resolve import resolve
    from tesla_med.training.measure import compute_statistics

    screen = Screen(quiet, verbose, as_json)
    texts = tuple(overrides or ())
    first = sites.split(",")[0].strip()
    _, config = resolve(first, pipeline, texts, weights)
    with screen.progress() as progress:
        path = compute_statistics(
            weights, config, load_sites(sites, config.sites, texts), volumes, out, device, progress=progress
        )
    screen.say(f"Feature statistics: {path}")
    screen.result({"statistics": path})
