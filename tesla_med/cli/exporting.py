"""The command that gives masks to other programs: export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tesla_med.cli.console import Screen
from tesla_med.cli.options import Anonymise, Json, Key, Quiet, Verbose, path
from tesla_med.cli.results import SHOWN
from tesla_med.scoring.text import counted, some

app = typer.Typer()


@app.command(epilog="Example: tesla-med export runs/F/tesla-N-O --format dicom-seg --dicom ./series")
def export(
    run: Annotated[Path, typer.Argument(parser=path, help="Output folder of adapt.")],
    form: Annotated[
        str,
        typer.Option("--format", help="dicom-seg, slicer, itksnap or zip (see: tesla-med list exports)."),
    ],
    out: Annotated[
        Path | None, typer.Option(parser=path, help="Output folder. Default: export/<format> in the run.")
    ] = None,
    dicom: Annotated[
        Path | None,
        typer.Option(
            parser=path,
            help="Folder of the DICOM series that the masks belong to: <folder>/<case>, or the series of a "
            "single case. Needed by dicom-seg.",
        ),
    ] = None,
    cases: Annotated[
        list[str] | None, typer.Option("--case", help="A case to export, by name; may be repeated.")
    ] = None,
    accepted: Annotated[
        bool,
        typer.Option("--accepted", help="Only masks that reviewers agreed to (see: tesla-med review)."),
    ] = False,
    anonymise: Anonymise = False,
    key: Key = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier export in the output folder.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Write the masks of a run for other programs: DICOM Segmentation, 3D Slicer, ITK-SNAP or a zip file."""
    from tesla_med.actions.export import export as write_masks

    screen = Screen(quiet, verbose, as_json)
    with screen.progress() as progress:
        result = write_masks(
            run,
            form,
            out=out,
            dicom=dicom,
            cases=tuple(cases or ()),
            accepted=accepted,
            anonymise=anonymise,
            key=key,
            overwrite=overwrite,
            progress=progress,
        )
    screen.say(f"{counted(len(result.cases), 'case')} exported as {form}: {result.out}")
    if result.key is not None:
        screen.say(f"Which case is which, not to be handed on: {result.key}")
    if result.unverified:
        screen.remark(
            f"the series of {counted(len(result.unverified), 'case')} are not those that were adapted to, "
            "only their grids are equal; make sure that they are of the same patients: "
            f"{some(result.unverified, 5)}"
        )
    if result.untrusted:
        screen.remark(
            f"{counted(len(result.untrusted), 'mask')} of these the run does not trust, and no other that it "
            f"found: {some(result.untrusted, 5)}; look at them before they are used"
        )
    for name, reason in list(result.skipped.items())[:SHOWN]:
        sys.stderr.write(f"not exported: {name}: {reason}\n")
    if len(result.skipped) > SHOWN:
        sys.stderr.write(f"... and {len(result.skipped) - SHOWN} more\n")
    screen.result(
        {
            "out": str(result.out),
            "format": form,
            "cases": list(result.cases),
            "files": [str(item) for item in result.files],
            "skipped": dict(result.skipped),
            "unverified": list(result.unverified),
            "untrusted": list(result.untrusted),
            "key": None if result.key is None else str(result.key),
        }
    )
    raise typer.Exit(1 if result.skipped else 0)
