"""Tests of cases see what users see: the command line, public names, and the files that both write."""

import ast
from pathlib import Path

import pytest

import tesla_med

LAST = 121  # the last case whose test keeps to this
INTERNAL = {"make_network", "make_statistics", "make_tta", "make_images", "batch_mode_probs"}
FILES = [
    path
    for path in sorted(Path(__file__).parent.glob("test_case_*.py"))
    if int(path.name.split("_")[2]) <= LAST
]


def internals(source):
    """Return what the text of a test uses of the package beside its public names.

    Looked at are imports, attributes, texts such as ``monkeypatch`` takes, and fixtures.
    """
    public = set(tesla_med.__all__)
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [item.name for item in node.names if item.name.startswith("tesla_med.")]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tesla_med":
            names = [item.name for item in node.names]
            found += [
                f"{node.module}.{name}" for name in names if node.module != "tesla_med" or name not in public
            ]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "tesla_med" and node.attr not in public:
                found.append(f"tesla_med.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if node.value.startswith("tesla_med.") else []
        elif isinstance(node, ast.arg) and node.arg in INTERNAL:
            found.append(f"fixture {node.arg}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_public_names_only(path):
    assert internals(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import tesla_med\ntesla_med.evaluate()", []),
        ("from tesla_med import evaluate", []),
        ("from tesla_med import losses", ["tesla_med.losses"]),
        ("import tesla_med.io.volumes", ["tesla_med.io.volumes"]),
        ("def test():\n    from tesla_med.errors import DataError", ["tesla_med.errors.DataError"]),
        ("import tesla_med\ntesla_med.io.volumes", ["tesla_med.io"]),
        ("patch('tesla_med.adapt.read_ahead')", ["tesla_med.adapt.read_ahead"]),
        ("def test(make_tta): pass", ["fixture make_tta"]),
    ],
)
def test_what_counts_as_internal(source, found):
    assert internals(source) == found
