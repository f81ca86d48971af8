"""The program that measures streaming: its tiles, its plain inference, one measurement, its table."""

from __future__ import annotations

import argparse

import programs
import pytest

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def program():
    return programs.load("tile_stream")


def options(**changes):
    given = {"device": "cpu", "size": 64, "width": 0.25, "threads": 1, "way": "plain", "count": 6}
    return argparse.Namespace(**(given | changes))


def test_one_measurement_of_each_way(program, tmp_path):
    program.generate(tmp_path / "tiles-6", 6, 40)
    assert len(list((tmp_path / "tiles-6").rglob("*.png"))) == 6
    program.save_network(tmp_path / "network.safetensors", options())
    for way in ("plain", "source"):
        row = program.one_run(options(way=way, work=tmp_path))
        assert (row["way"], row["tiles"]) == (way, 6)
        assert row["tiles_per_second"] == pytest.approx(6 / row["seconds"])
        assert row["memory_mib"] >= 0
        assert row["gpu_memory_mib"] is None
    assert (tmp_path / "source-6" / "predictions.csv").is_file()


def test_the_table_by_hand(program):
    common = {"seconds": 1.0, "gpu_memory_mib": None}
    rows = [
        {"way": way, "tiles": tiles, "tiles_per_second": speed, "memory_mib": memory, **common}
        for way, tiles, speed, memory in (
            ("plain", 10, 50.0, 20.0),
            ("tesla", 10, 10.0, 30.0),
            ("plain", 100, 100.0, 21.0),
            ("tesla", 100, 25.0, 28.5),
        )
    ]
    lines = program.table(rows).splitlines()
    assert [line.split()[4:6] for line in lines[1:5]] == [
        ["100", "%"],
        ["20", "%"],
        ["100", "%"],
        ["25", "%"],
    ]
    assert lines[5:] == ["plain: +1.0 MiB for 90 more tiles", "tesla: -1.5 MiB for 90 more tiles"]
