"""16-bit pictures are scaled by their bit depth, keeping all levels."""

import numpy as np
from PIL import Image

from tesla_med.io.tiles import read_tile

CASE = 86


def test_a_ramp_and_its_8_bit_copy(tmp_path):
    ramp = np.repeat(np.linspace(0, 65535, 64).astype(np.uint16)[None], 64, 0)
    Image.fromarray(ramp).save(tmp_path / "deep.tif")
    Image.fromarray((ramp // 257).astype(np.uint8)).save(tmp_path / "flat.png")
    deep, flat = read_tile(tmp_path / "deep.tif").array, read_tile(tmp_path / "flat.png").array
    assert np.abs(deep - flat).max() < 0.005
    assert len(np.unique(deep)) == 64
