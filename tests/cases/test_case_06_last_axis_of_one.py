"""An image or reference of shape (x, y, z, 1) counts as (x, y, z), and its mask is 3-D."""

import nibabel as nib
import numpy as np
import pytest
from small_volumes import assert_same_grid, blocks, run_whole, write

import tesla_med

CASE = 6
SHAPE = (16, 16, 8)


@pytest.mark.parametrize("image_axes", [3, 4])
@pytest.mark.parametrize("reference_axes", [3, 4])
def test_masks_are_3d_and_references_fit_with_and_without_the_axis(
    known_weights, tmp_path, image_axes, reference_axes
):
    data = blocks(SHAPE)
    truth = (data > 0).astype(np.uint8)
    image = write(tmp_path / "nii/Case00.nii.gz", data.reshape((*SHAPE, 1)[:image_axes]))
    layer = truth.reshape((*SHAPE, 1)[:reference_axes])
    write(tmp_path / "nii/Case00_segmentation.nii.gz", layer)
    write(tmp_path / "references/Case00.nii.gz", layer)
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    mask = result.out / "masks/Case00_mask.nii.gz"
    assert nib.load(mask).shape == SHAPE
    assert_same_grid(mask, image)
    assert result.results[0].mean_dice == 1
    (case,) = tesla_med.evaluate(result.out, tmp_path / "references").cases
    assert case.scores[0].dice == 1
