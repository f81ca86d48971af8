"""Command line: parse, one library call, exit code. The only module that prints or exits.

Exit codes: 0 all done; 1 some cases failed or are unscored; 2 usage, configuration or input error.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tesla_med import __version__
from tesla_med.cli.console import Screen, change, percent
from tesla_med.errors import ConfigError, DataError, TeslaMedError

INTERRUPTED = 130
app = typer.Typer(
    name="tesla-med",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Adapt a medical segmentation model to a new site at test time, without labels. "
    "Not a medical device: for research use only.",
)
sites_app = typer.Typer(no_args_is_help=True, help="List, show and check site configurations.")
app.add_typer(sites_app, name="sites")

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say more, on standard error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Volumes = Annotated[
    Path, typer.Option("--volumes", help="Folder of images, sub-folders included, or one image.")
]
SiteOption = Annotated[str, typer.Option("--site", help="Site: F, prostate/F, or a YAML file.")]
Pipeline = Annotated[
    str | None, typer.Option("--pipeline", help="Pipeline or YAML file. Default: the site's.")
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", help="Source weights, .safetensors or .pth. Default: the site's."),
]
Statistics = Annotated[
    Path | None,
    typer.Option(
        "--statistics", help="Source feature statistics, for Y-O and Y-M only. Default: beside the weights."
    ),
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of every random generator.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the output folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run of the same settings.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="key=value over the pipeline, site.key=value over the site; repeatable."),
]


def main() -> None:
    """Entry point of the ``tesla-med`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may hold what a terminal cannot show
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; used in-process by the tests."""
    try:
        code = app(list(arguments), prog_name="tesla-med", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except TeslaMedError as error:
        return _error(arguments, type(error).__name__, str(error), 2)
    except Exception as error:
        if hasattr(error, "format_message"):  # wrong usage; the class differs between releases of typer
            return _usage_error(arguments, error)
        if {"--verbose", "-v"} & set(arguments):
            traceback.print_exception(error)
        text = f"unexpected {type(error).__name__}: {error}; --verbose shows where it happened"
        return _error(arguments, type(error).__name__, text, 1)
    if code == INTERRUPTED:
        return _error(arguments, "Interrupted", "interrupted; what is finished is complete", INTERRUPTED)
    return code if isinstance(code, int) else 0


def _error(arguments: Sequence[str], kind: str, message: str, code: int) -> int:
    """Say what went wrong, as JSON too where that was asked for, and return the exit code."""
    if "--json" in arguments:
        Screen(as_json=True).result({"error": {"kind": kind, "message": message}})
    sys.stderr.write(f"Error: {message}\n")
    return code


def _usage_error(arguments: Sequence[str], error: Any) -> int:
    if "--json" in arguments:
        Screen(as_json=True).result({"error": {"kind": "UsageError", "message": error.format_message()}})
    error.show(sys.stderr)
    return 2


def _version(value: bool) -> None:
    if value:
        sys.stdout.write(f"tesla-med {__version__}\n")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Adapt a medical segmentation model to a new site at test time, without labels."""


# ------------------------------------------------------------ running


@app.command(epilog="Example: tesla-med demo --task spinal_cord --out demo-cord")
def demo(
    task: Annotated[str, typer.Option(help="prostate, spinal_cord or kather (tiles).")] = "prostate",
    out: Annotated[Path, typer.Option(help="Folder; an earlier demo there is replaced.")] = Path("demo"),
    device: Device = "auto",
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Show the whole loop on generated data: train, adapt to two sites, report. Under 3 minutes."""
    from tesla_med.demo.demo import DEMO_TASKS, DemoResult, run_demo

    _choice("--task", task, DEMO_TASKS)
    screen = Screen(quiet, verbose, as_json)
    screen.say(f"Generating three {task} sites, training on the first, adapting to the other two ...")
    with screen.progress() as progress:
        result = run_demo(task, out, device=device, progress=progress)
    if isinstance(result, DemoResult):
        measure, counted = "Dice", "cases"
        figures = [(row.site, row.cases, row.dice_source, row.dice) for row in result.rows]
    else:
        measure, counted = "right", "tiles"
        figures = [(row.site, row.tiles, row.accuracy_source, row.accuracy) for row in result.rows]
    rows = [
        [site, str(count), percent(before), percent(after), change(before, after)]
        for site, count, before, after in figures
    ]
    screen.table(["site", counted, f"source {measure} %", f"adapted {measure} %", "change"], rows)
    screen.say(f"{result.seconds:.0f} s. Generated data: the figures say nothing about real scanners.")
    for row in result.rows:
        screen.say(f"Report of {row.site}: {row.report}")
    screen.say(f"Curves: tesla-med tensorboard {result.out}")
    content = {name: value for name, value in vars(result).items() if name != "rows"}
    screen.result(content | {"sites": [vars(row) for row in result.rows]})


@app.command(
    epilog="Example: tesla-med adapt --site F --volumes ./nii --weights source.safetensors --out runs/F"
)
def adapt(
    site: SiteOption,
    volumes: Volumes,
    pipeline: Pipeline = None,
    weights: Weights = None,
    statistics: Statistics = None,
    method: Annotated[str | None, typer.Option(help="See: tesla-med list methods. Default: tesla.")] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="N-O: each case as it comes; N-M: several passes over the site; Y-O, Y-M: the same with "
            "source statistics. Default: the pipeline's, or its counterpart that the method has."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Output folder. Default: runs/<site>/<method>-<protocol>.")
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    reset: Annotated[
        str | None,
        typer.Option(help="Return to the source model: never, site or case. Default: the pipeline's."),
    ] = None,
    guard: Annotated[
        bool | None,
        typer.Option(
            "--guard/--no-guard",
            help="Stay at or near the source model where adapting does not help. Default: the pipeline's.",
        ),
    ] = None,
    save_probs: Annotated[bool, typer.Option("--save-probs", help="Write class probabilities.")] = False,
    save_uncertainty: Annotated[
        bool, typer.Option("--save-uncertainty", help="Write normalised entropy, 0 to 1.")
    ] = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List cases, region, time and memory; write nothing.")
    ] = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Adapt a model to one site; write masks on the input grid, figures and reports."""
    from tesla_med.adapt import guard_override, run_plan
    from tesla_med.config.models import PROTOCOLS
    from tesla_med.plan import make_plan

    screen = Screen(quiet, verbose, as_json)
    if _is_tiles(site, pipeline, overrides):
        options: dict[str, Any] = {"weights": weights, "statistics": statistics}
        options |= {"pipeline": pipeline, "method": method}
        options |= {"out": out, "seed": seed}
        options |= {
            "device": device,
            "resume": resume,
            "overwrite": overwrite,
            "overrides": tuple(overrides or ()),
        }
        options |= {"protocol": _choice("--protocol", protocol, PROTOCOLS)}
        options |= {"reset": _choice("--reset", reset, ("never", "site", "case"))}
        raise typer.Exit(_adapt_tiles(screen, site, volumes, options, dry_run))
    plan = make_plan(
        site,
        volumes,
        weights=weights,
        statistics=statistics,
        pipeline=pipeline,
        method=method,
        protocol=_choice("--protocol", protocol, PROTOCOLS),
        out=out,
        seed=seed,
        device=device,
        reset=_choice("--reset", reset, ("never", "site", "case")),
        overrides=(*(overrides or ()), *guard_override(guard)),
        save_probs=save_probs,
        save_uncertainty=save_uncertainty,
    )
    if dry_run:
        raise typer.Exit(_dry_run(screen, plan))
    screen.say(f"Site {plan.site.id}: {len(plan.cases)} cases in {plan.folder}, {_skipped(plan.skipped)}")
    with screen.progress() as progress:
        result = run_plan(plan, resume=resume, overwrite=overwrite, progress=progress)
    raise typer.Exit(_show_run(screen, result))


@app.command(
    epilog="Example: tesla-med predict --weights runs/F/tesla-N-M/checkpoints/adapted.safetensors "
    "--volumes ./nii --site F"
)
def predict(
    weights: Annotated[Path, typer.Option(help="Weights, .safetensors or .pth; adapted ones too.")],
    volumes: Volumes,
    site: Annotated[
        str | None, typer.Option(help="Site, for its patterns, region and references. Default: every image.")
    ] = None,
    pipeline: Pipeline = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/<site>/predict.")] = None,
    device: Device = "auto",
    overwrite: Overwrite = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Write masks from frozen weights, without adaptation."""
    from tesla_med.actions.predict import predict as predict_cases

    screen = Screen(quiet, verbose, as_json)
    with screen.progress() as progress:
        result = predict_cases(
            volumes,
            weights,
            site=site,
            pipeline=pipeline,
            out=out,
            device=device,
            overwrite=overwrite,
            overrides=tuple(overrides or ()),
            progress=progress,
        )
    raise typer.Exit(_show_run(screen, result))


@app.command(epilog="Example: tesla-med train --pipeline prostate --sites A,B --volumes ./nii --out source")
def train(
    pipeline: Annotated[str, typer.Option(help="Pipeline or YAML file.")],
    sites: Annotated[str, typer.Option(help="Labelled source sites, separated by commas.")],
    volumes: Volumes,
    out: Annotated[Path, typer.Option(help="Output folder.")],
    width: Annotated[
        int | None, typer.Option(min=1, help="Channels of the first level. Default: 64.")
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
    if config.task == "classification":
        if resume:
            raise ConfigError("--resume: a training on tiles is short and starts afresh; use --overwrite")
        _train_tiles(
            screen, config, _sites(sites, config.sites, texts), volumes, out, seed, device, overwrite
        )
        return
    with screen.progress() as progress:
        result = train_source(
            config,
            _sites(sites, config.sites, texts),
            volumes,
            out,
            seed=seed,
            device=device,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
        )
    screen.say(f"Validation Dice {percent(result.validation_dice)} % at step {result.best_step}.")
    screen.say(f"Weights: {result.weights}")
    screen.say(f"Feature statistics: {result.statistics}")
    screen.result(vars(result))


@app.command(epilog="Example: tesla-med statistics --weights source.safetensors --sites A --volumes ./nii")
def statistics(
    weights: Annotated[Path, typer.Option(help="Source weights.")],
    sites: Annotated[str, typer.Option(help="Labelled source sites, separated by commas.")],
    volumes: Volumes,
    pipeline: Pipeline = None,
    out: Annotated[Path | None, typer.Option(help="Output file. Default: beside the weights.")] = None,
    device: Device = "auto",
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Measure the source feature statistics of existing weights."""
    from tesla_med.plan import resolve
    from tesla_med.training.measure import compute_statistics

    screen = Screen(quiet, verbose, as_json)
    texts = tuple(overrides or ())
    first = sites.split(",")[0].strip()
    _, config = resolve(first, pipeline, texts, weights)
    with screen.progress() as progress:
        path = compute_statistics(
            weights, config, _sites(sites, config.sites, texts), volumes, out, device, progress=progress
        )
    screen.say(f"Feature statistics: {path}")
    screen.result({"statistics": path})


@app.command(epilog="Example: tesla-med evaluate --predictions runs/F/tesla-N-O/masks --references ./nii")
def evaluate(
    predictions: Annotated[Path, typer.Option(help="Folder of masks or of a run, or a predictions.csv.")],
    references: Annotated[
        Path | None,
        typer.Option(help="Folder of references. Tiles: a folder a class, a CSV, or none (column label)."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write metrics.csv and summary.json here.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Refuse unmatched masks.")] = False,
    empty: Annotated[
        str,
        typer.Option(help="Where both masks are empty: skip leaves the case out of the mean, one counts 1."),
    ] = "skip",
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Score masks against references on their own grid, or a predictions.csv of tiles against labels."""
    from tesla_med.actions.evaluate import evaluate as evaluate_masks
    from tesla_med.actions.tile_evaluation import is_tile_table

    screen = Screen(quiet, verbose, as_json)
    counted = _choice("--empty", empty, ("skip", "one"))
    if is_tile_table(predictions):
        raise typer.Exit(_evaluate_tiles(screen, predictions, references, out, strict))
    if references is None:
        raise ConfigError("--references is needed: the folder of reference masks")
    result = evaluate_masks(predictions, references, out=out, strict=strict, empty=counted)
    screen.say(result.coverage)
    for names, text in (
        (result.only_predictions, "without a reference"),
        (result.only_references, "without a mask"),
    ):
        if names:
            screen.say(f"{len(names)} {text}: {', '.join(names)}")
    rows = [
        [case.case, score.name, percent(score.dice), _millimetres(score.hd95_mm), _millimetres(score.assd_mm)]
        for case in result.cases
        for score in case.scores
    ]
    screen.table(["case", "class", "Dice %", "HD95 mm", "ASSD mm"], rows)
    for case in result.unscored:
        sys.stderr.write(f"{case.case}: {case.reason}\n")
    summary = result.summary()
    screen.table(["class", "cases", "mean Dice %"], [_summary_row(row) for row in summary], title="Mean")
    screen.result({**result.model_dump(mode="json"), "coverage": result.coverage, "summary": summary})
    raise typer.Exit(1 if result.unscored else 0)


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
            help="Methods, separated by commas (see: tesla-med list methods); with --table the rows to run. "
            "Default: source,bn,tesla; with --table all rows."
        ),
    ] = None,
    protocols: Annotated[
        str | None,
        typer.Option(help="N-O, N-M, Y-O, Y-M, separated by commas; each method under those it has."),
    ] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds. Default: 3.")] = None,
    first_seed: Annotated[
        int | None, typer.Option(min=0, help="The first of them, so that parts can be run apart. Default: 0.")
    ] = None,
    table: Annotated[str | None, typer.Option(help="A table of the paper by name, or a YAML file.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Row that the others are tested against. Default: source.")
    ] = None,
    weights: Weights = None,
    statistics: Statistics = None,
    out: Annotated[Path, typer.Option(help="Folder for cells, table and pictures.")] = Path("comparison"),
    device: Device = "auto",
    reset: Annotated[
        str | None, typer.Option(help="never (state goes on from site to site), site or case.")
    ] = None,
    guard: Annotated[bool, typer.Option("--guard", help="Judge every volume; off by default here.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Add to OUT; cells there are not run again.")
    ] = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Compare methods over sites, protocols and seeds; write a table, tests, pictures and one CSV."""
    from tesla_med.compare.grid import check_protocols, compare_methods
    from tesla_med.compare.report import as_json as figures
    from tesla_med.compare.report import grid
    from tesla_med.config.tables import load_table, make_table

    screen = Screen(quiet, verbose, as_json)
    names = _split(sites)
    wanted = check_protocols(_split(protocols)) if protocols is not None else None
    if table is not None:
        chosen = load_table(table)
        given = {"pipeline": pipeline, "sites": names or None, "protocols": wanted, "seeds": seeds}
        given |= {"baseline": baseline, "first_seed": first_seed}
        changes = {key: value for key, value in given.items() if value is not None}
        chosen = type(chosen).model_validate(chosen.model_dump() | changes)
    elif pipeline is None:
        raise ConfigError("say --pipeline and --sites, or --table")
    else:
        chosen = make_table(
            pipeline,
            names,
            _split("source,bn,tesla" if methods is None else methods),
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
            reset=_choice("--reset", reset, ("never", "site", "case")),
            guard=guard,
            overrides=tuple(overrides or ()),
            only=_split(methods) if table is not None and methods is not None else None,
            resume=resume,
            progress=progress,
        )
    header, rows = grid(result.summary)
    screen.table(header, [[cell.strip("*") for cell in row] for row in rows], chosen.title)
    screen.say(f"{result.done} cells run, {result.skipped} there already; table: {out / 'comparison.html'}")
    for name, reason in result.problems:
        sys.stderr.write(f"Not run: {name}: {reason}\n")
    for (label, protocol), count in result.summary.failed.items():
        if count:
            sys.stderr.write(f"{label} {protocol}: {count} failed; reasons in {out / 'cells'}\n")
    screen.result(figures(chosen, result.summary, dict(result.problems)))
    raise typer.Exit(1 if result.problems or sum(result.summary.failed.values()) else 0)


@app.command(epilog="Example: tesla-med tensorboard runs")
def tensorboard(
    runs: Annotated[Path, typer.Argument(help="A run, or a folder of runs.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 6006,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
) -> None:
    """Show curves, policy and overlays of runs in TensorBoard; stop with Ctrl-C."""
    if not runs.is_dir():
        raise DataError(f"{runs}: no such folder; give a run or a folder of runs")
    if not any(runs.rglob("events.out.tfevents.*")):
        raise DataError(f"{runs}: no TensorBoard files in it or below; run tesla-med adapt or train first")
    import subprocess

    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(runs)]
    raise typer.Exit(subprocess.call([*command, "--port", str(port), "--host", host]))  # noqa: S603


# ------------------------------------------------------------ looking


@sites_app.command("list", epilog="Example: tesla-med sites list --json")
def sites_list(as_json: Json = False) -> None:
    """List every site configuration."""
    from tesla_med.config.files import load_site, site_files, site_folders

    screen = Screen(as_json=as_json)
    sites = [load_site(f"{folder}/{name}") for folder in site_folders() for name in site_files(folder)]
    rows = [[f"{item.pipeline}/{item.id}", item.institution, item.description] for item in sites]
    screen.table(["site", "institution", "description"], rows)
    screen.result({"sites": [item.model_dump(mode="json") for item in sites]})


@sites_app.command("show", epilog="Example: tesla-med sites show prostate/F")
def sites_show(site: Annotated[str, typer.Argument(help="Site.")], as_json: Json = False) -> None:
    """Show one site configuration with every default filled in."""
    from tesla_med.config.files import load_site

    screen = Screen(as_json=as_json)
    content = load_site(site).model_dump(mode="json")
    if screen.talks:
        import yaml

        screen.say(yaml.safe_dump(content, sort_keys=False, allow_unicode=True).rstrip())
    screen.result(content)


@sites_app.command("check", epilog="Example: tesla-med sites check F --volumes ./nii")
def sites_check(
    site: Annotated[str, typer.Argument(help="Site.")],
    volumes: Volumes,
    overrides: Set = None,
    as_json: Json = False,
) -> None:
    """Read every image and reference of a site and say what fits and what does not."""
    from tesla_med.actions.check import check_site
    from tesla_med.plan import resolve

    screen = Screen(as_json=as_json)
    config, pipeline = resolve(site, None, tuple(overrides or ()))
    with screen.progress() as progress:
        result = check_site(config, pipeline, volumes, progress)
    rows = [
        [
            case.case,
            _shape(case.shape),
            _spacing(case.spacing),
            _labels(case.labels),
            "; ".join((*case.problems, *case.notes)) or "ok",
        ]
        for case in result.cases
    ]
    screen.table(["case", "voxels", "mm", "labels", "remarks"], rows, title=str(result.folder))
    for path, reason in result.skipped:
        screen.say(f"not used: {path.name}: {reason}")
    screen.say(f"{len(result.cases)} cases, {result.problems} with a problem, {_skipped(result.skipped)}")
    screen.result(
        {
            "folder": result.folder,
            "cases": [vars(case) for case in result.cases],
            "skipped": [{"file": path, "reason": reason} for path, reason in result.skipped],
        }
    )
    raise typer.Exit(1 if result.problems else 0)


@app.command(epilog="Example: tesla-med rollback runs/F/tesla-N-O --to-case 4")
def rollback(
    run: Annotated[Path, typer.Argument(help="Output folder of adapt.")],
    to_case: Annotated[
        str, typer.Option("--to-case", help="Number of cases to keep, in the order of the run, or: source.")
    ],
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Undo adaptation: give later cases the source model's masks, go back to earlier weights."""
    from tesla_med.actions.rollback import rollback as roll_back

    screen = Screen(quiet, as_json=as_json)
    result = roll_back(run, to_case)
    screen.say(
        f"{len(result.undone)} masks are the source model's now, {len(result.kept)} cases are as before"
    )
    for name in result.undone:
        screen.say(f"rolled back: {name}")
    screen.say("Weights: " + (str(result.weights) if result.weights else "the source's, or one pair a case"))
    screen.result(vars(result))


@app.command("list", epilog="Example: tesla-med list methods")
def list_entries(
    what: Annotated[str, typer.Argument(help="methods, ops, models, reports, pipelines or tables.")],
    as_json: Json = False,
) -> None:
    """List what can be chosen by name, a line each."""
    from tesla_med.cli.listing import LISTS

    if what not in LISTS:
        raise ConfigError(f"cannot list {what!r}. Known: {', '.join(LISTS)}.")
    screen = Screen(as_json=as_json)
    columns, rows = LISTS[what]()
    screen.table(columns, rows)
    screen.result({what: [dict(zip(columns, row, strict=True)) for row in rows]})


# ------------------------------------------------------------ helpers


def _choice(option: str, value: str | None, known: Sequence[str]) -> Any:
    if value is not None and value not in known:
        raise ConfigError(f"{option} {value!r} is not known. Known: {', '.join(known)}.")
    return value


def _split(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _sites(names: str, folder: str, overrides: Sequence[str]) -> list[Any]:
    from tesla_med.config.files import load_site

    found = [load_site(name.strip(), folder, overrides) for name in names.split(",") if name.strip()]
    if not found:
        raise ConfigError("--sites is empty; give one or more site ids, separated by commas")
    return found


def _dry_run(screen: Screen, plan: Any) -> int:
    from tesla_med.actions.estimate import estimate

    with screen.progress() as progress:
        result = estimate(plan, progress)
    rows = [
        [
            item.case,
            _shape(item.shape),
            str(item.slices),
            "yes" if item.labelled else "no",
            item.problem or "ok",
        ]
        for item in result.cases
    ]
    screen.table(["case", "voxels", "slices", "reference", "remarks"], rows)
    screen.say(f"Region: {result.region}; method {plan.method}, protocol {plan.protocol}, reset {plan.reset}")
    screen.say(
        f"About {result.seconds:.0f} s on {plan.device} and {result.memory_mib:.0f} MiB for the networks"
    )
    screen.say(f"Would write {plan.out}; {_skipped(plan.skipped)}")
    content = {"out": plan.out, "region": result.region, "seconds": result.seconds}
    content |= {"memory_mib": result.memory_mib, "cases": [vars(item) for item in result.cases]}
    screen.result(content)
    return 1 if any(item.problem for item in result.cases) else 0


def _is_tiles(site: str, pipeline: str | None, overrides: Sequence[str] | None) -> bool:
    """Whether site and pipeline are for tiles."""
    from tesla_med.plan import resolve

    return resolve(site, pipeline, tuple(overrides or ()))[1].task == "classification"


def _adapt_tiles(screen: Screen, site: str, volumes: Path, options: dict[str, Any], dry_run: bool) -> int:
    from tesla_med.tasks.tile_runs import adapt_tiles, list_tiles

    if dry_run:
        found = list_tiles(site, volumes, **options)
        counts = [[name, str(count)] for name, count in found["by_class"].items()]
        screen.table(["class", "tiles"], [*counts, ["no class", str(found["unlabelled"])]])
        left = ", ".join(f"{count} {reason}" for reason, count in found["skipped"].items()) or "nothing"
        screen.say(
            f"{found['tiles']} tiles in {found['folder']}, left out: {left}; method {found['method']}, "
            f"protocol {found['protocol']}, {found['batches']} batches of {found['batch_size']}"
        )
        screen.result(found)
        return 0
    with screen.progress() as progress:
        result = adapt_tiles(site, volumes, progress=progress, **options)
    for name, reason in list(result.failed.items())[:5]:
        sys.stderr.write(f"Not read: {name}: {reason}\n")
    if result.accuracy is not None:
        before, after = percent(result.accuracy_source), percent(result.accuracy)
        screen.say(f"Right: source {before} %, adapted {after} % of {result.tiles} tiles")
    table = result.out / "predictions.csv"
    screen.say(f"{result.tiles} tiles, {len(result.failed)} not read. Predictions: {table}")
    screen.result(vars(result))
    return 1 if result.failed else 0


def _evaluate_tiles(
    screen: Screen, predictions: Path, references: Path | None, out: Path | None, strict: bool
) -> int:
    from tesla_med.actions.tile_evaluation import class_rows, evaluate_tiles

    result = evaluate_tiles(predictions, references, out=out, strict=strict)
    screen.say(result.coverage)
    for names, text in (
        (result.unread, "without a prediction"),
        (result.only_predictions, "without a label"),
        (result.only_references, "labelled but not in the table"),
    ):
        if names:
            screen.say(f"{len(names)} {text}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}")
    rows = [
        [row["class"], str(row["tiles"]), percent(row["accuracy_source"]), percent(row["accuracy"])]
        for row in class_rows(result)
    ]
    models = (result.source, result.adapted)
    shares = [percent(None if model is None else model.accuracy) for model in models]
    rows.append(["all", str(result.scored), *shares])
    screen.table(["class", "tiles", "source right %", "adapted right %"], rows)
    counts = [
        [name, *map(str, row)] for name, row in zip(result.classes, result.adapted.confusion, strict=True)
    ]
    screen.table(["label", *result.classes], counts, title="Adapted: what tiles of each class were taken for")
    figures = [
        [name, "n/a" if value is None else f"{value:.3f}"]
        for name, value in (
            ("ECE", result.adapted.ece),
            ("Brier score", result.adapted.brier),
            ("NLL, nats", result.adapted.nll),
        )
    ]
    screen.table(["calibration, adapted", ""], figures)
    screen.result({**result.model_dump(mode="json"), "coverage": result.coverage})
    return 1 if result.unread else 0


def _train_tiles(
    screen: Screen,
    config: Any,
    sites: list[Any],
    volumes: Path,
    out: Path,
    seed: int,
    device: str,
    overwrite: bool,
) -> None:
    from tesla_med.training.tiles import train_tiles

    with screen.progress() as progress:
        result = train_tiles(
            config, sites, volumes, out, seed=seed, device=device, overwrite=overwrite, progress=progress
        )
    screen.say(f"{percent(result.validation_accuracy)} % of {result.held_out} held-out tiles right.")
    screen.say(f"Weights: {result.weights}")
    screen.result(vars(result))


def _show_run(screen: Screen, result: Any) -> int:
    scored = any(item.mean_dice is not None for item in result.results)
    method = result.results[0].method
    shown = (3 if method != "source" else 1) if scored else 0  # source against itself says nothing
    columns = ["case", "status", "slices", "used", "seconds"]
    columns[2:2] = ["source Dice %", f"{method} Dice %", "change"][:shown]
    rows = []
    for item in result.results:
        before, after = item.mean_dice_source, item.mean_dice
        used = f"{item.used} {100 * item.share:.0f} %" if item.used == "partial" and item.share else item.used
        row = [item.case, item.status, str(item.slices), used, f"{item.seconds:.1f}"]
        row[2:2] = [percent(before), percent(after), change(before, after)][:shown]
        rows.append(row)
    screen.table(columns, rows)
    if scored:
        means = [f"source {percent(result.mean_dice_source)} %", f"{method} {percent(result.mean_dice)} %"]
        screen.say(f"Mean Dice: {', '.join(means[:shown])}")
    for item in result.failed:
        sys.stderr.write(f"{item.case}: {item.status}: {item.reason}\n")
    for note in result.notes:
        screen.say(f"Note: {note}")
    screen.say(f"Masks: {result.out / 'masks'}")
    for path in result.files:
        if path.name == "report.html":
            screen.say(f"Report: {path}")
    screen.result(
        {
            "out": result.out,
            "mean_dice": result.mean_dice,
            "mean_dice_source": result.mean_dice_source,
            "files": list(result.files),
            "notes": list(result.notes),
            "skipped": [{"file": path, "reason": reason} for path, reason in result.skipped],
            "cases": [item.model_dump(mode="json", exclude={"calibration"}) for item in result.results],
        }
    )
    return 1 if result.failed else 0


def _skipped(skipped: Sequence[tuple[Path, str]]) -> str:
    return f"{len(skipped)} files not used" if len(skipped) != 1 else "1 file not used"


def _millimetres(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}"


def _shape(shape: Sequence[int] | None) -> str:
    return "-" if shape is None else "x".join(str(size) for size in shape)


def _spacing(spacing: Sequence[float] | None) -> str:
    return "-" if spacing is None else "x".join(f"{step:.4g}" for step in spacing)


def _labels(labels: Sequence[int] | None) -> str:
    return "none" if labels is None else ",".join(str(value) for value in labels)


def _summary_row(row: dict[str, Any]) -> list[str]:
    return [str(row["name"]), str(row["cases"]), percent(row["dice_mean"])]


if __name__ == "__main__":
    main()
