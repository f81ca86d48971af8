"""The program for real tissue tiles: shifts, halves, tables by hand, and a quick run on made-up tiles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import programs
import pytest
import tile_site
import torch
from PIL import Image

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "histology.py"


@pytest.fixture(scope="module")
def program():
    return programs.load("histology")


def test_shifts_are_what_they_say(program):
    grey = tile_site.make_batch(3)[:, :1].expand(-1, 3, -1, -1)
    found = {
        name: program.shifted(grey, name, 0)
        for name in (*program.SHIFTS, *program.DEVELOPMENT, program.UNSHIFTED)
    }
    assert torch.equal(found["none"], grey)
    assert torch.allclose(found["gamma"], grey**2, atol=1e-6)
    spread = found["contrast"].std(dim=(1, 2, 3)) / grey.std(dim=(1, 2, 3))
    assert torch.allclose(spread, torch.full((3,), 0.5), atol=0.01)
    assert (found["noise"] - grey).std() == pytest.approx(0.08, rel=0.15)  # some is cut off at 0 and 1
    for name in ("blur", "resolution"):  # less of the fine, the mean as it was
        assert found[name].diff(dim=-1).abs().mean() < 0.8 * grey.diff(dim=-1).abs().mean()
        assert torch.allclose(found[name].mean(), grey.mean(), atol=0.01)
    for name, images in found.items():
        assert images.min() >= 0, name
        assert images.max() <= 1, name
        assert torch.equal(images[:, 0], images[:, 2]), name  # still grey
    assert torch.equal(found["noise"], program.shifted(grey, "noise", 0))
    assert not torch.equal(found["noise"], program.shifted(grey, "noise", 1))
    with pytest.raises(ValueError, match="no shift 'hue'"):
        program.shifted(grey, "hue", 0)


def test_halves_hold_every_class_and_no_tile_twice(program):
    labels = torch.arange(4).repeat_interleave(torch.tensor([10, 20, 6, 8]))
    first, second = program.halves(labels, 0)
    assert sorted(first + second) == list(range(44))
    assert torch.bincount(labels[first]).tolist() == [5, 10, 3, 4]
    assert program.halves(labels, 0) == (first, second)
    assert program.halves(labels, 1) != (first, second)


def cell(method, right, *, shift="gamma", protocol="N-O", seed=0):
    return {
        "kind": "cell",
        "experiment": "shifts",
        "shift": shift,
        "method": method,
        "protocol": protocol,
        "seed": seed,
        "error_percent": 100 - 100 * right.count("1") / len(right),
        "ece": 0.1,
        "seconds": 1.0,
        "right": right,
    }


def test_tables_by_hand(program):
    rows = [
        cell("source", "1000"),
        cell("source", "1000", shift="noise"),
        cell("tesla", "1110"),
        cell("tesla", "1111", shift="noise"),
        cell("source", "0000", seed=1),
        cell("tesla", "1100", seed=1),
    ]
    targets = {"shifts 0": [0, 1, 2, 3], "shifts 1": [2, 3, 4, 5]}
    table = program.error_table(rows)
    assert table[0] == "| method | protocol | gamma | noise | mean of shifts | ECE | s |"
    assert table[2].startswith("| source | N-O | 87.5 ± 17.7 | 75.0 | 75.0 | 0.100 |")
    assert table[3].startswith("| tesla | N-O | 37.5 ± 17.7 | 0.0 | 12.5 |")
    found = program.outcomes(rows, targets)
    pair = ("tesla", "N-O"), ("source", "N-O")
    gamma = program.tile_differences(found, *pair, ["gamma"])
    assert gamma.tolist() == [0, 1, 1, 0.5, 0, 0]  # tiles 2 and 3 come under both seeds
    every = program.tile_differences(found, *pair, ["gamma", "noise"])
    assert every.tolist() == pytest.approx([0, 1, 1, 2 / 3, 0, 0])
    text = "\n".join(program.paired_table(rows, targets))
    assert f"| N-O | source | {-100 * gamma.mean():+.1f} (p 0.750) |" in text  # 3 of 3, Holm over 3
    assert "| bn |" not in text


def test_parts_are_put_together(program):
    one = {"targets": {"shifts 0": [0, 1]}, "rows": [cell("source", "10"), cell("tesla", "00")]}
    other = {"targets": {"shifts 1": [1, 2]}, "rows": [cell("tesla", "11"), cell("tesla", "01", seed=1)]}
    whole = program.merged([one, other])
    assert whole["targets"] == {"shifts 0": [0, 1], "shifts 1": [1, 2]}
    assert [(row["method"], row["seed"], row["right"]) for row in whole["rows"]] == [
        ("source", 0, "10"),
        ("tesla", 0, "11"),  # the later of the two
        ("tesla", 1, "01"),
    ]
    text = program.report(whole)
    assert text.startswith("Not the paper's experiment")
    assert "### shifts" in text


def test_calibration_error_by_hand(program):
    probs = np.array([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    labels = np.array([0, 1, 1, 1])
    assert program.ece(probs, labels) == pytest.approx(0.5 * abs(0.9 - 0.5) + 0.5 * abs(0.6 - 1.0))


@pytest.mark.slow
def test_quick_run(tmp_path, program):
    real = ("01_TUMOR", "02_STROMA", "04_LYMPHO", "06_MUCOSA")
    for name in ("kather16_gray", "kather16_color", "kather19_color"):
        tile_site.make_tiles(tmp_path / name, 6, seed=1, size=32)
        for plain, renamed in zip(tile_site.FOLDERS, real, strict=True):
            if name.startswith("kather16"):
                (tmp_path / name / plain).rename(tmp_path / name / renamed)
    for path in (tmp_path / "kather16_gray").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    out = tmp_path / "histology.json"
    command = [sys.executable, str(PROGRAM), "--quick", "--device", "cpu", "--data", str(tmp_path)]
    more = ["--weights", str(tmp_path / "weights"), "--out", str(out), "--methods", "source", "tesla"]
    more += ["--protocols", "N-O", "N-M"]
    done = subprocess.run(  # noqa: S603 - own file
        [*command, *more], capture_output=True, text=True, check=True, env=environment()
    )
    content = json.loads(out.read_text(encoding="utf-8"))
    cells = [row for row in content["rows"] if row["kind"] == "cell"]
    assert {row["experiment"] for row in cells} == set(program.EXPERIMENTS)
    pairs = {(row["method"], row["protocol"]) for row in cells}
    assert pairs == {("source", "N-O"), ("tesla", "N-O"), ("tesla", "N-M")}
    for row in cells:
        assert len(row["right"]) == row["tiles"]
        assert row["error_percent"] == pytest.approx(100 - 100 * row["right"].count("1") / row["tiles"])
        assert row["finite"]
        assert (row["updates"] > 0) == (row["method"] != "source")
        assert len(content["targets"][f"{row['experiment']} {row['seed']}"]) == row["tiles"]
    assert "one standard error is 6 to 9 points" in done.stdout
    again = subprocess.run(  # noqa: S603 - own file
        [sys.executable, str(PROGRAM), "--merge", str(out)],
        capture_output=True, text=True, check=True, env=environment(),
    )  # fmt: skip
    assert again.stdout.strip() == done.stdout[done.stdout.index("Not the paper's") :].strip()


def environment():
    import os

    path = str(PROGRAM.parent.parent)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def test_the_results_page_shows_what_its_file_holds(program):
    docs = PROGRAM.parent.parent / "docs" / "reference"
    content = json.loads((docs / "results" / "kather.json").read_text(encoding="utf-8"))
    page = (docs / "results.md").read_text(encoding="utf-8")
    shown = page.split("<!-- kather -->")[1].split("<!-- /kather -->")[0]
    assert shown.strip() == program.report(program.merged([content])).strip()
