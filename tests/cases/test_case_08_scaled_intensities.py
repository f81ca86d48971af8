"""The model sees intensities scaled by slope and intercept; a slope of 0 or NaN means unscaled."""

import nibabel as nib
import numpy as np
import pytest

from tesla_med.io.volumes import read_volume, write_mask

CASE = 8


@pytest.mark.parametrize(("slope", "low", "high"), [(2.0, -100, 410), (0.0, 0, 255), (float("nan"), 0, 255)])
def test_slope_and_intercept(tmp_path, slope, low, high):
    path = tmp_path / "image.nii"
    array = np.arange(256, dtype=np.uint8).reshape(8, 8, 4)
    image = nib.Nifti1Image(array, np.eye(4))
    image.header.set_slope_inter(1, 0)
    raw = bytearray(image.to_bytes())
    header = image.header.copy()
    header["scl_slope"], header["scl_inter"] = slope, -100
    raw[:348] = header.binaryblock
    path.write_bytes(bytes(raw))
    volume = read_volume(path)
    assert (volume.array.min(), volume.array.max()) == (low, high)
    target = tmp_path / "mask.nii.gz"
    write_mask(target, (array > 99).astype(np.uint8), volume)
    written = nib.load(target)
    assert written.header["scl_slope"] in (1, 0) or np.isnan(written.header["scl_slope"])
    assert set(np.unique(np.asarray(written.dataobj))) == {0, 1}
