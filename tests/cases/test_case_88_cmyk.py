"""The mode of a picture is read, not its number of channels: CMYK is converted, not mistaken for RGBA."""

import numpy as np
from PIL import Image
from tile_files import channels, smooth

from tesla_med.io.tiles import read_tile

CASE = 88


def test_four_channels_that_are_inks(tmp_path):
    Image.fromarray(smooth()).convert("CMYK").save(tmp_path / "c.tif")
    picture = read_tile(tmp_path / "c.tif")
    assert picture.array.shape == (3, 64, 64)
    assert np.abs(picture.array - channels(smooth())).max() < 0.02
    assert "CMYK" in picture.notes[0]
