"""A grey tile among colour tiles is given three channels, and that is noted; batching continues."""

import numpy as np
from PIL import Image
from tile_files import classify, probabilities, smooth, tiles

CASE = 92


def test_one_grey_tile(tmp_path, tile_weights, monkeypatch, capsys):
    folder = tiles(tmp_path)
    for index in range(3):
        image = Image.fromarray(smooth(seed=index))
        (image.convert("L") if index == 1 else image).save(folder / f"{index}.png")
    Image.open(folder / "1.png").convert("RGB").save(folder / "copy.png")
    code, rows = classify(tmp_path, tile_weights, monkeypatch)
    assert code == 0
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert np.array_equal(probabilities(rows["1.png"]), probabilities(rows["copy.png"]))
    assert capsys.readouterr().err.count("grey, repeated in three channels") == 1
