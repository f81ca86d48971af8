"""A sheared affine is accepted and never straightened: masks carry it exactly as it is in the input."""

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from small_volumes import assert_same_grid, blocks, diagonal, run_whole, write

CASE = 4


@pytest.mark.parametrize("shear", [0.001, 0.05])
def test_a_sheared_scan_is_adapted_like_any_other(known_weights, tmp_path, shear):
    affine = diagonal(1, 1, 3)
    affine[0, 1] = shear
    data = blocks((16, 16, 8))
    image = write(tmp_path / "nii/Case00.nii.gz", data, affine, codes=(1, 0))
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    assert np.array_equal(small.labels(result.out, "Case00") > 0, data > 0)
    assert_same_grid(result.out / "masks/Case00_mask.nii.gz", image)
    written = nib.load(result.out / "masks/Case00_mask.nii.gz").affine
    assert np.array_equal(written, affine.astype(np.float32))


def test_a_degenerate_affine_is_refused_with_the_way_out(known_weights, tmp_path):
    affine = diagonal(1, 1, 3)
    affine[:3, 1] = affine[:3, 0]
    write(tmp_path / "nii/Case00.nii.gz", blocks((16, 16, 8)), affine, codes=(1, 0))
    (case,) = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out").results
    assert case.status == "failed"
    assert "Case00.nii.gz" in case.reason
    assert "repair the header" in case.reason
