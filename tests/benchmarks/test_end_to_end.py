"""The benchmark of whole runs: its passes, its fit, and a run of one way with a tiny network."""

from __future__ import annotations

import threading
import time

import programs
import pytest
import torch

from tesla_med.engine.stages import Watch, stage
from tesla_med.models.unet import UNet, UNetParams

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def program():
    return programs.load("end_to_end")


def test_passes_are_counted_by_kind(program):
    network = UNet.build(UNetParams(width=2), 1, 2).eval()
    frozen = UNet.build(UNetParams(width=2), 1, 2).eval().requires_grad_(False)
    images = torch.rand(2, 1, 16, 16)
    with program.Passes(torch.device("cpu")) as passes:
        for _ in range(3):
            with torch.no_grad():
                network(images)
        network(images).sum().backward()
        frozen(images.clone().requires_grad_(True)).sum().backward()
        with torch.no_grad():
            network(images[:1])
    found = {(kind.shape[0], kind.gradient): count for kind, count in passes.count.items()}
    assert found == {(2, "none"): 3, (2, "weights"): 1, (2, "images"): 1, (1, "none"): 1}
    before = network.state_dict()["inc.double_conv.1.running_mean"].clone()
    seconds, rows = passes.floor(1)
    assert seconds == pytest.approx(sum(row["passes"] * row["ms_per_pass"] / 1e3 for row in rows))
    assert all(row["ms_per_pass"] > 0 for row in rows)
    assert torch.equal(network.state_dict()["inc.double_conv.1.running_mean"], before)
    network(images)
    assert sum(passes.count.values()) == 6, "nothing is counted outside the block"


def test_the_fit_and_the_slopes_by_hand(program):
    seconds = {10: 25.0, 50: 105.0, 100: 205.0}
    assert program.fitted(seconds) == pytest.approx((5.0, 2.0))
    assert program.slopes(seconds) == {"10-50": 2.0, "50-100": 2.0}
    assert program.fitted({4: 8.0}) == (0.0, 2.0)


def test_stages_add_up():
    with stage("outside"), Watch() as watch:
        with stage("outer"):
            time.sleep(0.02)
            with stage("inner"):
                time.sleep(0.03)

        def beside():
            with stage("read"):
                time.sleep(0.01)

        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert set(watch.seconds) == {"outer", "inner"}
    assert 0.02 <= watch.seconds["outer"] < 0.03, "without the inner stage"
    assert watch.seconds["inner"] >= 0.03
    assert watch.beside["read"] >= 0.01
    with stage("late"):
        pass
    assert "late" not in watch.seconds


@pytest.mark.slow
@pytest.mark.parametrize("task", ["volumes", "tiles"])
def test_a_tiny_run(program, tmp_path, task, capsys):
    out = tmp_path / "found.json"
    call = ["--device", "cpu", "--quick", "--task", task, "--out", str(out)]
    content = program.main([*call, "--ways", "default", "--protocols", "N-O"])
    (row,) = content["results"]
    assert row["ratio_to_floor"] == pytest.approx(row["seconds_per_case"] / row["floor_seconds_per_case"])
    assert row["stages_ms_per_case"]["adapt"] > 0
    assert row["beside_ms_per_case"]["read"] > 0
    assert content["plain_seconds_per_case"] > 0
    assert out.is_file()
    assert "| default N-O | " in capsys.readouterr().out
