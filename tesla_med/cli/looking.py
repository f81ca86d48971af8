"""Commands that look around: sites list, show and check, list, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tesla_med.cli import options
from tesla_med.cli.console import Screen
from tesla_med.cli.options import Json, Set, TrustCode, Volumes, Weights
from tesla_med.cli.results import labels_text, not_used, shape_text, spacing_text
from tesla_med.errors import ConfigError
from tesla_med.scoring.text import counted

app = typer.Typer()
sites_app = typer.Typer(no_args_is_help=True, help="List, show and check site configurations.")


@sites_app.command("list", epilog="Example: tesla-med sites list --json")
def sites_list(as_json: Json = False) -> None:
    """List every site configuration, and those that cannot be used with the reason."""
    from tesla_med.config.files import load_site, readable, site_files, site_folders

    screen = Screen(as_json=as_json)
    files = {
        f"{folder}/{name}": path for folder in site_folders() for name, path in site_files(folder).items()
    }
    sites, broken = readable(files, load_site)
    rows = [[name, item.institution, item.description] for name, item in sites.items()]
    screen.table(["site", "institution", "description"], rows)
    for reason in broken.values():
        sys.stderr.write(f"broken: {reason}\n")
    screen.result(
        {
            "sites": [item.model_dump(mode="json") for item in sites.values()],
            "broken": [{"file": path, "reason": reason} for path, reason in broken.items()],
        }
    )


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
    weights: Weights = None,
    overrides: Set = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Read every image and reference, or every tile, of a site and report what does not fit."""
    from tesla_med.actions.check import check_site
    from tesla_med.config.resolve import resolve_for_check

    screen = Screen(as_json=as_json)
    config, pipeline = resolve_for_check(site, weights, tuple(overrides or ()), trust_code=trust_code)
    with screen.progress() as progress:
        result = check_site(config, pipeline, volumes, progress)
    single = result.item != "case"
    shown = [case for case in result.cases if case.problems or case.notes or not single]
    rows = [
        [
            case.case,
            shape_text(case.shape),
            spacing_text(case.spacing),
            labels_text(case.labels),
            "; ".join((*case.problems, *case.notes)) or "ok",
        ]
        for case in shown
    ]
    grid = "pixels" if single else "voxels"
    if rows:
        screen.table([result.item, grid, "mm", "labels", "remarks"], rows, title=str(result.folder))
    else:
        screen.say(f"{result.folder}: no remarks")
    for path, reason in result.skipped:
        screen.say(f"not used: {path.name}: {reason}")
    count = f"{counted(len(result.cases), result.item)}, {result.problems} with a problem"
    screen.say(f"{count}, {not_used(result.skipped)}")
    screen.result(
        {
            "folder": result.folder,
            "cases": [vars(case) for case in result.cases],
            "skipped": [{"file": path, "reason": reason} for path, reason in result.skipped],
            "remarks": list(result.remarks),
        }
    )
    raise typer.Exit(1 if result.problems else 0)


@app.command("list", epilog="Example: tesla-med list methods")
def list_entries(
    what: Annotated[
        str,
        typer.Argument(help="methods, ops, models, reports, exports, metrics, tasks, pipelines or tables."),
    ] = "",
    as_json: Json = False,
) -> None:
    """List what can be chosen by name, one per line."""
    from tesla_med.cli.listing import LISTS

    if what not in LISTS:
        start = f"cannot list {what!r}" if what else "say what to list"
        raise ConfigError(f"{start}. Known: {', '.join(LISTS)}. For sites: tesla-med sites list.")
    screen = Screen(as_json=as_json)
    columns, rows = LISTS[what]()
    screen.table(columns, rows)
    screen.result({what: [dict(zip(columns, row, strict=True)) for row in rows]})


@app.command(epilog="Example: tesla-med doctor --out runs")
def doctor(
    out: Annotated[
        Path, typer.Option(parser=options.path, help="Folder in which results are to be written.")
    ] = Path("runs"),
    self_test: Annotated[
        bool, typer.Option("--self-test/--no-self-test", help="Adapt a tiny network, write and read a mask.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Say what is installed, what the machine has, and whether a small run works; for bug reports."""
    from tesla_med.actions.doctor import as_text, examine

    screen = Screen(as_json=as_json)
    there = out.exists()
    try:
        findings = examine(out, self_test=self_test)
    finally:
        if not there and out.is_dir() and not any(out.iterdir()):
            out.rmdir()
    screen.say(as_text(findings))
    screen.result(
        {"findings": [{"name": item.name, "good": item.good, "text": item.text} for item in findings]}
    )
    raise typer.Exit(0 if all(item.good for item in findings) else 1)
