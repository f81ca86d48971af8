"""The notebooks of the documentation run from the first cell to the last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.py"))


def test_every_notebook_is_on_its_page():
    page = (FOLDER.parent / "how-to" / "notebooks.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\.\./notebooks/(\w+\.py)", page)) == [path.name for path in NOTEBOOKS]
    assert len(NOTEBOOKS) == 2


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    jupytext, nbclient = pytest.importorskip("jupytext"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = jupytext.read(path)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    pictures = [item for cell in code for item in cell.outputs if "image/png" in item.get("data", {})]
    assert pictures, "a notebook shows something"
