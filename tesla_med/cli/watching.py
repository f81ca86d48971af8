"""The command that goes on: watch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tesla_med.cli.console import Screen
from tesla_med.cli.options import (
    Device,
    Json,
    Method,
    Pipeline,
    Quiet,
    SaveProbs,
    SaveUncertainty,
    Seed,
    Set,
    SiteOption,
    Statistics,
    TrustCode,
    Verbose,
    Weights,
    choice,
    path,
)
from tesla_med.scoring.text import counted

app = typer.Typer()


@app.command(epilog="Example: tesla-med watch incoming --site F --weights source.safetensors --out watched/F")
def watch(
    folder: Annotated[Path, typer.Argument(parser=path, help="Folder that images are copied into.")],
    site: SiteOption = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Output folder. Default: runs/<site>/watch.")
    ] = None,
    pipeline: Pipeline = None,
    weights: Weights = None,
    trust_code: TrustCode = False,
    statistics: Statistics = None,
    method: Method = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="As of adapt; every case starts from the source model. Default: the pipeline's."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    guard: Annotated[
        bool | None,
        typer.Option("--guard/--no-guard", help="As of adapt. Default: the pipeline's."),
    ] = None,
    save_probs: SaveProbs = False,
    save_uncertainty: SaveUncertainty = False,
    once: Annotated[bool, typer.Option("--once", help="Do what is there, and end.")] = False,
    poll: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks into the folder.")] = 30.0,
    settle: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds for which the files of a case must not have changed."),
    ] = 30.0,
    reference: Annotated[
        int, typer.Option(help="First cases, with which later ones are compared to notice a drift.")
    ] = 40,
    window: Annotated[int, typer.Option(help="Latest cases that are compared with the first.")] = 20,
    no_lock: Annotated[
        bool,
        typer.Option("--no-lock", help="Do not lock the output folder; see to it that nobody else uses it."),
    ] = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Adapt to every case that comes into a folder, once, and notice when the site drifts; end with Ctrl-C.

    The same command goes on after a restart.
    """
    from tesla_med.config.models import PROTOCOLS
    from tesla_med.config.request import RunRequest
    from tesla_med.watch.watcher import watch_folder

    screen = Screen(quiet, verbose, as_json)
    request = RunRequest(
        site,
        folder,
        weights=weights,
        statistics=statistics,
        pipeline=pipeline,
        method=method,
        protocol=choice("--protocol", protocol, PROTOCOLS),
        out=out,
        seed=seed,
        device=device,
        guard=guard,
        save_probs=save_probs,
        save_uncertainty=save_uncertainty,
        overrides=tuple(overrides or ()),
        lock=not no_lock,
        trust_code=trust_code,
    )

    def tell(text: str) -> None:
        screen.say(text)
        sys.stdout.flush()  # a service's log shows it at once

    with screen.progress() as progress:
        result = watch_folder(
            request,
            once=once,
            poll=poll,
            settle=settle,
            reference=reference,
            window=window,
            progress=progress,
            tell=tell,
        )
    raise typer.Exit(_shown(screen, result))


def _shown(screen: Screen, result: Any) -> int:
    """Show what was done, and return the exit code."""
    done = f"{counted(len(result.done), 'case')} done now, {len(result.seen)} in all"
    screen.say(f"{'Stopped: ' if result.stopped else ''}{done}, {len(result.aside)} set aside")
    if result.waiting:
        screen.say(f"Not settled yet: {', '.join(result.waiting[:20])}")
    if result.lone:
        hint = "if they are images, name these by --set site.files.image=PATTERN"
        screen.say(f"Named as masks, waiting for their images: {', '.join(result.lone[:20])}; {hint}")
    screen.say(f"Page: {result.out / 'watch.html'}")
    screen.result(
        {
            "out": result.out,
            "stopped": result.stopped,
            "done": [item.model_dump(mode="json") for item in result.done],
            "in_all": len(result.seen),
            "set_aside": result.aside,
            "waiting": list(result.waiting),
            "without_image": list(result.lone),
            "changed": list(result.changed),
            "drifts": [vars(item) for item in result.drifts],
            "reports_failed": result.reports_failed,
            "problem": result.problem or None,
        }
    )
    return 0 if result.complete or result.stopped else 1
