"""A matrix whose code is 0 is ignored, whatever it holds: the scan lies where the valid matrix puts it."""

import numpy as np
import pytest
import small_site as small
from small_volumes import assert_same_grid, noise, run_whole, write

CASE = 3
AIL = np.array([[0, 0, -3.0, 20], [1, 0, 0, -7], [0, -1, 0, 4], [0, 0, 0, 1]])


@pytest.mark.parametrize("rows", [np.zeros((4, 4)), np.eye(4)], ids=["zero", "identity"])
def test_the_result_is_that_of_the_scan_with_a_proper_sform(known_weights, tmp_path, rows):
    data = noise((12, 10, 8))
    unset = {f"srow_{axis}": row for axis, row in zip("xyz", rows, strict=False)}
    image = write(tmp_path / "nii/Case00.nii.gz", data, AIL, codes=(0, 1), **unset)
    write(tmp_path / "nii/Case01.nii.gz", data, AIL, codes=(1, 0))
    for name in ("Case00", "Case01"):  # a reference where the valid matrix says
        truth = (data > 100).astype(np.uint8)
        write(tmp_path / f"nii/{name}_segmentation.nii.gz", truth, AIL, codes=(1, 0))
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    assert [(item.status, item.notes) for item in result.results] == [("ok", ())] * 2
    assert [item.mean_dice for item in result.results] == [1.0, 1.0]
    assert np.array_equal(small.labels(result.out, "Case00"), small.labels(result.out, "Case01"))
    assert_same_grid(result.out / "masks/Case00_mask.nii.gz", image)
