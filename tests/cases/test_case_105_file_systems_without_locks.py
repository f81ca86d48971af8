"""Where the file system has no locks, a file takes their place: runs go on, which is said once, and a second
one is still refused.
"""

import errno
import logging

import pytest
import small_site as small
from lines import adapt, run, sets, work_there

import tesla_med

CASE = 105
fcntl = pytest.importorskip("fcntl")
LOCK_FILE = "out/.tesla-med.lock-file"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def without_locks(monkeypatch, request):
    """Refuse every lock with an error of the system; by default with the usual one."""
    number = getattr(request, "param", errno.ENOLCK)

    def flock(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", flock)
    yield number
    logging.getLogger("tesla_med").handlers.clear()


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 1)


@pytest.mark.parametrize(
    "without_locks",
    [
        errno.ENOLCK,
        *(pytest.param(code, marks=pytest.mark.slow) for code in (524, errno.EOPNOTSUPP, errno.ENOSYS)),
    ],
    indirect=True,
)
def test_commands_go_on_and_say_so_once(without_locks, place, known_weights, capsys):
    weights = known_weights()
    assert adapt(weights, "--method", "source") == 0
    said = capsys.readouterr().err.count("no locks")
    assert said == (0 if without_locks == errno.ENOSYS else 1)  # the library sees to this one by itself
    assert run(["rollback", "out", "--to-case", "source"]) == 0
    assert not (place / LOCK_FILE).exists()
    assert adapt(weights, "--method", "source", "--overwrite") == 0


def test_a_second_run_is_refused(without_locks, place, known_weights, capsys):
    """Another one starts while the first is at work."""
    weights, codes = known_weights(), []

    def another(stage, done, total):
        if not codes:
            codes.append(adapt(weights, "--method", "source", "--overwrite"))

    given = {"weights": weights, "out": "out", "method": "source", "device": "cpu", "progress": another}
    result = tesla_med.adapt_site("X", "nii", overrides=(*small.SMALL, *small.BARE), **given)
    assert codes == [2]
    assert "another run" in capsys.readouterr().err
    assert result.complete
    assert adapt(weights, "--method", "source", "--overwrite") == 0


def test_what_a_killed_run_left_is_named(without_locks, place, known_weights, capsys):
    weights, left = known_weights(), []

    def keep(stage, done, total):
        left.append((place / LOCK_FILE).read_bytes())

    given = {"weights": weights, "out": "out", "method": "source", "device": "cpu", "progress": keep}
    tesla_med.adapt_site("X", "nii", overrides=(*small.SMALL, *small.BARE), **given)
    (place / LOCK_FILE).write_bytes(left[0])
    assert adapt(weights, "--method", "source", "--overwrite") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "remove " in said
    assert "lock-file" in said


def test_a_run_may_go_without(place, known_weights, capsys):
    weights = known_weights()
    (place / "out").mkdir()
    with (place / "out/.tesla-med.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert adapt(weights, "--method", "source") == 2
        assert "another run" in capsys.readouterr().err
        assert adapt(weights, "--method", "source", "--no-lock") == 0


def test_training_goes_on(without_locks, place):
    texts = (*small.SMALL, "train.steps=1", "train.validate_every=1", "train.batch_size=2")
    words = ["train", "--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--out", "out"]
    assert run([*words, "--device", "cpu", *sets(*texts)]) == 0
    assert (place / "out/source.safetensors").is_file()


def test_other_errors_are_not_taken_for_it(monkeypatch, place, known_weights, capsys):
    def flock(*_):
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(fcntl, "flock", flock)
    assert adapt(known_weights(), "--method", "source") == 2
    assert "cannot be locked" in capsys.readouterr().err
