"""Transparent pixels of a tile are placed on white, never on black, and that is noted."""

import numpy as np
from PIL import Image
from tile_files import channels, smooth

from tesla_med.io.tiles import read_tile

CASE = 85


def test_upper_half_transparent(tmp_path):
    array = np.dstack([smooth(), np.full((64, 64), 255, np.uint8)])
    array[:32, :, 3] = 0
    Image.fromarray(array).save(tmp_path / "a.png")
    picture = read_tile(tmp_path / "a.png")
    assert (picture.array[:, :32] == 1).all()
    assert np.allclose(picture.array[:, 32:], channels(smooth())[:, 32:])
    assert "white" in picture.notes[0]
