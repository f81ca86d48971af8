"""Reorientation is undone: with a stub model the mask is the threshold of the image, voxel for voxel."""

import nibabel as nib
import numpy as np
import small_site as small
from small_volumes import assert_same_grid, blocks, run_whole, write

CASE = 26
SHAPE = (61, 53, 11)


def test_an_lps_volume_with_an_off_centre_l(known_weights, tmp_path):
    affine = np.diag([-0.977, -0.977, 3.3, 1.0])
    affine[:3, 3] = 31.5, 17.25, -40.0
    image = write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE), affine)
    assert nib.aff2axcodes(nib.load(image).affine) == ("L", "P", "S")
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    assert np.array_equal(small.labels(result.out, "Case00") > 0, blocks(SHAPE) > 0)
    mask = nib.load(result.out / "masks/Case00_mask.nii.gz")
    assert np.array_equal(mask.affine, nib.load(image).affine)
    assert_same_grid(result.out / "masks/Case00_mask.nii.gz", image)
