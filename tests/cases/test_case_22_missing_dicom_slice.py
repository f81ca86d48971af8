"""A DICOM series with a missing slice is refused with the position and width of the gap, never stretched."""

import numpy as np
import pytest
from dicom_files import write_series

from tesla_med.errors import DataError
from tesla_med.io.volumes import read_volume

CASE = 22


@pytest.mark.parametrize(
    ("missing", "place"), [(2, "between 8.00 and 14.00"), (5, "between 17.00 and 23.00")]
)
def test_ten_slices_less_one(tmp_path, missing, place):
    array = np.random.default_rng(0).integers(0, 900, (16, 12, 10)).astype(np.uint16)
    paths = write_series(tmp_path, array)
    assert read_volume(tmp_path).shape == (16, 12, 10)
    paths[missing].unlink()
    with pytest.raises(DataError, match=f"1 slice missing {place} mm.*gap of 6.00 mm.*stack of 3.00 mm"):
        read_volume(tmp_path)
