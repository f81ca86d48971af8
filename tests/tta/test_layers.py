"""Methods and augmentation stand below files, references, tasks and runs, and import nothing in a circle."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import tesla_med

ROOT = Path(tesla_med.__file__).parent
ABOVE = {"io", "prepare", "scoring", "tasks", "reports", "training", "engine", "runs", "cli", "actions"}
MODULES = sorted(path for room in ("tta", "augment") for path in (ROOT / room).rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def path_of(name):
    path = ROOT.parent.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def imported(name):
    """Return the modules of the package that a module imports, early or late."""
    found = set()
    for node in ast.walk(ast.parse(path_of(name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tesla_med":
            whole = [f"{node.module}.{item.name}" for item in node.names]
            found |= {item if path_of(item).is_file() else node.module for item in whole}
    return found


def reached(name):
    """Return every module of the package that importing a module leads to."""
    found, open_names = set(), [name]
    while open_names:
        new = imported(open_names.pop()) - found
        found |= new
        open_names += new
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_above_is_reached(path):
    everything = reached(name_of(path))
    assert not {name for name in everything if name.split(".")[1:2] and name.split(".")[1] in ABOVE}
    assert name_of(path) not in everything
