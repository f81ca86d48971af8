"""16-bit pictures are scaled by their bit depth, keeping all levels."""

import numpy as np
from PIL import Image
from tile_files import classify, probabilities, tiles

CASE = 86


def test_a_ramp_and_its_8_bit_copy(tmp_path, tile_weights, monkeypatch):
    folder = tiles(tmp_path)
    ramp = np.repeat(np.linspace(0, 65535, 64).astype(np.uint16)[None], 64, 0)
    Image.fromarray(ramp).save(folder / "deep.tif")
    Image.fromarray((ramp / 257).round().astype(np.uint8)).save(folder / "flat.png")
    clipped = np.minimum(ramp, 255).astype(np.uint8)  # what a plain conversion makes of it: white
    Image.fromarray(clipped).save(folder / "white.png")
    code, rows = classify(tmp_path, tile_weights, monkeypatch, "--set", "preprocessing.least_tissue=0")
    assert code == 0
    found = {name.partition(".")[0]: probabilities(row) for name, row in rows.items()}
    away = {name: np.abs(found["deep"] - found[name]).max() for name in ("flat", "white")}
    assert away["white"] > 0.05
    assert away["flat"] < 0.2 * away["white"]
    assert rows["deep.tif"]["prediction"] == rows["flat.png"]["prediction"]
