"""The command with which a person decides on masks: review."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tesla_med.cli.console import Screen
from tesla_med.cli.options import Key, Volumes, path

app = typer.Typer()


@app.command(epilog="Example: tesla-med review runs/F/tesla-N-O --volumes ./nii")
def review(
    run: Annotated[
        Path, typer.Argument(parser=path, help="Output folder of adapt, or a folder with several below it.")
    ],
    volumes: Volumes,
    reviewer: Annotated[
        str | None, typer.Option(help="Your name, saved with each decision. Default: the user's.")
    ] = None,
    key: Key = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On this machine; 0 takes a free one.")] = 0,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Look at the masks of a run on a local page, worst first, and accept or reject each of them.

    Decisions are saved at once in review.csv of the run; 'tesla-med export --accepted' follows them.
    """
    from tesla_med.review.content import Content
    from tesla_med.review.server import check_installed, serve

    check_installed()
    screen = Screen()
    content = Content(run, volumes, reviewer or _user(), key)

    def ready(address: str) -> None:
        screen.say(f"Page, for this machine and whoever has its address only: {address}")
        screen.say("Decisions go to review.csv of the run. Ctrl-C ends.")
        if open_page:
            import webbrowser

            webbrowser.open(address)

    serve(content, port, ready)


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        return "reviewer"
