"""An estimate that fails, Ctrl-C in the middle of an update, and the last line of what is told of."""

import io
import os
import signal

import pytest
import small_site as small
from lines import adapt, work_there

from tesla_med.actions import forecast
from tesla_med.tta.tesla import TeSLA

INTERRUPTED = 130
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def place(tmp_path, monkeypatch):
    return work_there(tmp_path, monkeypatch, 2)


@pytest.fixture(scope="module")
def small_weights(one_thread, tmp_path_factory):
    return small.weights_with_statistics(tmp_path_factory.mktemp("small"))


def test_no_estimate_ends_a_run(place, small_weights, capsys, monkeypatch):
    def broken(*_, **__):
        raise MemoryError("no room to measure")

    monkeypatch.setattr(forecast, "forecast", broken)
    assert adapt(small_weights) == 0
    assert "Estimate" not in capsys.readouterr().err


def interrupt_at(monkeypatch, number, sent=signal.SIGINT):
    """Send Ctrl-C, or another signal, in the middle of an update of the run itself."""
    original, calls = TeSLA.adapt, []

    def adapting(self, images):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), sent)
        return original(self, images)

    monkeypatch.setattr(TeSLA, "adapt", adapting)


@pytest.mark.parametrize(
    ("protocol", "number", "sent"),
    [("N-O", 4, signal.SIGTERM), pytest.param("N-M", 5, signal.SIGINT, marks=pytest.mark.slow)],
)
def test_an_interrupt_names_resume(place, small_weights, capsys, monkeypatch, protocol, number, sent):
    more = "--protocol", protocol, "--reset", "site"
    assert adapt(small_weights, *more, out="whole") == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, number, sent)
        assert adapt(small_weights, *more) == INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    assert (place / "out/.state").is_dir()
    assert adapt(small_weights, *more) == 2
    assert adapt(small_weights, *more, "--resume") == 0
    assert small.masks(place / "out") == small.masks(place / "whole")


def test_what_was_told_of_is_told_of_to_its_end(monkeypatch):
    from tesla_med.cli import console

    clock, stream = iter((0.0, 11.0, 12.0, 13.0, 13.0, 13.5)), io.StringIO()
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    lines = console._Lines(stream)
    for stage, done in (("easy: cases", 0), ("easy: cases", 1), ("easy: cases", 2), ("easy: cases", 3)):
        lines(stage, done, 3)
    for done in (0, 3):
        lines("images", done, 3)  # over at once: no line
    said = stream.getvalue().splitlines()
    assert [line.split(":")[1].split()[-1] for line in said] == ["1/3", "3/3"]
    assert said[-1].endswith("in all")
