"""An error while reading a case is reported as it was raised, with the file first; there are no workers to
hide it.
"""

import threading

import pytest
import small_site as small

from tesla_med.tasks import volumes as volumes_task

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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError("6 GiB"), "not enough memory for this case (6 GiB)"),
        (ZeroDivisionError("by nothing"), "unexpected ZeroDivisionError: by nothing"),
        (OSError(5, "Input/output error"), "Input/output error"),
    ],
)
def test_whatever_breaks_in_the_reading_thread(volumes, small_weights, tmp_path, monkeypatch, error, words):
    original = volumes_task.read_case

    def read(case, site):
        if case.name == "Case01":
            raise error
        return original(case, site)

    monkeypatch.setattr(volumes_task, "read_case", read)
    result = small.run(volumes, small_weights, tmp_path / "out", method="source")
    assert [item.status == "failed" for item in result.results] == [False, True, False]
    reason = result.results[1].reason
    assert reason.startswith(str(volumes / "Case01.nii.gz"))
    assert words in reason
