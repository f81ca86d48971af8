"""The commands of the pages: every one is parsed as it stands, and run on generated images where it can be.

A block of commands that needs something that no test has begins after ``<!-- not run: REASON -->``.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pages_world
import pytest
import typer.main

from tesla_med.cli.app import app, run

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TUTORIALS = ROOT / "docs" / "tutorials"  # tests/test_tutorials.py
BLOCK = re.compile(r"(?:<!-- not run: ([^\n]+?) -->\n+)?^```([a-z]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
SERVING = {"review": "tests/review", "tensorboard": "tests/cli"}
"""Commands that serve until they are stopped, and where they are tested."""
FAST = {
    "adapt": [*pages_world.sets(pages_world.OF_VOLUMES), "--device", "cpu"],
    "predict": ["--device", "cpu"],
    "compare": [*pages_world.sets(pages_world.OF_VOLUMES), "--device", "cpu", "--seeds", "1"],
    "train": [
        *pages_world.sets(["train.steps=2", "train.validate_every=1", "train.batch_size=3"]),
        *pages_world.sets(["preprocessing.size=[32,32]"]),
        *("--device", "cpu"),
    ],
    "statistics": ["--device", "cpu"],
    "study": ["--device", "cpu"],
    "watch": [*pages_world.sets(pages_world.OF_VOLUMES), "--device", "cpu", "--once", "--settle", "0"],
}
"""What is added to a line so that it is done in seconds; of an option that is given twice the last counts."""


@dataclass(frozen=True)
class Line:
    """One command of a page, and why it is not run, or ""."""

    page: Path
    words: tuple[str, ...]
    reason: str

    @property
    def name(self):
        return self.page.relative_to(ROOT).as_posix()


def lines_of(page):
    """Return the commands of a page in their order."""
    found = []
    for marked, _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        reason = "needs data" if block.startswith("# needs data") else marked
        for text in block.replace("\\\n", " ").splitlines():
            match = re.match(r"(?:\$ )?tesla-med (.*)", text)
            if match:
                found.append(Line(page, tuple(shlex.split(match[1], comments=True)), reason))
    return found


LINES = [line for page in PAGES for line in lines_of(page)]
RUN = {
    page: [line for line in lines_of(page) if not line.reason]
    for page in PAGES
    if TUTORIALS not in page.parents
}


def parsed(words):
    """Parse a line as the command line does, up to the values of its options, and run nothing."""
    command = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {rest[0]}"
        command = command.commands[rest.pop(0)]
    if rest in (["--version"], ["--help"]):
        return
    command.make_context("tesla-med", rest)


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.name}: {' '.join(line.words)[:60]}")
def test_every_command_is_one(line):
    parsed(line.words)


@pytest.mark.parametrize(
    "words",
    [
        ("adapt", "--volumes"),
        ("adapt", "--vol", "nii"),
        ("adapt", "--volumes", "nii", "--seed", "x"),
        ("adapted",),
    ],
)
def test_what_is_no_command_is_found(words):
    with pytest.raises(Exception, match=r"requires an argument|[Nn]o such option|valid integer|no command"):
        parsed(words)


def test_most_commands_are_run():
    run_too = sum(len(lines) for lines in RUN.values())
    assert run_too > 60
    for line in LINES:
        assert not line.reason or len(line.reason) > 8, line


# ------------------------------------------------------------ run


@pytest.fixture(scope="module")
def world(one_thread, tmp_path_factory):
    folder = pages_world.make_world(tmp_path_factory.mktemp("pages") / "world")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        pages_world.make_runs(folder)
    return folder


def clear(words):
    """Remove what an earlier line of the page, or the world, has in the output folder of a line."""
    if words[0] not in ("adapt", "predict", "train", "compare") or {"--resume", "--dry-run"} & set(words):
        return
    if "--out" in words:
        shutil.rmtree(words[words.index("--out") + 1], ignore_errors=True)
    else:
        default = {"adapt": "runs/F/tesla-N-O", "predict": "runs/F/predict"}.get(words[0], "comparison")
        shutil.rmtree(default, ignore_errors=True)


def more(words):
    """Return what is added to a line so that it takes seconds."""
    added = list(FAST.get(words[0], ()))
    tiles = any("kather" in word for word in words)
    if words[0] == "study":
        added += ["--jobs", "1"] if "--jobs" in words else ["--scheduler", "none"]
    if words[0] == "adapt" and any("nnUNet" in word for word in words):
        return [*pages_world.sets(pages_world.OF_NNUNET), "--device", "cpu"]
    if tiles and words[0] in ("adapt", "train", "compare"):
        added = [*pages_world.sets(pages_world.OF_TILES), "--device", "cpu"]
        added += pages_world.sets(["train.steps=2", "train.validate_every=1"])
    if words[0] == "train" and not tiles and "my_prostate" not in words:
        added += pages_world.sets(["model.params.width=4"])
    if words[0] == "compare" and tiles:
        added += ["--seeds", "1"]
    if "--table" in words:
        added += ["--sites", "D", "--protocols", "N-O"]
    return added


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if RUN[page]], ids=lambda page: page.stem)
def test_commands_do_what_the_page_says(page, world, tmp_path, monkeypatch, capsys):
    folder = Path(shutil.copytree(world, tmp_path / "world"))
    monkeypatch.chdir(folder)
    pages_world.write_site_g(folder, page.stem)
    for line in RUN[page]:
        words = list(line.words)
        if words[0] in SERVING or (words[0] == "demo" and page.stem != "get-started"):
            continue
        if words[0] == "rollback":
            shutil.rmtree("runs")
            shutil.copytree(world / "runs", "runs")
        clear(words)
        code = run([*words, *more(words)])
        said = capsys.readouterr()
        nothing_accepted = "--accepted" in words and "not reviewed" in said.err
        assert code == 0 or nothing_accepted, f"{shlex.join(words)}: {said.out}{said.err}"
