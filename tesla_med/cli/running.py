"""Commands that make results: adapt, predict, rollback."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tesla_med.cli.announcing import announced, figures, sentences
from tesla_med.cli.console import Screen
from tesla_med.cli.options import (
    RESETS,
    Anonymise,
    Device,
    Json,
    Key,
    Method,
    Overwrite,
    Pipeline,
    Quiet,
    Resume,
    SaveProbs,
    SaveUncertainty,
    Seed,
    Set,
    SiteOption,
    Statistics,
    TrustCode,
    Verbose,
    Volumes,
    Weights,
    choice,
    path,
)
from tesla_med.cli.results import SHOWN, not_made, not_used, shape_text, show_run
from tesla_med.scoring.text import counted

app = typer.Typer()


@app.command(
    epilog="Example: tesla-med adapt --site F --volumes ./nii --weights source.safetensors --out runs/F"
)
def adapt(
    volumes: Volumes,
    site: SiteOption = None,
    pipeline: Pipeline = None,
    weights: Weights = None,
    trust_code: TrustCode = False,
    statistics: Statistics = None,
    method: Method = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="N-O: adapt to each case as it arrives; N-M: several passes over the site; Y-O, Y-M: the "
            "same with source statistics. Default: the pipeline's, or its counterpart."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(parser=path, help="Output folder. Default: runs/<site>/<method>-<protocol>."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    reset: Annotated[
        str | None,
        typer.Option(
            help="When to return to the source model: never, site or case. Default: the pipeline's."
        ),
    ] = None,
    guard: Annotated[
        bool | None,
        typer.Option(
            "--guard/--no-guard",
            help="Stay at or near the source model where adaptation does not help. Default: the pipeline's.",
        ),
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option(
            help="low: a third of the updates, in the fastest precision; high: twice the updates. "
            "Default: normal."
        ),
    ] = None,
    save_probs: SaveProbs = False,
    save_uncertainty: SaveUncertainty = False,
    corrections: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="Folder of corrected masks, <case>_mask.nii.gz on the grid of the image. Their slices take "
            "part in every update; these cases keep the corrected mask and are not scored.",
        ),
    ] = None,
    anonymise: Anonymise = False,
    key: Key = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    no_lock: Annotated[
        bool,
        typer.Option("--no-lock", help="Do not lock the output folder; see to it that no other run uses it."),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that share the cases, where these do not depend on each other, or the passes "
            "over a site. Default: one per visible GPU for cases, one for passes.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List cases, estimate time and memory; write nothing.")
    ] = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Adapt a model to one site; write masks on the input grid (or classes of tiles), figures and reports."""
    from tesla_med.actions.spread import spread
    from tesla_med.adapt import run_plan
    from tesla_med.config.effort import EFFORTS
    from tesla_med.config.models import PROTOCOLS
    from tesla_med.plan import RunRequest, make_plan

    screen = Screen(quiet, verbose, as_json)
    request = RunRequest(
        site,
        volumes,
        weights=weights,
        statistics=statistics,
        pipeline=pipeline,
        method=method,
        protocol=choice("--protocol", protocol, PROTOCOLS),
        out=out,
        seed=seed,
        device=device,
        reset=choice("--reset", reset, RESETS),
        guard=guard,
        save_probs=save_probs,
        save_uncertainty=save_uncertainty,
        overrides=tuple(overrides or ()),
        corrections=corrections,
        anonymise=anonymise,
        key=key,
        lock=not no_lock,
        trust_code=trust_code,
        effort=choice("--effort", effort, EFFORTS),
    )
    plan = spread(make_plan(request), jobs)
    if dry_run:
        raise typer.Exit(_dry_run(screen, plan))
    count = counted(len(plan.items.names), plan.task.item)
    screen.say(f"Site {plan.site.id}: {count} in {plan.items.folder}, {not_used(plan.items.skipped)}")
    with screen.progress() as progress:
        told = announced(screen, plan, progress)
        result = run_plan(plan, resume=resume, overwrite=overwrite, progress=told)
    raise typer.Exit(show_run(screen, result))


