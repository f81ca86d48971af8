"""The rules of docs/concepts/rules.md over every command that reads images, and over every task."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from places import DATA, make_places

from tesla_med.cli.app import run
from tesla_med.tasks.base import TASKS

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY = [(command, task) for command in DATA for task in TASKS.names()]
WRITING = [(command, task) for command, task in EVERY if command not in ("evaluate", "sites check")]
LEFT = {"._Case00.nii.gz", ".DS_Store", "._0.png", ".hidden/Case09.nii.gz", "Thumbs.db"}
"""What other programs leave beside images."""


@pytest.fixture(scope="module")
def places(one_thread, tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("places"))


@pytest.fixture(scope="module")
def awkward(places, tmp_path_factory):
    """The same places, but images are links in a linked folder, with what concerns no run beside them."""
    root = tmp_path_factory.mktemp("awkward")
    for task, place in places.items():
        folder = root / task
        shutil.copytree(place.folder, folder, ignore=shutil.ignore_patterns("nii"))
        for path in (item for item in (place.folder / "nii").rglob("*") if item.is_file()):
            link = root / "links" / task / path.relative_to(place.folder / "nii")
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path)
            for name in LEFT:
                (link.parent / name).parent.mkdir(exist_ok=True)
                (link.parent / name).write_bytes(b"\0\5\x16\7not an image")
        (folder / "nii").symlink_to(root / "links" / task)
        for text, name in (("files: {image: [", "Broken"), ("", "Empty"), ("a: 1\n", "Other")):
            path = folder / "site_configs" / place.pipeline / f"{name}.yaml"
            path.write_text(text, encoding="utf-8")
    return root


def files(folder: Path) -> dict[str, bytes]:
    """Return masks, tables of classes and weights below a folder; the rest holds times and paths."""
    kinds = (".nii.gz", ".safetensors", "predictions.csv")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name.endswith(kinds)
    }


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "task"), EVERY)
def test_links_hidden_files_and_other_sites_change_nothing(
    places, awkward, tmp_path, monkeypatch, capsys, command, task
):
    """Rules 4 and 5."""
    found = []
    for folder, volumes in ((places[task].folder, "nii"), (awkward / task, f"~/{task}/nii")):
        monkeypatch.chdir(folder)
        monkeypatch.setenv("HOME", str(awkward))
        out = tmp_path / str(len(found))
        words = [volumes if word == "nii" else word for word in places[task].base(command, str(out))]
        assert run(words) == 0, capsys.readouterr().err
        said = capsys.readouterr()
        if command != "sites check":  # which says what is not used
            assert not [name for name in LEFT if name in said.out + said.err]
        found.append(files(out) if out.is_dir() else None)
    assert found[0] == found[1]


@pytest.mark.parametrize(("command", "task"), EVERY)
def test_a_remark_is_made_once(places, tmp_path, monkeypatch, capsys, command, task):
    """Rule 7: on standard error, and standard output holds nothing but the answer."""
    monkeypatch.chdir(places[task].folder)
    assert run([*places[task].base(command, str(tmp_path / "out")), "--json"]) == 0
    said = capsys.readouterr()
    json.loads(said.out)
    lines = [line.strip() for line in said.err.splitlines() if line.strip()]
    assert [line for line, count in Counter(lines).items() if count > 1] == []


@pytest.mark.parametrize(("command", "task"), EVERY)
@pytest.mark.parametrize("wrong", ["volumes", "setting"])
def test_what_cannot_run_is_found_before_anything_is_written(
    places, tmp_path, monkeypatch, capsys, command, task, wrong
):
    """Rule 3."""
    place = places[task]
    monkeypatch.chdir(place.folder)
    before = names(place.folder)
    words = place.base(command, str(tmp_path / "out"))
    if wrong == "volumes":
        words = ["nowhere" if word == "nii" else word for word in words]
    elif command == "evaluate":
        words += ["--out", str(tmp_path / "out"), "--values", "not=numbers"]
    else:
        words += ["--set", "preprocessing.size=[0,0]"]
    code = run(words)
    said = capsys.readouterr()
    assert code == 2, said.out + said.err
    assert ("nowhere" if wrong == "volumes" else "") in said.err
    assert said.err.strip()
    assert not (tmp_path / "out").exists()
    assert names(place.folder) == before


@pytest.mark.parametrize("task", TASKS.names())
def test_a_preview_writes_nothing_and_fails_where_the_run_would(places, tmp_path, monkeypatch, capsys, task):
    """Rule 3: the same settings through ``--dry-run`` and the run."""
    place = places[task]
    monkeypatch.chdir(place.folder)
    base = place.base("adapt", str(tmp_path / "out"))
    before = names(place.folder)
    assert run([*base, "--dry-run"]) == 0
    for more in (
        ["--method", "tesla_s", "--protocol", "N-O"],
        ["--method", "bn", "--set", "methods.bn.nothing=1"],
    ):
        codes = [run([*base, *more, *preview]) for preview in (["--dry-run"], [])]
        assert codes == [2, 2], capsys.readouterr().err
    assert names(place.folder) == before
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("command", "task"), WRITING)
def test_an_output_that_is_there_is_kept(places, tmp_path, monkeypatch, capsys, command, task):
    """Rule 6: nothing is replaced unasked."""
    monkeypatch.chdir(places[task].folder)
    out = tmp_path / "out"
    words = places[task].base(command, str(out))
    if command == "statistics":
        target = Path(f"{out}.statistics.safetensors")
        assert run(words) == 0
        first = target.read_bytes()
        assert run(words) == 0  # the same images give the same file
        assert target.read_bytes() == first
        return
    out.mkdir()
    (out / "mine.txt").write_text("mine", encoding="utf-8")
    assert run(words) == 2
    assert str(out) in capsys.readouterr().err
    assert names(out) == ["mine.txt"]
