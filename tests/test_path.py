"""The main path is as short as docs/reference/architecture.md says, and a real run goes along it."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import small_site as small

import tesla_med
from tesla_med.tta.tesla import TeSLA

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(tesla_med.__file__).resolve().parent.parent
PACKAGE = ROOT / "tesla_med"
FILES, LINES, LINES_OF_ADAPT = 6, 1400, 220


def path_of_the_page():
    text = (ROOT / "docs/reference/architecture.md").read_text(encoding="utf-8")
    part = re.search(r"<!-- path -->\n(.*?)\n<!-- /path -->", text, re.DOTALL)[1]
    rows = [re.match(r"\d+\. `(tesla_med/[\w/]+\.py)`: (.+)", line) for line in part.splitlines()]
    assert all(rows), "every line names a file and says in a sentence what it does"
    return {row[1]: row[2] for row in rows}


def on_the_stack():
    """Return the files of the package that are being carried out, this call's own frame left out."""
    found, frame = set(), sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename).resolve()
        if path.is_relative_to(PACKAGE):
            found.add(path.relative_to(ROOT).as_posix())
        frame = frame.f_back
    return found


@pytest.mark.parametrize("options", [{"reset": "case"}, {"reset": "site"}, {"protocol": "N-M"}], ids=str)
def test_a_real_run_goes_along_the_path(tmp_path, monkeypatch, options):
    weights = small.train_weights(tmp_path)
    small.make_volumes(tmp_path / "nii", 1)
    seen = {"adapt": set(), "mask": set()}
    adapt, replace = TeSLA.adapt, Path.replace

    def adapted(self, images):
        seen["adapt"] |= on_the_stack()
        return adapt(self, images)

    def renamed(self, target):
        if "masks" in Path(target).parts and Path(target).name.startswith("Case"):
            seen["mask"] |= on_the_stack()
        return replace(self, target)

    monkeypatch.setattr(TeSLA, "adapt", adapted)
    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr(os, "rename", lambda *_: pytest.fail("files get their names by Path.replace"))
    small.run(tmp_path / "nii", weights, tmp_path / "out", overrides=("guard.enabled=true",), **options)
    named = set(path_of_the_page())
    assert "tesla_med/adapt.py" in seen["adapt"] & seen["mask"]
    for moment, files in seen.items():
        assert files - named == set(), f"at {moment}: not on the page"


def test_the_path_is_short():
    named = path_of_the_page()
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in named}
    assert len(named) <= FILES
    assert sum(lines.values()) <= LINES, lines
    assert lines["tesla_med/adapt.py"] <= LINES_OF_ADAPT
    assert next(iter(named)) == "tesla_med/adapt.py"
    assert all(sentence.endswith(".") for sentence in named.values())


def test_the_house_has_its_measures():
    top = [path for path in PACKAGE.iterdir() if path.is_file()]
    assert len(top) <= 10, [path.name for path in top]
    for path in PACKAGE.rglob("*.py"):
        count = len(path.read_text(encoding="utf-8").splitlines())
        assert count <= 400, f"{path.relative_to(ROOT)} has {count} lines"
