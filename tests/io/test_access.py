"""What a run may touch, and what happens where it may not: inputs stay as they are, the rest goes on."""

from pathlib import Path

import pytest
import small_site as small

from tesla_med.errors import DataError
from tesla_med.io.cases import find_cases

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


def state_of(folder):
    """Return content and time of change of every file and folder below."""
    return {
        path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in [folder, *folder.rglob("*")]
    }


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_nothing_is_written_where_the_inputs_are(weights, tmp_path, protocol):
    small.make_volumes(tmp_path / "nii", 2)
    before = state_of(tmp_path / "nii"), state_of(weights.parent)
    reports = ("reports=[table,html,calibration,quality,tensorboard]",)
    small.run(tmp_path / "nii", weights, tmp_path / "out", protocol=protocol, reports=reports)
    assert (state_of(tmp_path / "nii"), state_of(weights.parent)) == before


def denied(monkeypatch, name, method):
    """Refuse one method of paths with this name, as the system does where rights are missing."""
    real = getattr(Path, method)

    def refuse(self, *arguments, **options):
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, method, refuse)


def test_a_folder_that_cannot_be_listed_is_named_and_left_out(tmp_path, monkeypatch):
    small.make_volumes(tmp_path / "a", 1)
    small.make_volumes(tmp_path / "locked", 1)
    denied(monkeypatch, "locked", "iterdir")
    found = find_cases(tmp_path, small.site())
    assert [case.name for case in found.cases] == ["a/Case00"]
    assert any(path.name == "locked" and "Permission denied" in reason for path, reason in found.skipped)
    with pytest.raises(DataError, match="cannot be listed: Permission denied"):
        find_cases(tmp_path / "locked", small.site())


def test_a_file_that_cannot_be_opened_fails_its_case_alone(weights, tmp_path, monkeypatch):
    small.make_volumes(tmp_path / "nii", 3)
    denied(monkeypatch, "Case01.nii.gz", "open")
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", method="source")
    assert [item.status == "failed" for item in result.results] == [False, True, False]
    assert "Case01.nii.gz" in result.results[1].reason
    assert "Permission denied" in result.results[1].reason


@pytest.mark.parametrize(
    "error", [MemoryError("no room"), RuntimeError("the reader died"), OSError(5, "I/O error")]
)
def test_what_dies_while_reading_ahead_takes_one_case_with_it(weights, tmp_path, monkeypatch, error):
    from tesla_med.tasks import volumes as volumes_task

    small.make_volumes(tmp_path / "nii", 3)
    real = volumes_task.read_case

    def read(case, site):
        if case.name == "Case01":
            raise error
        return real(case, site)

    monkeypatch.setattr(volumes_task, "read_case", read)
    result = small.run(tmp_path / "nii", weights, tmp_path / "out")
    assert [item.status == "failed" for item in result.results] == [False, True, False]
    assert "Case01.nii.gz" in result.results[1].reason
