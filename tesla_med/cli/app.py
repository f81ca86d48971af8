"""The ``tesla-med`` command: its groups of commands, errors and exit codes. Only this room prints or exits.

Exit codes: 0 all done; 1 some cases failed or are unscored; 2 usage, configuration or input error.
"""

from __future__ import annotations

import io
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tesla_med import __version__
from tesla_med.cli import evaluating, exporting, looking, reviewing, running, studying, training, watching
from tesla_med.cli.console import Screen
from tesla_med.cli.termination import terminated_as_interrupted
from tesla_med.errors import TeslaMedError
from tesla_med.io.space import disk_is_full

INTERRUPTED = 130
app = typer.Typer(
    name="tesla-med",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Adapt a medical segmentation model to a new site at test time, without labels. "
    "Not a medical device: for research use only.",
)
app.add_typer(looking.sites_app, name="sites")
for group in (
    training.app,
    running.app,
    evaluating.app,
    studying.app,
    watching.app,
    exporting.app,
    reviewing.app,
    looking.app,
):
    app.registered_commands += group.registered_commands


RESUMED = ("adapt", "train", "compare")
"""Commands that know ``--resume``."""
GOES_ON = ("study", "watch")
"""Commands that go on where they were interrupted when they are called again."""

ENDED_BY_INTERRUPT = ("watch",)
"""Commands whose usual end is an interrupt."""


def main() -> None:
    """Entry point of the ``tesla-med`` command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may hold what a terminal cannot show
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; used in-process by the tests."""
    try:
        with terminated_as_interrupted() as asked:
            code = app(list(arguments), prog_name="tesla-med", standalone_mode=False)
        if asked() and arguments[0] not in ENDED_BY_INTERRUPT:
            code = INTERRUPTED
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except TeslaMedError as error:
        remedy = _remedy(arguments) if disk_is_full(error) else ""
        return _error(arguments, type(error).__name__, f"{error}{remedy}", 2)
    except Exception as error:
        if hasattr(error, "format_message"):  # wrong usage; the class differs between releases of typer
            return _usage_error(arguments, error)
        if {"--verbose", "-v"} & set(arguments):
            traceback.print_exception(error)
        text = f"unexpected {type(error).__name__}: {error}; --verbose shows where it happened"
        return _error(arguments, type(error).__name__, text, 1)
    if code == INTERRUPTED:
        text = f"interrupted; finished results are complete{_remedy(arguments)}"
        return _error(arguments, "Interrupted", text, INTERRUPTED)
    return code if isinstance(code, int) else 0


def _remedy(arguments: Sequence[str]) -> str:
    """Return how a command that ended early goes on, in words; empty where it begins anew."""
    if set(GOES_ON) & set(arguments[:1]):
        return "; the same call goes on"
    return "; the same call with --resume goes on" if set(RESUMED) & set(arguments[:1]) else ""


def _error(arguments: Sequence[str], kind: str, message: str, code: int) -> int:
    """Report what went wrong, as JSON too where that was asked for, and return the exit code."""
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


if __name__ == "__main__":
    main()
