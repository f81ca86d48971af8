"""Every command of the tutorials is run, in the order in which a reader would, on the demo's images."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tesla_med.cli.app import run

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "tutorials"
ELSEWHERE = {"review", "tensorboard"}
"""Commands that serve until they are stopped: tests/review and tests/cli."""
NEEDS_DATA = "# needs data"


def lines(page):
    """Return the lines of a page's code blocks, without those that need data of a reader's."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        if not block.startswith(NEEDS_DATA):
            yield from block.replace("\\\n", " ").splitlines()


@pytest.fixture(scope="module")
def demo(one_thread, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tutorials")
    (line,) = [item for item in lines(FOLDER / "researcher.md") if " demo " in item]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(shlex.split(line)[1:]) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(FOLDER.glob("*.md")), ids=lambda page: page.stem)
def test_commands_do_what_the_page_says(page, demo, monkeypatch, capsys):
    found = list(lines(page))
    assert len([item for item in found if item.startswith("tesla-med ")]) >= 2
    monkeypatch.chdir(demo if "cd demo" in found else demo / "demo")
    for line in found:
        if line == "cd demo":
            monkeypatch.chdir("demo")
            continue
        program, command, *words = shlex.split(line)
        assert program == "tesla-med", line
        if command == "demo" or command in ELSEWHERE:
            continue
        code = run([command, *words])
        said = capsys.readouterr()
        nothing_accepted = "--accepted" in words and "not reviewed" in said.err
        assert code == 0 or nothing_accepted, f"{line}: {said.out}{said.err}"
