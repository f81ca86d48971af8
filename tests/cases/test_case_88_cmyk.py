"""The mode of a picture is read, not its number of channels: CMYK is converted, not mistaken for RGBA."""

import numpy as np
from PIL import Image
from tile_files import classify, probabilities, smooth, tiles

CASE = 88


def test_four_channels_that_are_inks(tmp_path, tile_weights, monkeypatch, capsys):
    folder = tiles(tmp_path)
    inks = Image.fromarray(smooth()).convert("CMYK")
    inks.save(folder / "inks.tif")
    Image.fromarray(smooth()).save(folder / "plain.png")
    Image.fromarray(np.asarray(inks), "RGBA").save(folder / "mistaken.png")
    code, rows = classify(tmp_path, tile_weights, monkeypatch, "--set", "preprocessing.least_tissue=0")
    assert code == 0
    found = {name.partition(".")[0]: probabilities(row) for name, row in rows.items()}
    assert np.allclose(found["inks"], found["plain"], atol=0.05)
    assert not np.allclose(found["inks"], found["mistaken"], atol=0.05)
    assert "CMYK" in capsys.readouterr().err
