"""Where the file system has no locks, a file takes their place: runs go on, which is said once, and a second
one is still refused.
"""

import errno
import logging
import shutil

import pytest
import small_site as small
from lines import run

from tesla_med.config.files import load_pipeline
from tesla_med.errors import OutputError
from tesla_med.io.locks import output_lock
from tesla_med.training.train import train_source

CASE = 105
fcntl = pytest.importorskip("fcntl")


@pytest.fixture(params=[errno.ENOLCK, 524, errno.EOPNOTSUPP, errno.ENOSYS])
def without_locks(monkeypatch, request):
    def flock(*_):
        raise OSError(request.param, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    yield request.param
    logging.getLogger("tesla_med").handlers.clear()


def test_commands_go_on_and_say_so_once(without_locks, tmp_path, small_weights, capsys):
    small.make_volumes(tmp_path / "nii", 1)
    out = str(tmp_path / "out")
    words = ["--pipeline", "prostate", "--volumes", str(tmp_path / "nii"), "--weights", str(small_weights)]
    words += ["--device", "cpu", "--out", out, "--set", "reports=[table]"]
    assert run(["predict", *words]) == 0
    said = capsys.readouterr().err.count("no locks")
    assert said == (0 if without_locks == errno.ENOSYS else 1)  # the library sees to this one by itself
    assert run(["rollback", out, "--to-case", "source"]) == 0
    assert not (tmp_path / "out/.tesla-med.lock-file").exists()
    assert run(["predict", *words, "--overwrite"]) == 0


def test_a_second_run_is_refused(without_locks, tmp_path):
    with output_lock(tmp_path), pytest.raises(OutputError, match="another run"), output_lock(tmp_path):
        pass
    with output_lock(tmp_path):
        pass


def test_what_a_killed_run_left_is_named(without_locks, tmp_path):
    if without_locks == errno.ENOSYS:
        pytest.skip("the library sees to this one by itself")
    with output_lock(tmp_path):
        left = next(tmp_path.glob(".tesla-med.lock-*"))
        shutil.copy(left, tmp_path / "copy")
    shutil.move(tmp_path / "copy", left)
    with pytest.raises(OutputError, match=r"remove .*lock-file"), output_lock(tmp_path):
        pass


def test_a_run_may_go_without(tmp_path, small_weights):
    small.make_volumes(tmp_path / "nii", 1)
    words = [
        "--site",
        "prostate/F",
        "--set",
        "site.files.image=['Case*']",
        "--volumes",
        str(tmp_path / "nii"),
    ]
    words += ["--weights", str(small_weights), "--method", "source", "--device", "cpu"]
    words += ["--out", str(tmp_path / "out"), "--set", "reports=[table]"]
    with output_lock(tmp_path / "out"):
        assert run(["adapt", *words]) == 2
        assert run(["adapt", *words, "--no-lock"]) == 0


def test_training_goes_on(without_locks, tmp_path, one_thread):
    small.make_volumes(tmp_path / "nii", 1)
    texts = (*small.SMALL, "train.steps=1", "train.validate_every=1", "train.batch_size=2")
    pipeline = load_pipeline("prostate", texts)
    assert train_source(pipeline, [small.site()], tmp_path / "nii", tmp_path / "out").weights.is_file()


def test_other_errors_are_not_taken_for_it(monkeypatch, tmp_path):
    def flock(*_):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OutputError, match="cannot be locked"), output_lock(tmp_path):
        pass
