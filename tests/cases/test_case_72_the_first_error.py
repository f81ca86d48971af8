"""An error while reading a case is reported as it was raised, with the file first; there are no workers to
hide it.
"""

import gzip
import threading

import numpy as np
import pytest
import small_site as small

CASE = 72
STATUS = (
    "a program that the system kills cannot say so itself: the documentation names memory as the likely cause"
)


@pytest.fixture
def volumes(tmp_path):
    small.make_volumes(tmp_path / "nii", 3)
    return tmp_path / "nii"


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_a_corrupt_file_is_named_first(volumes, small_weights, tmp_path, protocol):
    path = volumes / "Case01.nii.gz"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)
    result = small.run(volumes, small_weights, tmp_path / "out", protocol=protocol)
    assert [item.status == "failed" for item in result.results] == [False, True, False]
    assert result.results[1].reason.startswith(str(path))
    assert "unexpected" not in result.results[1].reason
    assert not [item for item in threading.enumerate() if item.name.startswith("read-ahead")]


def test_a_file_that_promises_more_than_there_is(volumes, small_weights, tmp_path):
    """No memory holds what the header of this one says."""
    path = volumes / "Case01.nii.gz"
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[42:48] = np.array([32000] * 3, np.int16).tobytes()
    path.write_bytes(gzip.compress(bytes(content), 1))
    result = small.run(volumes, small_weights, tmp_path / "out", method="source")
    assert [item.status == "failed" for item in result.results] == [False, True, False]
    reason = result.results[1].reason
    assert reason.startswith(str(path))
    assert "unexpected" not in reason