@app.command(
    epilog="Example: tesla-med predict --weights runs/F/tesla-N-M/checkpoints/adapted.safetensors "
    "--volumes ./nii --site F"
)
def predict(
    weights: Annotated[
        Path,
        typer.Option(
            parser=path, help="Source or adapted weights: .safetensors, .pth, or a folder as of adapt."
        ),
    ],
    volumes: Volumes,
    trust_code: TrustCode = False,
    site: Annotated[
        str | None,
        typer.Option(help="Site that gives patterns, region and references. Default: use every image."),
    ] = None,
    pipeline: Pipeline = None,
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Output folder. Default: runs/<site>/predict.")
    ] = None,
    device: Device = "auto",
    anonymise: Anonymise = False,
    key: Key = None,
    overwrite: Overwrite = False,
    overrides: Set = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Predict masks, or classes of tiles, with frozen weights, without adaptation."""
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
            anonymise=anonymise,
            key=key,
            overwrite=overwrite,
            overrides=tuple(overrides or ()),
            trust_code=trust_code,
            progress=progress,
        )
    raise typer.Exit(show_run(screen, result))


@app.command(epilog="Example: tesla-med rollback runs/F/tesla-N-O --to-case 4")
def rollback(
    run: Annotated[Path, typer.Argument(parser=path, help="Output folder of adapt.")],
    to_case: Annotated[
        str | None,
        typer.Option(
            "--to-case",
            help="Number of cases to keep, in the order of the run (run.json lists it; natural order of "
            "names: P1, P2, P10), or 'source'.",
        ),
    ] = None,
    cases: Annotated[
        list[str] | None,
        typer.Option("--case", help="A single case to undo, by name, under reset case; may be repeated."),
    ] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Undo adaptation: give later cases, or single ones, the source model's results and weights."""
    from tesla_med.actions.rollback import rollback as roll_back

    screen = Screen(quiet, as_json=as_json)
    result = roll_back(run, to_case, cases=tuple(cases or ()))
    undone, kept, back = len(result.undone), len(result.kept), len(result.back)
    screen.say(
        f"{counted(undone, 'result')} rolled back now; of all, {back} are the source model's by a rollback, "
        f"{kept} are as the run made them"
    )
    for name in result.undone[:SHOWN]:
        screen.say(f"rolled back: {name}")
    if undone > SHOWN:
        screen.say(f"... and {undone - SHOWN} more")
    single = sum(1 for _ in (run / "checkpoints").rglob("*.safetensors")) if result.weights is None else 0
    of_source = (
        f"{counted(single, 'file')}, one per case, in checkpoints/" if single else "the source model's"
    )
    screen.say(f"Weights: {result.weights or of_source}")
    not_made(result.reports_failed, "the same command makes it again")
    screen.result(vars(result))
    raise typer.Exit(1 if result.reports_failed else 0)


def _dry_run(screen: Screen, plan: Any) -> int:
    from tesla_med.actions.estimate import estimate
    from tesla_med.tasks._corrections import told

    with screen.progress() as progress:
        result = estimate(plan, progress)
    task, items = plan.task, plan.items
    overview = task.overview(items)
    if overview:
        counts = [[name, str(count)] for name, count in overview["by_class"].items()]
        screen.table(["class", f"{task.item}s"], [*counts, ["no class", str(overview["unlabelled"])]])
        failing = [[item.case, item.problem] for item in result.cases if item.problem]
        screen.table([task.item, "remarks"], failing[:SHOWN])
    else:
        rows = [
            [
                *(item.case, shape_text(item.shape), str(item.slices)),
                "corrected" if item.corrected else "yes" if item.labelled else "no",
                item.problem or "ok",
            ]
            for item in result.cases
        ]
        screen.table(["case", "voxels", "slices", "reference", "remarks"], rows)
    screen.remarks(((item.case, text) for item in result.cases for text in item.notes), task.item)
    screen.say(f"{len(items.names)} {task.item}s in {items.folder}, {not_used(items.skipped)}")
    screen.say(f"Region: {result.region}; method {plan.method}, protocol {plan.protocol}, reset {plan.reset}")
    for heading, text in result.model.items():
        screen.say(f"{heading.capitalize()}: {text}")
    if overview:
        screen.say(f"{result.units} batches of at most {result.batch}")
    for line in sentences(plan, result.forecast):
        screen.say(line)
    for line in told(task.corrections, plan.pipeline.corrections.weight, done=False):
        screen.say(line)
    screen.say(f"Would write to {plan.out}; {result.problems} of {len(result.cases)} have a problem")
    content: dict[str, Any] = {
        "out": plan.out,
        "site": plan.site.id,
        "folder": items.folder,
        "method": plan.method,
        "protocol": plan.protocol,
        "region": result.region,
        "model": dict(result.model),
        **figures(result.forecast),
        "cases": [vars(item) for item in result.cases],
        "corrections": {name: str(item.mask) for name, item in task.corrections.items()},
    }
    content |= {"batches": result.units, "batch_size": result.batch} if overview else {}
    screen.result(content | overview)
    return 1 if result.problems else 0
