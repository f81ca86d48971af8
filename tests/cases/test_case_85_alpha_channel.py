"""Transparent pixels of a tile are placed on white, never on black, and that is noted."""

import numpy as np
from PIL import Image
from tile_files import classify, probabilities, smooth, tiles

CASE = 85


def test_upper_half_transparent(tmp_path, tile_weights, monkeypatch, capsys):
    folder = tiles(tmp_path)
    copies = {name: smooth() for name in ("white", "black")}
    copies["white"][:32], copies["black"][:32] = 255, 0
    for name, array in copies.items():
        Image.fromarray(array).save(folder / f"{name}.png")
    array = np.dstack([smooth(), np.full((64, 64), 255, np.uint8)])
    array[:32, :, 3] = 0
    for name in ("alpha", "other"):
        Image.fromarray(array).save(folder / f"{name}.png")
    code, rows = classify(tmp_path, tile_weights, monkeypatch)
    assert code == 0
    found = {name.removesuffix(".png"): probabilities(row) for name, row in rows.items()}
    assert np.array_equal(found["alpha"], found["white"])
    assert not np.allclose(found["alpha"], found["black"], atol=0.01)
    assert capsys.readouterr().err.count("transparent pixels placed on white") == 1
