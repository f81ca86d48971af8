"""Without a terminal every case is a line on standard error, with n/N, its name, its seconds and the time
left; a remark about a case is printed once, with --verbose too.
"""

import re

import nibabel as nib
import numpy as np
import pytest
import small_site as small
import tile_site
from lines import adapt, write_site
from moments import slow_clock

CASE = 80
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Four cases, a voxel of one is not a number."""
    path = small.make_volumes(tmp_path / "nii", 4)[1]
    image = nib.load(path)
    array = np.asarray(image.dataobj, np.float32).copy()
    array[0, 0, 0] = np.nan
    nib.save(nib.Nifti1Image(array, image.affine), path)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("more", [(), ("--verbose",), ("--json",)], ids=str)
def test_a_line_a_case(place, known_weights, capsys, more):
    assert adapt(known_weights(), "--method", "source", *more) == 0
    said = capsys.readouterr().err
    pattern = r"^cases (\d)/4: (Case\d+), \d+\.\d s, (?:about \d+ s left|\d+ s in all)$"
    lines = re.findall(pattern, said, re.MULTILINE)
    assert lines == [(str(number + 1), f"Case0{number}") for number in range(4)]
    assert said.count("not finite") == 1
    assert "Remark: Case01: 1 voxels that were not finite" in said


def test_every_pass(place, small_weights, capsys):
    assert adapt(small_weights, "--method", "bn", "--protocol", "N-M") == 0
    said = capsys.readouterr().err
    assert re.search(r"^passes over the site 1/\d+: ", said, re.MULTILINE)
    assert said.count("not finite") == 1


def test_a_failed_case_is_told_once(place, known_weights, capsys):
    small.truncate(place / "nii/Case02.nii.gz")
    assert adapt(known_weights(), "--method", "source") == 1
    said = capsys.readouterr().err
    assert len([line for line in said.splitlines() if "Case02: " in line]) == 1


def test_nothing_when_quiet(place, known_weights, capsys):
    assert adapt(known_weights(), "--method", "source", "--quiet") == 0
    shown = capsys.readouterr()
    assert shown.out + shown.err == ""


def test_many_tiles_are_few_lines(tmp_path, tile_weights, monkeypatch, capsys):
    tile_site.make_tiles(tmp_path / "nii", 6)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    line = {"pipeline": "kather"}
    assert adapt(tile_weights, "--method", "source", **line) == 0
    assert not re.search(r"^tiles ", capsys.readouterr().err, re.MULTILINE)
    slow_clock(monkeypatch, 20)
    assert adapt(tile_weights, "--method", "source", "--overwrite", **line) == 0
    said = capsys.readouterr().err
    assert re.findall(r"^tiles (\d+)/24: ", said, re.MULTILINE)[-1:] == ["24"]
