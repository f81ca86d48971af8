"""An estimate that fails, and Ctrl-C in the middle of an update."""

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


def interrupt_at(monkeypatch, number):
    """Send Ctrl-C in the middle of an update of the run itself."""
    original, calls = TeSLA.adapt, []

    def adapting(self, images):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, images)

    monkeypatch.setattr(TeSLA, "adapt", adapting)


@pytest.mark.parametrize(("protocol", "number"), [("N-O", 4), pytest.param("N-M", 5, marks=pytest.mark.slow)])
def test_an_interrupt_names_resume(place, small_weights, capsys, monkeypatch, protocol, number):
    more = "--protocol", protocol, "--reset", "site"
    assert adapt(small_weights, *more, out="whole") == 0
    with monkeypatch.context() as patch:
        interrupt_at(patch, number)
        assert adapt(small_weights, *more) == INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    assert (place / "out/.state").is_dir()
    assert adapt(small_weights, *more) == 2
    assert adapt(small_weights, *more, "--resume") == 0
    assert small.masks(place / "out") == small.masks(place / "whole")
