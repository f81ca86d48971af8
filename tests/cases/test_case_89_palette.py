"""Palettes are expanded to their colours before anything else."""

import numpy as np
import pytest
from PIL import Image
from tile_files import classify, probabilities, smooth, tiles

CASE = 89


@pytest.mark.parametrize("end", ["png", "tif"])
def test_indices_are_not_intensities(tmp_path, tile_weights, monkeypatch, end):
    folder = tiles(tmp_path)
    palette = Image.fromarray(smooth()).quantize(200)
    palette.save(folder / f"palette.{end}")
    palette.convert("RGB").save(folder / "plain.png")
    Image.fromarray(np.asarray(palette)).save(folder / "indices.png")
    code, rows = classify(tmp_path, tile_weights, monkeypatch)
    assert code == 0
    found = {name.partition(".")[0]: probabilities(row) for name, row in rows.items()}
    assert np.array_equal(found["palette"], found["plain"])
    assert not np.allclose(found["palette"], found["indices"], atol=0.01)
