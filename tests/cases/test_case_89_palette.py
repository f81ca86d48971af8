"""Palettes are expanded to their colours before anything else."""

import numpy as np
import pytest
from PIL import Image
from tile_files import channels, smooth

from tesla_med.io.tiles import read_tile

CASE = 89


@pytest.mark.parametrize("end", ["png", "tif"])
def test_indices_are_not_intensities(tmp_path, end):
    plain = Image.fromarray(smooth()).quantize(200)
    plain.save(tmp_path / f"p.{end}")
    picture = read_tile(tmp_path / f"p.{end}")
    assert np.abs(picture.array - channels(smooth())).max() < 0.2
    assert np.allclose(picture.array, channels(np.asarray(plain.convert("RGB"))))
