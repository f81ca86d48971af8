"""Commands that look at finished results: evaluate, compare, tensorboard."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tesla_med.cli.console import Screen
from tesla_med.cli.options import (
    Anonymise,
    Device,
    Json,
    Key,
    Pipeline,
    Quiet,
    Set,
    Statistics,
    Verbose,
    Volumes,
    Weights,
    choice,
    mapping,
    path,
    split,
)
from tesla_med.errors import ConfigError, DataError

app = typer.Typer()
SECONDS_TO_START = 4.0
"""What TensorBoard needs until it answers."""


@app.command(epilog="Example: tesla-med evaluate --predictions runs/F/tesla-N-O/masks --references ./nii")
def evaluate(
    predictions: Annotated[
        Path, typer.Option(parser=path, help="Folder of masks, folder of a run, or predictions.csv.")
    ],
    references: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="Folder of references. For tiles: one folder per class, a CSV, or nothing (column label).",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Write metrics.csv and summary.json here.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse masks or tiles without a partner.")
    ] = False,
    empty: Annotated[
        str,
        typer.Option(
            help="If both masks are empty: skip leaves the case out of the mean, one counts it as 1."
        ),
    ] = "skip",
    ignore: Annotated[
        list[int] | None,
        typer.Option(help="Value of the reference masks that is not scored, such as 255; may be repeated."),
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(help="FROM=TO: what a value in the files means, such as 255=1; may be repeated."),
    ] = None,
    anonymise: Anonymise = False,
    key: Key = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Score masks against references on their own grid, or a predictions.csv of tiles against labels."""
    from tesla_med.actions.evaluate import evaluate as evaluate_results

    screen = Screen(quiet, verbose, as_json)
    counted = choice("--empty", empty, ("skip", "one"))
    result = evaluate_results(
        predictions,
        references,
        out=out,
        strict=strict,
        empty=counted,
        ignore=tuple(ignore or ()),
        values=mapping("--values", values),
        anonymise=anonymise,
        key=key,
    )
    screen.say(result.coverage)
    for text in result.remarks():
        screen.remark(text)
    for title, columns, rows in result.tables():
        if rows:
            screen.table(columns, rows, title=title or None)
    for text in result.errors():
        sys.stderr.write(f"{text}\n")
    screen.result(result.record())
    raise typer.Exit(0 if result.complete else 1)


@app.command(
    epilog="Example: tesla-med compare --pipeline prostate --sites D,E --volumes ./nii --methods source,tesla"
)
def compare(
    volumes: Volumes,
    pipeline: Pipeline = None,
    sites: Annotated[str | None, typer.Option(help="Site ids, separated by commas.")] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="Methods, separated by commas (see: tesla-med list methods); with --table, the rows to run. "
            "Default: source,bn,tesla; with --table, all rows."
        ),
    ] = None,
    protocols: Annotated[
        str | None,
        typer.Option(
            help="N-O, N-M, Y-O, Y-M, separated by commas; each method runs under those that it supports."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Number of seeds. Default: 3.")] = None,
    first_seed: Annotated[
        int | None,
        typer.Option(min=0, help="First seed, so that parts can be run separately. Default: 0."),
    ] = None,
    table: Annotated[
        str | None, typer.Option(help="Table by name (see: tesla-med list tables), or a YAML file.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The row that the others are tested against. Default: source.")
    ] = None,
    weights: Weights = None,
    statistics: Statistics = None,
    out: Annotated[Path, typer.Option(parser=path, help="Folder for cells, table and figures.")] = Path(
        "comparison"
    ),
    device: Device = "auto",
    reset: Annotated[
        str | None,
        typer.Option(help="When to reset: never (state carries on from site to site), site or case."),
    ] = None,
    guard: Annotated[
        bool, typer.Option("--guard", help="Apply the guard to every volume; off by default.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Add to the output folder; finished cells are not run again.")
    ] = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Compare methods over sites, protocols and seeds; write a table with tests, figures and one CSV."""
    from tesla_med.compare.cells import check_protocols
    from tesla_med.compare.grid import compare_methods
    from tesla_med.compare.results import as_json as figures
    from tesla_med.compare.tables import grid
    from tesla_med.config.tables import load_table, make_table

    screen = Screen(quiet, verbose, as_json)
    names = split(sites)
    wanted = check_protocols(split(protocols)) if protocols is not None else None
    if table is not None:
        chosen = load_table(table)
        given = {"pipeline": pipeline, "sites": names or None, "protocols": wanted, "seeds": seeds}
        given |= {"baseline": baseline, "first_seed": first_seed}
        changes = {key: value for key, value in given.items() if value is not None}
        chosen = type(chosen).model_validate(chosen.model_dump() | changes)
    elif pipeline is None:
        raise ConfigError("give --pipeline and --sites, or --table")
    else:
        chosen = make_table(
            pipeline,
            names,
            split("source,bn,tesla" if methods is None else methods),
            wanted or ("N-O",),
            seeds or 3,
            baseline,
            first_seed or 0,
        )
    with screen.progress() as progress:
        result = compare_methods(
            chosen,
            volumes,
            weights=weights,
            statistics=statistics,
            out=out,
            device=device,
            reset=choice("--reset", reset, ("never", "site", "case")),
            guard=guard,
            overrides=tuple(overrides or ()),
            only=split(methods) if table is not None and methods is not None else None,
            resume=resume,
            progress=progress,
        )
    header, rows = grid(result.summary)
    screen.table(header, [[cell.strip("*") for cell in row] for row in rows], chosen.title)
    screen.say(f"{result.done} cells run, {result.skipped} already done; table: {out / 'comparison.html'}")
    screen.remarks(result.remarks, "item")
    for name, reason in result.problems:
        sys.stderr.write(f"Not run: {name}: {reason}\n")
    for (label, protocol), count in result.summary.failed.items():
        if count:
            sys.stderr.write(f"{label} {protocol}: {count} failed; reasons in {out / 'cells'}\n")
    screen.result(figures(chosen, result.summary, dict(result.problems)))
    raise typer.Exit(1 if result.problems or sum(result.summary.failed.values()) else 0)


@app.command(epilog="Example: tesla-med tensorboard runs")
def tensorboard(
    runs: Annotated[Path, typer.Argument(parser=path, help="A run, or a folder of runs.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 chooses a free one.")] = 6006,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Show curves, policy and overlays of runs in TensorBoard; stop with Ctrl-C."""
    if not runs.is_dir():
        raise DataError(f"{runs}: no such folder; give a run or a folder of runs")
    if not any(runs.rglob("events.out.tfevents.*")):
        raise DataError(
            f"{runs}: no TensorBoard files in this folder or below; run tesla-med adapt or train first"
        )
    if open_page and port == 0:
        raise ConfigError("--open needs to know the port; leave out --port 0")
    import subprocess

    if open_page:
        _open_later(f"http://{host}:{port}/")
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs)]
    raise typer.Exit(subprocess.call([*command, "--port", str(port), "--host", host]))  # noqa: S603


def _open_later(address: str) -> None:
    """Open a page in the browser once its server has had time to start."""
    import threading
    import webbrowser

    timer = threading.Timer(SECONDS_TO_START, webbrowser.open, [address])
    timer.daemon = True
    timer.start()
