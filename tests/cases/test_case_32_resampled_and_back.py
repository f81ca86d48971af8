"""After resampling and back a mask has the image's shape and affine and is correctly placed within half a
voxel.

"""

import nibabel as nib
import numpy as np
import pytest
import small_site as small
from scipy import ndimage
from small_volumes import assert_same_grid, diagonal, run_whole, write

CASE = 32
SHAPE = (61, 53, 11)


def test_markers_in_the_corners_and_a_block(known_weights, tmp_path):
    data = np.zeros(SHAPE, np.int16)
    data[:5, :5, :3] = data[-5:, :5, :3] = data[:5, -5:, -3:] = data[-5:, -5:, -3:] = 100
    data[20:37, 18:40, 4:8] = 100
    image = write(tmp_path / "nii/Case00.nii.gz", data, diagonal(0.977, 0.977, 3.3, origin=(-20, 5, 8)))
    result = run_whole(
        tmp_path / "nii",
        known_weights(),
        tmp_path / "out",
        overrides=("preprocessing.spacing=[1.5,1.5,2.0]",),
    )
    mask = small.labels(result.out, "Case00")
    assert_same_grid(result.out / "masks/Case00_mask.nii.gz", image)
    assert np.array_equal(nib.load(result.out / "masks/Case00_mask.nii.gz").affine, nib.load(image).affine)
    parts, count = ndimage.label(data)
    found, others = ndimage.label(mask)
    assert count == others == 5
    wanted = np.array(ndimage.center_of_mass(data, parts, range(1, 6)))
    given = np.array(ndimage.center_of_mass(mask, found, range(1, 6)))
    assert np.abs(wanted - given).max() <= 0.5 + 1e-6
    assert np.abs(wanted - given)[2].max() < 0.2  # the block, cut by no edge of the field
    assert mask.sum() == pytest.approx((data > 0).sum(), rel=0.15)
