"""A grey tile among colour tiles is given three channels, and that is noted; batching continues."""

from PIL import Image
from tile_files import smooth

from tesla_med.io.tiles import find_tiles
from tesla_med.prepare.tiles import stream

CASE = 92


def test_one_grey_tile(tmp_path):
    for index in range(3):
        image = Image.fromarray(smooth(seed=index))
        (image.convert("L") if index == 1 else image).save(tmp_path / f"{index}.png")
    batch = next(stream(find_tiles(tmp_path, {}), [0, 1, 2], 3, (64, 64)))
    assert tuple(batch.images.shape) == (3, 3, 64, 64)
    assert list(batch.notes) == [1]
    assert "grey" in batch.notes[1][0]
    assert (batch.images[1][0] == batch.images[1][2]).all()
