"""A DICOM series with a missing slice is refused with the position and width of the gap, never stretched."""

import re

import numpy as np
import pytest
from dicom_files import write_series
from lines import run, write_site
from small_volumes import run_whole

CASE = 22
SHAPE = (16, 12, 10)


def make_series(folder):
    return write_series(folder, np.random.default_rng(0).integers(0, 900, SHAPE).astype(np.uint16))


@pytest.mark.parametrize(
    ("missing", "place"), [(2, "between 8.00 and 14.00"), (5, "between 17.00 and 23.00")]
)
def test_ten_slices_less_one(known_weights, tmp_path, capsys, missing, place):
    make_series(tmp_path / "nii/Case00")
    make_series(tmp_path / "nii/Case01")[missing].unlink()
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    whole, gap = result.results
    assert (whole.status, gap.status) == ("ok", "failed")
    words = f"1 slice missing {place} mm.*gap of 6.00 mm.*stack of 3.00 mm"
    assert re.search(words, gap.reason)
    assert len(list((result.out / "masks").rglob("*.nii.gz"))) == 1
    check = ["sites", "check", write_site(tmp_path), "--volumes", tmp_path / "nii", "--json"]
    assert run(check) == 1
    assert re.search(words, capsys.readouterr().out)
