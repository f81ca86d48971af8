"""Masks are uint8, or uint16 where a label is above 255, and open in ITK, whatever the type of the input."""

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - its usual name
import small_site as small

from tesla_med.io.volumes import read_volume, write_mask

CASE = 28


@pytest.mark.parametrize(
    ("label", "kind"), [(1, np.uint8), (255, np.uint8), (256, np.uint16), (900, np.uint16)]
)
def test_the_type_follows_the_largest_label(tmp_path, label, kind):
    volume = read_volume(small.make_volumes(tmp_path / "nii", 1)[0])
    mask = np.zeros(volume.shape, np.int64)
    mask[2:5, 3:6, 1:3] = label
    path = tmp_path / "mask.nii.gz"
    write_mask(path, mask, volume)
    written = nib.load(path)
    assert written.get_data_dtype() == kind
    assert np.array_equal(np.asarray(written.dataobj), mask)
    assert np.array_equal(sitk.GetArrayFromImage(sitk.ReadImage(str(path))).T, mask)
