"""The voxel axes may have any order and sign, even left-handed: the mask of a reoriented copy is the
reoriented mask.

"""

import itertools

import nibabel as nib
import numpy as np
import small_site as small
from nibabel.orientations import apply_orientation, inv_ornt_aff
from small_volumes import assert_same_grid, blocks, diagonal, run_whole, write

CASE = 12
SHAPE = (20, 16, 12)
ORDERS = [
    np.column_stack([axes, signs])
    for axes in itertools.permutations(range(3))
    for signs in itertools.product((1, -1), repeat=3)
]


def test_all_48_orders(known_weights, tmp_path):
    data, affine = blocks(SHAPE), diagonal(1, 1.5, 3, origin=(-7, 4, 11))
    for index, order in enumerate(ORDERS):
        turned = np.ascontiguousarray(apply_orientation(data, order))
        place = affine @ inv_ornt_aff(order, SHAPE)
        write(tmp_path / f"nii/Case{index:02d}.nii.gz", turned, place, codes=(1, 0))
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    assert [item.status for item in result.results] == ["ok"] * 48
    handed = set()
    for index, order in enumerate(ORDERS):
        name = f"Case{index:02d}"
        mask = small.labels(result.out, name)
        assert np.array_equal(mask > 0, apply_orientation(data, order) > 0), order
        assert_same_grid(result.out / f"masks/{name}_mask.nii.gz", tmp_path / f"nii/{name}.nii.gz")
        written = nib.load(result.out / f"masks/{name}_mask.nii.gz").affine
        handed.add(bool(np.linalg.det(written[:3, :3]) > 0))
    assert handed == {True, False}
