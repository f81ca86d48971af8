"""An interrupt that Python drops, because it came while an object was destroyed, is not lost."""

import signal

import pytest

from tesla_med.cli import app as cli


class Destroyed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_dropped_interrupt_ends_the_command_as_one(capsys, monkeypatch):
    def command(*_, **__):
        Destroyed()
        return 0

    monkeypatch.setattr(cli, "app", command)
    assert cli.run(["adapt"]) == cli.INTERRUPTED
    assert "--resume" in capsys.readouterr().err
    assert cli.run(["watch"]) == 0


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    cli.run(["--version"])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
