from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from tesla_med.augment.families import FAMILIES

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "training_speed.py"


def test_every_family_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("training_speed", PATH)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = [
        "--device",
        "cpu",
        "--width",
        "4",
        "--size",
        "32",
        "--batch",
        "4",
        "--steps",
        "1",
        "--rounds",
        "1",
    ]
    assert module.main(small) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert [row.split()[1] for row in rows[1:]] == list(FAMILIES)
    assert all(float(row.split()[3]) > 0 for row in rows[1:])
