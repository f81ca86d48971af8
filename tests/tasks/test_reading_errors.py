"""Whatever breaks while a case is read is the reason of that case alone, with the file first."""

import pytest
import small_site as small

from tesla_med.tasks import volumes as volumes_task


@pytest.fixture
def volumes(tmp_path):
    small.make_volumes(tmp_path / "nii", 3)
    return tmp_path / "nii"


@pytest.fixture(scope="module")
def small_weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


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
