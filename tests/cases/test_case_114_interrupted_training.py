"""An interrupted training leaves its state: --resume ends as if never stopped; its own files are known."""

import json
import signal
from pathlib import Path

import pytest
import small_site as small
from lines import run, sets, work_there
from moments import ctrl_c
from safetensors.torch import load_file

import tesla_med

CASE = 114
INTERRUPTED = 130
STEPS = (
    *("train.steps=5", "train.validate_every=3", "train.batch_size=2", "train.augment=mild"),
    "train.validation_fraction=0.34",
)
SETTINGS = (*small.SMALL, *STEPS)


@pytest.fixture
def place(one_thread, tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 6)


def train(*words, out="out"):
    given = ["--pipeline", "prostate", "--sites", "X", "--volumes", "nii", "--out", out, "--device", "cpu"]
    return run(["train", *given, *sets(*SETTINGS), *words])


def interrupted_at(number):
    """Train by the function and send Ctrl-C as it tells of a step."""

    def tell(stage, done, total):
        if stage == "train" and done == number:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tesla_med.train_source(
            tesla_med.load_pipeline("prostate", SETTINGS),
            [tesla_med.load_site("prostate/X")],
            Path("nii"),
            Path("out"),
            device="cpu",
            progress=tell,
        )


def same_weights(place):
    one, two = (load_file(str(place / name / "source.safetensors")) for name in ("whole", "out"))
    return all(bool((one[key] == two[key]).all()) for key in one)


def best_steps(place):
    return {json.loads((place / name / "train.json").read_text())["best_step"] for name in ("whole", "out")}


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_one_ends_as_if_never_stopped(step, place, capsys):
    interrupted_at(step)
    assert not (place / "out/train.json").exists()
    assert train() == 2
    assert "--resume" in capsys.readouterr().err
    assert train("--resume") == 0
    assert train(out="whole") == 0
    assert same_weights(place)
    assert len(best_steps(place)) == 1


def test_the_command_names_resume(place, capsys):
    with ctrl_c("/source.safetensors"):  # of the first validation
        assert train() == INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    assert not (place / "out/train.json").exists()
    assert train("--resume") == 0
    assert (place / "out/train.json").exists()


def test_it_can_be_replaced_and_the_handler_is_put_back(place):
    before = signal.getsignal(signal.SIGINT)
    interrupted_at(1)
    assert signal.getsignal(signal.SIGINT) is before
    assert train("--overwrite") == 0
    assert json.loads((place / "out/train.json").read_text())["steps"] == 5
