"""One run holds an output folder, with the locks of the file system or with a file in their place."""

import errno
import logging
import shutil

import pytest

from tesla_med.errors import OutputError
from tesla_med.io.locks import output_lock

fcntl = pytest.importorskip("fcntl")


@pytest.fixture(params=[None, errno.ENOLCK, 524, errno.EOPNOTSUPP, errno.ENOSYS])
def error(monkeypatch, request):
    """Have the file system refuse locks with an error; None: it has them."""

    def flock(*_):
        raise OSError(request.param, "no locks")

    if request.param is not None:
        monkeypatch.setattr(fcntl, "flock", flock)
    yield request.param
    logging.getLogger("tesla_med").handlers.clear()


def test_a_second_one_is_refused(error, tmp_path):
    with output_lock(tmp_path), pytest.raises(OutputError, match="another run"), output_lock(tmp_path):
        pass
    with output_lock(tmp_path):
        pass


def test_what_a_killed_run_left_is_named(error, tmp_path):
    if error in (None, errno.ENOSYS):
        pytest.skip("no file is left")
    with output_lock(tmp_path):
        left = next(tmp_path.glob(".tesla-med.lock-*"))
        shutil.copy(left, tmp_path / "copy")
    shutil.move(tmp_path / "copy", left)
    with pytest.raises(OutputError, match=r"remove .*lock-file"), output_lock(tmp_path):
        pass


def test_another_error_is_none_of_them(monkeypatch, tmp_path):
    def flock(*_):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OutputError, match="cannot be locked"), output_lock(tmp_path):
        pass
