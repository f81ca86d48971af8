"""The model sees intensities scaled by slope and intercept; a slope of 0 or NaN means unscaled."""

import numpy as np
import pytest
import small_site as small
from small_volumes import blocks, raw, run_whole, write

CASE = 8
SHAPE = (32, 28, 6)


@pytest.mark.parametrize(
    ("slope", "window"), [(2.0, "-100 to 300"), (0.0, "0 to 200"), (float("nan"), "0 to 200")]
)
def test_slope_and_intercept(known_weights, tmp_path, slope, window):
    data = blocks(SHAPE, 200).astype(np.uint8)
    write(tmp_path / "nii/Case00.nii.gz", data, scl_slope=slope, scl_inter=-100)
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out", reports=("reports=[html]",))
    page = (result.out / "report/report.html").read_text(encoding="utf-8")
    assert f"display window {window}" in page
    header, stored = raw(result.out / "masks/Case00_mask.nii.gz")
    assert (float(header["scl_slope"]), float(header["scl_inter"])) == (1, 0)
    assert set(np.unique(stored)) == {0, 1}


def test_a_negative_slope_turns_dark_into_bright(known_weights, tmp_path):
    data = blocks(SHAPE, 200).astype(np.uint8)
    write(tmp_path / "nii/Case00.nii.gz", data, scl_slope=-1, scl_inter=200)
    overrides = ("preprocessing.fill.enabled=false",)
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out", overrides=overrides)
    assert np.array_equal(small.labels(result.out, "Case00") == 1, data == 0)
