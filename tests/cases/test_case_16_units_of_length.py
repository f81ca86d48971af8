"""Lengths in metres or micrometres are converted to millimetres, unknown units are read as mm with a note;
headers stay.

"""

import numpy as np
import pytest
from small_volumes import assert_same_grid, blocks, diagonal, run_whole, write

from tesla_med.io.volumes import read_volume

CASE = 16
UNKNOWN, METRE, MM, MICRON = 0, 1, 2, 3


@pytest.mark.parametrize(
    ("unit", "factor", "words"),
    [(MICRON, 0.001, "micrometres"), (METRE, 1000.0, "metres"), (UNKNOWN, 1.0, "assumed"), (MM, 1.0, "")],
)
def test_spacing_in_millimetres(known_weights, tmp_path, unit, factor, words):
    step = 1.0 / factor  # the same 1 x 1 x 3 mm, said in each unit
    grid = diagonal(step, step, 3 * step, origin=(2 * step, 0, 0))
    image = write(tmp_path / "nii/Case00.nii.gz", blocks((32, 28, 6)), grid, unit=unit)
    volume = read_volume(image)
    assert volume.spacing == pytest.approx((1, 1, 3), rel=1e-5)
    assert np.allclose(volume.affine, diagonal(1, 1, 3, origin=(2, 0, 0)), rtol=1e-5)
    told = [note for note in volume.notes if "metres" in note or "millimetres" in note]
    assert bool(told) == bool(words)
    assert all(words in note for note in told)
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    voxels = int((blocks((32, 28, 6)) > 0).sum())
    assert result.results[0].scores[0].volume_ml == pytest.approx(voxels * 3 / 1000, rel=1e-5)
    assert_same_grid(result.out / "masks/Case00_mask.nii.gz", image)
