"""Every path of the command line is read by one rule."""

from pathlib import Path
from typing import get_args

import typer.main

from tesla_med.cli.app import app
from tesla_med.cli.options import path as read_path


def commands(group):
    """Yield the functions of all commands."""
    for command in group.registered_commands:
        yield command.callback
    for item in group.registered_groups:
        yield from commands(item.typer_instance)


def test_whatever_a_command_takes_as_a_path_has_the_parser_that_knows_home_folders():
    found = 0
    for callback in commands(app):
        for name, hint in typer.main.get_params_from_function(callback).items():
            if Path in (hint.annotation, *get_args(hint.annotation)):
                found += 1
                assert hint.default.parser is read_path, f"{callback.__name__} {name}"
    assert found > 15
