"""An interrupted training leaves its state: --resume ends as if never stopped; its own files are known."""

import json
import os
import signal

import pytest
import small_site as small
from lines import run, sets, write_site
from safetensors.torch import load_file

from tesla_med.training.loop import TrainingRun

CASE = 114
INTERRUPTED = 130
STEPS = ("train.steps=4", "train.validate_every=3", "train.batch_size=2", "train.augment=mild")


@pytest.fixture
def words(one_thread, tmp_path):
    small.make_volumes(tmp_path / "nii", 3, name="source")
    site = write_site(tmp_path)
    settings = sets(*(*small.SMALL, *STEPS))
    given = ["--pipeline", "prostate", "--sites", str(site), "--volumes", str(tmp_path / "nii")]
    return lambda out: ["train", *given, "--out", str(tmp_path / out), "--device", "cpu", *settings]


@pytest.fixture
def interrupt(monkeypatch):
    """Send Ctrl-C in the middle of a step."""

    def during(number):
        advance = TrainingRun.advance

        def advancing(self, part):
            loss = advance(self, part)
            if self.step == number:
                os.kill(os.getpid(), signal.SIGINT)
            return loss

        monkeypatch.setattr(TrainingRun, "advance", advancing)

    return during


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_one_ends_as_if_never_stopped(step, words, interrupt, tmp_path, capsys, monkeypatch):
    assert run(words("whole")) == 0
    with monkeypatch.context():
        interrupt(step)
        assert run(words("out")) == INTERRUPTED
    monkeypatch.undo()
    assert "--resume" in capsys.readouterr().err
    assert not (tmp_path / "out/train.json").exists()
    assert run(words("out")) == 2
    assert "--resume" in capsys.readouterr().err
    assert run([*words("out"), "--resume"]) == 0
    one, two = (load_file(str(tmp_path / name / "source.safetensors")) for name in ("whole", "out"))
    assert all(bool((one[key] == two[key]).all()) for key in one)
    ends = [
        json.loads((tmp_path / name / "train.json").read_text())["best_step"] for name in ("whole", "out")
    ]
    assert ends[0] == ends[1]


def test_it_can_be_replaced(words, interrupt, tmp_path, monkeypatch):
    interrupt(1)
    assert run(words("out")) == INTERRUPTED
    monkeypatch.undo()
    assert run([*words("out"), "--overwrite"]) == 0
    assert json.loads((tmp_path / "out/train.json").read_text())["steps"] == 4


def test_the_handler_is_put_back(words, interrupt):
    before = signal.getsignal(signal.SIGINT)
    interrupt(1)
    assert run(words("out")) == INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before
