"""Where the disk is full no final name is used; the message gives the space needed and the space free."""

import re

import numpy as np
import pytest
import small_site as small
from full_disk import LIMIT, limited
from lines import adapt, work_there
from small_volumes import noise, write

pytest.importorskip("resource")

CASE = 75
STATUS = "a limit on the size of files stands for the full disk, so it is not tested on Windows"


def test_a_mask_that_does_not_fit(tmp_path, known_weights, monkeypatch, capsys):
    """The second of three: the first is smaller."""
    work_there(tmp_path, monkeypatch, 1)
    for name in ("Case01", "Case02"):
        image = noise((96, 96, 48))
        write(tmp_path / f"nii/{name}.nii.gz", image)
        write(tmp_path / f"nii/{name}_segmentation.nii.gz", (image > 100).astype(np.uint8))
    line = (known_weights(), "--method", "source", "--set", "preprocessing.size=null")
    with limited():
        assert adapt(*line) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(
        r"Case01_mask\.nii\.gz.*[KM]iB needed, \d+\.\d MiB free.*free some space.*with --resume goes on", said
    )
    assert "Traceback" not in said
    names = small.files_below(tmp_path / "out")
    assert not [name for name in names if ".tmp-" in name or "Case01_mask" in name or "Case02_mask" in name]
    before = small.masks(tmp_path / "out")
    assert "masks/Case00_mask.nii.gz" in before
    assert adapt(*line, "--resume") == 0
    after = small.masks(tmp_path / "out")
    assert len(after["masks/Case01_mask.nii.gz"]) > LIMIT
    assert before.items() <= after.items()


def test_weights_that_do_not_fit(tmp_path, small_weights, monkeypatch, capsys):
    work_there(tmp_path, monkeypatch, 2)
    with limited():
        assert adapt(small_weights) == 2
    said = capsys.readouterr().err
    assert re.search("[KM]iB needed", said)
    assert "MiB free" in said
    assert "Traceback" not in said
    assert not [name for name in small.files_below(tmp_path / "out") if ".tmp-" in name or "Case" in name]
    assert adapt(small_weights, "--resume") == 0
