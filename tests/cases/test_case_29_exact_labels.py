"""Labels are stored as integers, without slope or intercept; reading and writing never changes them."""

import nibabel as nib
import numpy as np
import small_site as small

from tesla_med.io.volumes import read_mask, read_volume, write_mask

CASE = 29


def test_ten_cycles_change_nothing(tmp_path):
    path = small.make_volumes(tmp_path / "nii", 1)[0]
    image = nib.load(path)
    image.header.set_slope_inter(0.37, -100)
    nib.save(image, path)
    volume = read_volume(path)
    mask = np.random.default_rng(0).choice([0, 1, 2, 7], volume.shape).astype(np.float64)
    target = tmp_path / "mask.nii.gz"
    now = mask.astype(np.uint8)
    for _ in range(10):
        write_mask(target, now, volume)
        now, _ = read_mask(target)
    written = nib.load(target)
    assert np.array_equal(np.asarray(written.dataobj.get_unscaled()), mask)
    assert written.header["scl_slope"] in (1, 0) or np.isnan(written.header["scl_slope"])
    assert written.header["scl_inter"] == 0 or np.isnan(written.header["scl_inter"])
