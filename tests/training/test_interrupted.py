"""Ctrl-C in the middle of a step: the step is finished, the state is saved, and the handler is put back."""

import json
import os
import signal

import pytest
import small_site
from safetensors.torch import load_file

from tesla_med.config.files import load_pipeline
from tesla_med.training.loop import TrainingRun
from tesla_med.training.train import train_source

STEPS = ("train.steps=4", "train.validate_every=3", "train.batch_size=2", "train.augment=mild")


@pytest.fixture
def train(one_thread, tmp_path):
    small_site.make_volumes(tmp_path / "nii", 3, name="source")
    pipeline = load_pipeline("prostate", (*small_site.SMALL, *STEPS))

    def call(out, **options):
        options = {"device": "cpu"} | options
        return train_source(pipeline, [small_site.site()], tmp_path / "nii", tmp_path / out, **options)

    return call


def interrupt(patch, number, sent=signal.SIGINT):
    """Send Ctrl-C, or another signal, in the middle of a step."""
    advance = TrainingRun.advance

    def advancing(self, part):
        loss = advance(self, part)
        if self.step == number:
            os.kill(os.getpid(), sent)
        return loss

    patch.setattr(TrainingRun, "advance", advancing)


@pytest.mark.parametrize(
    ("step", "sent"), [(1, signal.SIGTERM), pytest.param(3, signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_resumed_one_ends_as_if_never_stopped(step, sent, train, tmp_path, monkeypatch):
    train("whole")
    before = signal.getsignal(sent)
    with monkeypatch.context() as patch:
        interrupt(patch, step, sent)
        with pytest.raises(KeyboardInterrupt):
            train("out")
    assert signal.getsignal(sent) is before
    assert not (tmp_path / "out/train.json").exists()
    train("out", resume=True)
    one, two = (load_file(str(tmp_path / name / "source.safetensors")) for name in ("whole", "out"))
    assert all(bool((one[key] == two[key]).all()) for key in one)
    ends = [
        json.loads((tmp_path / name / "train.json").read_text())["best_step"] for name in ("whole", "out")
    ]
    assert ends[0] == ends[1]
