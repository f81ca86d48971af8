"""The benchmark of a full-size nnU-Net, with a tiny one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "nnunet_speed.py"


@pytest.mark.slow
def test_the_passes_are_counted(tmp_path):
    out = tmp_path / "speed.json"
    call = [sys.executable, str(PROGRAM), "--device", "cpu", "--quick", "--repeats", "1", "--out", str(out)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)  # noqa: S603
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(out.read_text(encoding="utf-8"))["rows"][0]
    # source, centres, adapted; of three candidates two zooms each, and one more prediction: ten of 2 x 2 x 2
    # or, reduced and enlarged, as many tiles, each mirrored eight times
    assert row["updates"] == 24
    assert row["tiles"] % 8 == 0
    assert row["tiles"] >= 10 * 8
    floor = row["floor_learning"] + row["floor_predicting"]
    assert row["ratio"] == pytest.approx(row["seconds"] / floor)
    assert "| float32 |" in done.stdout
