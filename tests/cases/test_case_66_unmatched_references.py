"""Masks and references without a partner are listed both ways with n of N; --strict makes them an error."""

import json

import numpy as np
import pytest
from lines import run
from small_volumes import blocks, diagonal, write

CASE = 66


@pytest.fixture
def arguments(tmp_path):
    """Five predictions and four references, one of which has another suffix."""
    mask = (blocks((16, 16, 8)) > 0).astype(np.uint8)
    for index in range(5):
        write(tmp_path / f"masks/Case0{index}_mask.nii.gz", mask, diagonal(1, 1, 3))
    for name in ("Case00_seg", "Case01_seg", "Case02_seg", "Case03_final"):
        write(tmp_path / f"references/{name}.nii.gz", mask, diagonal(1, 1, 3))
    places = ("--predictions", "masks", "--references", "references", "--out", "out")
    return ["evaluate", *(str(tmp_path / item) if item[0] != "-" else item for item in places)]


def test_both_lists_and_n_of_n(arguments, tmp_path, capsys):
    assert run(arguments) == 0
    said = capsys.readouterr()
    first, rest = said.out.splitlines()[0], said.err.splitlines()
    assert first == "scored 3 of 5 predictions and 3 of 4 references"
    assert "Remark: 2 without a reference: Case03, Case04" in rest
    assert "Remark: 1 without a mask: Case03_final" in rest
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["only_predictions"] == ["Case03", "Case04"]
    assert summary["only_references"] == ["Case03_final"]
    assert summary["coverage"] == first
    assert summary["classes"][0]["cases"] == 3


def test_strict_is_an_error_and_writes_nothing(arguments, tmp_path, capsys):
    assert run([*arguments, "--strict"]) == 2
    said = capsys.readouterr().err
    for words in ("3 of 5 predictions", "Case03, Case04", "Case03_final"):
        assert words in said
    assert not (tmp_path / "out").exists()


def test_strict_is_content_where_all_have_a_partner(arguments, tmp_path):
    for name in ("masks/Case03_mask", "masks/Case04_mask", "references/Case03_final"):
        (tmp_path / f"{name}.nii.gz").unlink()
    assert run([*arguments, "--strict"]) == 0
