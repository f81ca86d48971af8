"""Lengths in metres or micrometres are converted to millimetres, unknown units are read as mm with a note;
headers stay.

"""

import numpy as np
import pytest
from small_volumes import assert_same_grid, blocks, diagonal, run_whole, write

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
    found = (blocks((32, 28, 6)) > 0).astype(np.uint8)
    in_mm = diagonal(1, 1, 3, origin=(2, 0, 0))
    write(tmp_path / "nii/Case00_segmentation.nii.gz", np.roll(found, 1, axis=0), in_mm)
    result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out")
    (case,) = result.results
    assert case.status == "ok"  # the reference lies where the image lies
    told = [note for note in case.notes if "metres" in note or "millimetres" in note]
    assert bool(told) == bool(words)
    assert all(words in note for note in told)
    (score,) = case.scores
    assert score.volume_ml == pytest.approx(found.sum() * 3 / 1000, rel=1e-5)
    assert score.hd95_mm == pytest.approx(1.0, rel=1e-5)
    assert_same_grid(result.out / "masks/Case00_mask.nii.gz", image)
