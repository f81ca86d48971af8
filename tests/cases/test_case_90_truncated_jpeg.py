"""A truncated picture is left out by name and counted; it is never treated as complete."""

import pytest
from PIL import Image
from tile_files import smooth

from tesla_med.errors import DataError
from tesla_med.io.tiles import find_tiles, read_tile
from tesla_med.prepare.tiles import stream

CASE = 90


def test_two_thirds_of_a_jpeg(tmp_path):
    for index in range(3):
        Image.fromarray(smooth(96, index)).save(tmp_path / f"{index}.jpg")
    data = (tmp_path / "1.jpg").read_bytes()
    (tmp_path / "1.jpg").write_bytes(data[: 2 * len(data) // 3])
    with pytest.raises(DataError, match=r"1\.jpg: truncated"):
        read_tile(tmp_path / "1.jpg")
    batch = next(stream(find_tiles(tmp_path, {}), [0, 1, 2], 3, (64, 64)))
    assert batch.index.tolist() == [0, 2]
    assert list(batch.failed) == [1]
