"""A mask has the sform, qform, both codes, pixdim and units of its image, bit for bit."""

import numpy as np
import pytest
from small_volumes import assert_same_grid, blocks, diagonal, raw, run_whole, write

CASE = 25
SHAPE = (32, 28, 6)
TURNED = np.array([[0.8, -0.6, 0, 3], [0.6, 0.8, 0, -2], [0, 0, 3, 1], [0, 0, 0, 1.0]])


@pytest.mark.parametrize(
    ("codes", "qform"),
    [((1, 1), None), ((2, 1), diagonal(1, 1, 3)), ((4, 2), None), ((3, 0), None), ((0, 1), TURNED)],
)
@pytest.mark.parametrize("part", ["masks", "source_masks"])
def test_codes_and_matrices(known_weights, tmp_path, codes, qform, part):
    image = write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE), TURNED, qform, codes=codes)
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    mask = result.out / part / "Case00_mask.nii.gz"
    assert_same_grid(mask, image)
    header, _ = raw(mask)
    assert (int(header["sform_code"]), int(header["qform_code"])) == codes
