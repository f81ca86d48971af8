"""The program that reads adapted nnU-Net folders with nnU-Net: its calls, its verdict, its table."""

from __future__ import annotations

import programs
import pytest


@pytest.fixture(scope="module")
def program():
    return programs.load("nnunet_return")


def interpreter(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_nnunet_is_called_with_folder_and_images(program, tmp_path):
    python = interpreter(tmp_path / "python", 'cat "$5" "$6" > "$4.nii.gz"; echo "$3" >> "$4.nii.gz"')
    images = [tmp_path / "a_0000.nii.gz", tmp_path / "a_0001.nii.gz"]
    for number, image in enumerate(images):
        image.write_text(f"{number}\n", encoding="utf-8")
    found = program.theirs(python, tmp_path / "folder", images, tmp_path / "a")
    assert found.read_text(encoding="utf-8").split() == ["0", "1", str(tmp_path / "folder")]


def test_what_nnunet_says_is_told_when_it_fails(program, tmp_path):
    python = interpreter(tmp_path / "python", "echo no such key: decoder >&2; exit 3")
    with pytest.raises(SystemExit, match=r"could not predict with .*folder:\nno such key: decoder"):
        program.theirs(python, tmp_path / "folder", [], tmp_path / "a")


def test_the_verdict_and_the_table(program):
    row = {"model": "m", "case": "c", "voxels": 20000, "agreement_percent": 99.995, "moved_percent": 0.5}
    assert program.good([row])
    assert not program.good([row, row | {"agreement_percent": 99.98}])
    assert not program.good([row | {"moved_percent": 0.0}])
    assert not program.good([])
    assert program.table([row]).splitlines()[-1] == "| m | c | 20000 | 99.9950 % | 0.50 % |"
