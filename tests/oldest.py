"""Write the lowest version of every dependency that pyproject.toml allows, as constraints for pip.

Example::

    python tests/oldest.py > oldest.txt && pip install -c oldest.txt -e ".[dev]"
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*>=\s*(?P<version>[0-9][0-9.]*)(?:,.*)?")


def lowest(project: dict[str, Any], extras: tuple[str, ...] | None = None) -> dict[str, str]:
    """Return the lowest allowed version of every dependency by name.

    Args:
        project: the table ``project`` of pyproject.toml.
        extras: names of extras whose dependencies count too; None: all.

    Raises:
        ValueError: a dependency has no lower bound, or two different ones.
    """
    optional = project.get("optional-dependencies", {})
    chosen = optional if extras is None else {name: optional[name] for name in extras}
    found: dict[str, str] = {}
    for text in (*project["dependencies"], *(text for texts in chosen.values() for text in texts)):
        match = REQUIREMENT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} has no lower bound of the form name>=version")
        name, version = match["name"], match["version"]
        if found.setdefault(name, version) != version:
            raise ValueError(f"{name} has two lower bounds: {found[name]} and {version}")
    return found


def read() -> dict[str, Any]:
    """Return the table ``project`` of this project."""
    content: dict[str, Any] = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    return content


def python_range(project: dict[str, Any] | None = None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the lowest Python that is allowed and the first above it that is not, as (major, minor).

    Raises:
        ValueError: ``requires-python`` is not of the form ``>=3.x,<3.y``.
    """
    text = (read() if project is None else project)["requires-python"]
    match = re.fullmatch(r">=3\.(\d+),<3\.(\d+)", text)
    if match is None:
        raise ValueError(f"requires-python is {text!r}, expected >=3.x,<3.y")
    return (3, int(match[1])), (3, int(match[2]))


if __name__ == "__main__":
    for key, value in lowest(read()).items():
        sys.stdout.write(f"{key}=={value}\n")
