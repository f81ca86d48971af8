"""The program that times the way back to the scan's grid: both ways give one result."""

from __future__ import annotations

import programs
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


def test_both_ways_agree(capsys):
    program = programs.load("nnunet_restore")
    assert program.main(["--shape", "24", "20", "10", "--classes", "3"]) == 0
    said = capsys.readouterr().out
    assert "| whole |" in said
    assert "| by parts |" in said
    assert "differs: 0.00000 %" in said


def test_memory_is_that_above_the_start():
    np = pytest.importorskip("numpy")
    program = programs.load("nnunet_restore")

    def work():
        program.time.sleep(0.1)
        return np.ones(2**21)

    def held():
        kept = np.ones(2**24)
        program.time.sleep(0.1)
        return kept[: 2**21].copy()

    assert program.watched(work)[1] >= 0.1
    # what earlier tests left may be given back, or more be taken, meanwhile
    small = min(program.watched(work)[2] for _ in range(3))
    large = max(program.watched(held)[2] for _ in range(3))
    assert small < 4 < large
