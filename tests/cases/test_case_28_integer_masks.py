"""Masks are uint8, or uint16 where a label is above 255, and open in ITK, whatever the type of the input."""

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - its usual name
from small_volumes import blocks, run_whole, write

CASE = 28
SHAPE = (32, 28, 6)


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.float32])
@pytest.mark.parametrize(
    ("label", "kind"), [(1, np.uint8), (255, np.uint8), (256, np.uint16), (900, np.uint16)]
)
def test_the_type_follows_the_largest_label(known_weights, tmp_path, label, kind, dtype):
    write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE).astype(dtype))
    classes = f"classes=[{{value: 0, name: background}}, {{value: {label}, name: thing}}]"
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out", overrides=(classes,))
    wanted = np.where(blocks(SHAPE) > 0, label, 0)
    for part in ("masks", "source_masks"):
        path = result.out / part / "Case00_mask.nii.gz"
        written = nib.load(path)
        assert written.get_data_dtype() == kind
        assert np.array_equal(np.asarray(written.dataobj), wanted)
        assert np.array_equal(sitk.GetArrayFromImage(sitk.ReadImage(str(path))).T, wanted)
