"""The safety benchmark: shift strengths, the arithmetic of gain and harm, table, picture, a whole run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tesla_med.demo.volumes import TASKS, Task, preset

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "safety.py"


@pytest.fixture(scope="module")
def safety() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_safety", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def volume(before: float | None, after: float | None, used: str = "adapted", **place: Any) -> dict[str, Any]:
    fixed = {"task": "prostate", "strength": 0.0, "arm": "ours", "seed": 1, "case": "Case00", "reason": ""}
    return fixed | {"dice_source_percent": before, "dice_percent": after, "used": used} | place


# ------------------------------------------------------------ strengths


@pytest.mark.parametrize("task", TASKS)
def test_strength_goes_from_source_through_hard(safety: ModuleType, task: Task) -> None:
    source, hard = preset(task), preset(task, "hard")
    assert safety.settings_at(task, 0.0) == source
    assert safety.settings_at(task, 1.0) == hard
    half, beyond = safety.settings_at(task, 0.5), safety.settings_at(task, 1.25)
    for name in ("noise", "bias", "blur_mm", "echo_time_ms", "repetition_time_ms", "flare"):
        low, high = getattr(source, name), getattr(hard, name)
        assert getattr(half, name) == pytest.approx((low + high) / 2)
        assert getattr(beyond, name) == pytest.approx(low + 1.25 * (high - low))
    assert beyond.orientation == hard.orientation
    assert beyond.matrix == hard.matrix


def test_impossible_strengths_are_refused(safety: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="0 or more"):
        safety.settings_at("prostate", -0.1)
    with pytest.raises(ValueError, match="repetition_time_ms"):
        safety.settings_at("prostate", 4.0)
    for words in (["--strengths", "4"], ["--seeds", "0"], ["--updates", "0"]):
        with pytest.raises(SystemExit):
            safety.parse(["--task", "prostate", *words])
        assert words[0] in capsys.readouterr().err


def test_updates_are_scaled_alike(safety: ModuleType) -> None:
    options = safety.parse(["--updates", "6"])
    updates = {
        name: safety.updates_of(safety.pipeline_of("prostate", safety.ARMS[name], options))
        for name in ("ours", "no-guard", "released")
    }
    full = safety.parse([])
    whole = {
        name: safety.updates_of(safety.pipeline_of("prostate", safety.ARMS[name], full)) for name in updates
    }
    assert updates["ours"] == updates["no-guard"] == 6
    assert updates["released"] == round(whole["released"] * 6 / whole["ours"])


# ------------------------------------------------------------ gain and harm


def test_gain_is_the_mean_and_harm_the_largest_loss(safety: ModuleType) -> None:
    found = safety.summarise(
        [volume(80.0, 90.0), volume(90.0, 88.5, "partial"), volume(90.0, 89.5), volume(95.0, 95.0, "source")]
    )
    assert found["volumes"] == 4
    assert found["dice_percent"] == pytest.approx(90.75)
    assert found["gain_points"] == pytest.approx(2.0)
    assert found["worst_harm_points"] == pytest.approx(1.5)
    assert found["volumes_losing_over_1_point"] == 1
    assert [found[f"used_{name}"] for name in ("source", "partial", "adapted")] == [1, 1, 2]


def test_no_loss_is_no_harm(safety: ModuleType) -> None:
    found = safety.summarise([volume(80.0, 90.0), volume(90.0, 90.5)])
    assert found["worst_harm_points"] == 0.0
    assert found["volumes_losing_over_1_point"] == 0


def test_a_loss_of_exactly_one_point_is_not_more_than_one(safety: ModuleType) -> None:
    found = safety.summarise([volume(90.0, 89.0), volume(90.0, 88.75)])
    assert found["volumes_losing_over_1_point"] == 1


def test_volumes_without_a_score_are_counted_apart(safety: ModuleType) -> None:
    found = safety.summarise([volume(None, None), volume(80.0, 70.0)])
    assert (found["volumes"], found["unscored"]) == (1, 1)
    assert found["gain_points"] == pytest.approx(-10.0)
    nothing = safety.summarise([volume(None, None)])
    assert nothing["gain_points"] is None
    assert nothing["worst_harm_points"] is None
    assert "n/a" in safety.table(safety.summaries([volume(None, None)]))


def test_table_has_a_line_for_every_strength_and_arm(safety: ModuleType) -> None:
    rows = safety.summaries(
        [
            volume(90.0, 88.0, "adapted", arm="bn"),
            volume(90.0, 90.0, "source"),
            volume(50.0, 75.0, strength=1.0),
            volume(60.0, 75.0, "partial", strength=1.0, seed=2),
        ]
    )
    lines = [line.split() for line in safety.table(rows).splitlines()]
    assert lines[1] == ["prostate", "0.00", "bn", "1", "88.0", "-2.00", "2.00", "1"]
    assert lines[2] == ["prostate", "0.00", "ours", "1", "90.0", "+0.00", "0.00", "0", "1/0/0"]
    assert lines[3] == ["prostate", "1.00", "ours", "2", "75.0", "+20.00", "0.00", "0", "0/1/1"]
    assert len(lines) == 4


def test_harmed_volumes_are_listed_worst_first_with_the_reason(safety: ModuleType) -> None:
    text = safety.harmed(
        [
            volume(90.0, 88.0, "partial", case="Case01", reason="close"),
            volume(90.0, 80.0, case="Case02"),
            volume(90.0, 70.0, arm="bn", case="Case03"),
            volume(90.0, 89.5, case="Case04"),
        ]
    )
    first, second, third = text.splitlines()
    assert first.endswith(": 2")
    assert "Case02" in second
    assert "-10.00" in second
    assert "Case01" in third
    assert "close" in third


def test_picture_holds_every_task(safety: ModuleType, tmp_path: Path) -> None:
    rows = safety.summaries(
        [
            volume(80.0, 81.0, task=task, strength=strength, arm=arm)
            for task in TASKS
            for strength in (0.0, 1.0)
            for arm in safety.ARMS
        ]
    )
    path = tmp_path / "new" / "safety.png"
    safety.draw(rows, path)
    assert path.read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------ the whole


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    out, figure = tmp_path / "safety.json", tmp_path / "safety.png"
    command = [sys.executable, str(PROGRAM), "--quick", "--device", "cpu", "--task", "prostate"]
    done = subprocess.run(  # noqa: S603 - own file
        [*command, "--out", str(out), "--figure", str(figure)], capture_output=True, text=True, check=True
    )
    content = json.loads(out.read_text(encoding="utf-8"))
    assert content["command"].startswith("python benchmarks/safety.py --quick")
    assert content["device"] == "cpu"
    assert "tesla-med" in content["versions"]
    assert [(row["strength"], row["arm"]) for row in content["results"]] == [
        (strength, arm) for strength in (0.0, 1.0) for arm in ("source", "bn", "released", "no-guard", "ours")
    ]
    for row in content["results"]:
        assert row["volumes"] == 1
        assert row["worst_harm_points"] == pytest.approx(max(0.0, -row["gain_points"]))
    sources = [row for row in content["results"] if row["arm"] == "source"]
    assert all(row["gain_points"] == 0 for row in sources)
    assert all(item["signals"] for item in content["volumes"] if item["arm"] == "ours")
    assert figure.stat().st_size > 0
    assert "worst harm" in done.stdout
