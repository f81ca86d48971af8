"""The benchmark of several processes: a tiny run of one and of two."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def test_one_against_two(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_many_gpus", FOLDER / "many_gpus.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    few = ["protocols.N-O.tesla.updates_per_case=2", "protocols.N-O.tesla.batch_slices=2"]
    content = module.main(["--device", "cpu", "--quick", "--set", *few])
    one, two = content["results"]
    assert (one["ratio"], one["least_dice_to_first"]) == (1.0, 1.0)
    assert two["least_dice_to_first"] == 1.0, "on the CPU with as many threads nothing differs"
    assert two["ratio"] == pytest.approx(one["steady_seconds"] / two["steady_seconds"])
    assert "| 2 | " in capsys.readouterr().out
