"""The comparison on tiles with one budget and one rule of choice: budgets, the choice, a whole small run."""

from __future__ import annotations

import json

import numpy as np
import programs
import pytest
import tile_site
from PIL import Image

from tesla_med.config.files import load_pipeline
from tesla_med.tta.base import METHODS, check_params


@pytest.fixture(scope="module")
def program():
    return programs.load("equal_budget_tiles")


def learning(program):
    return [row for row in program.ROWS if row not in program.FIXED]


def test_every_method_for_tiles_is_a_row(program):
    import histology

    pipeline = load_pipeline("kather", ("preprocessing.size=[64,64]",))
    served = {name for name in METHODS.names() if "+" not in name and histology.serves_tiles(name, pipeline)}
    assert set(program.ROWS) == served - {"vesta"}  # whose runs need cases that begin anew


def test_all_that_learn_see_as_many_tiles_and_predict_alike(program):
    pipeline = load_pipeline("kather")
    for block, statistics in program.STATISTICS.items():
        for row in learning(program):
            for protocol in program.protocols_of(row):
                cell = program.Cell(block, row, protocol, 0, "gamma", 0)
                own = {**pipeline.method_params(row, protocol), **program.params_of(cell, pipeline)}
                params = check_params(row, own)
                seen = (params.batch_slices, params.epochs, params.draw, params.updates_per_case)
                assert seen == ((32, 1) if protocol[-1] == "O" else (128, 5)) + ("ordered", None), row
                assert params.predict_statistics == statistics, row
                assert getattr(params, "predict_views", 1) == 1
                assert not getattr(params, "statistics_warm_up", False)


def test_statistics_alone_learn_nothing_and_are_the_same_as_the_others(program):
    cell = program.Cell("running", "bn", "N-O", 0, "gamma", 0)
    name, params = program.method_of(cell)
    assert (name, params["predict_statistics"], params["learning_rate"]) == ("tent", "running", program.STILL)
    assert program.method_of(program.Cell("batch", "bn", "N-M", 0, "gamma", 0)) == (
        "bn",
        program.BUDGETS["M"],
    )


def lines_of(program, accuracy, row="tent"):
    """Lines of a grid; accuracy by (setting, shift, fold)."""
    found = {}
    for setting in range(6):
        for shift in ("gamma", "noise", "blur"):
            cell = program.Cell("batch", row, "N-O", setting, shift, program.FIRST)
            found[cell.key] = {**vars(cell), "accuracy": [accuracy(setting, shift, fold) for fold in (0, 1)]}
    return found


def test_a_setting_is_chosen_by_other_tiles_under_other_shifts(program):
    best = {
        ("gamma", 0): 0,
        ("gamma", 1): 1,
        ("noise", 0): 2,
        ("noise", 1): 3,
        ("blur", 0): 2,
        ("blur", 1): 3,
    }
    lines = lines_of(program, lambda setting, shift, fold: 0.9 if best[shift, fold] == setting else 0.1)
    about, shifts = ("batch", "tent", "N-O"), ["gamma", "noise", "blur"]
    assert program.chosen(lines, about, "gamma", 0, shifts) == 3  # fold 1 under noise and blur
    assert program.chosen(lines, about, "gamma", 1, shifts) == 2
    assert program.chosen(lines, about, "noise", 0, ["gamma", "noise"]) == 1
    del lines[program.Cell(*about, 5, "blur", program.FIRST).key]
    assert program.chosen(lines, about, "gamma", 0, shifts) is None
    assert program.chosen(lines, about, "blur", 0, shifts) is not None  # its own line is not asked


def test_a_tile_is_in_the_same_fold_under_every_seed(program):
    assert program.folds_of([4, 7, 10, 11]).tolist() == [0, 1, 0, 1]


def test_what_is_reported_of_a_fold_is_the_run_that_the_other_chose(program):
    options = program.parse(["--out", "x", "--rows", "tent", "--shifts", "gamma", "noise"])
    best = {0: 4, 1: 2}  # setting by the fold that it is right on
    lines = lines_of(program, lambda setting, _, fold: float(best[fold] == setting))
    targets = {f"shifts {seed}": [0, 1, 2, 5] for seed in range(program.SEEDS)}
    bits = {2: [1, 0, 0, 0], 4: [0, 0, 0, 1]}  # setting 2 was chosen by fold 1, for fold 0
    for setting, right in bits.items():
        for seed in range(program.SEEDS):
            for shift in options.shifts:
                cell = program.Cell("batch", "tent", "N-O", setting, shift, seed)
                about = {"tiles": 4, "right": np.packbits(right).tobytes().hex(), "seconds": 1.0}
                about |= {"ece": [0.1 * setting, 0.2 * setting]}
                lines[cell.key] = {**lines.get(cell.key, vars(cell)), **about}
    rows = [row for row in program.reported(lines, targets, options, "batch") if row["protocol"] == "N-O"]
    assert {row["seed"] for row in rows} == {0, 1, 2}
    for row in rows:
        assert row["right"] == "1001"  # places 0 and 2 from setting 2, places 1 and 5 from setting 4
        assert row["error_percent"] == pytest.approx(50)
        assert row["ece"] == pytest.approx((0.2 + 0.8) / 2)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_whole_run_is_taken_up_and_printed(program, tmp_path, capsys):
    real = ("01_TUMOR", "02_STROMA", "04_LYMPHO", "06_MUCOSA")
    tile_site.make_tiles(tmp_path / "kather16_gray", 6, seed=1, size=32)
    for plain, renamed in zip(tile_site.FOLDERS, real, strict=True):
        (tmp_path / "kather16_gray" / plain).rename(tmp_path / "kather16_gray" / renamed)
    for path in (tmp_path / "kather16_gray").rglob("*.png"):
        Image.open(path).convert("L").save(path)
    out = tmp_path / "out"
    call = ["--quick", "--device", "cpu", "--data", str(tmp_path), "--weights", str(tmp_path / "weights")]
    call += ["--out", str(out)]
    assert program.main(call) == 0
    first = capsys.readouterr().out
    assert "grid: 30 of 30 cells to do" in first  # source, bn twice, tent twice with six settings
    lines = program.every_line(out)
    assert all(len(line["accuracy"]) == 2 and line["finite"] for line in lines.values())
    assert {line["seed"] for line in lines.values()} == {0, 1, 2}
    with (out / "cells.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"block": "runn')  # a kill in the middle of a line
    assert program.main(call) == 0
    again = capsys.readouterr().out
    assert "grid: 0 of" in again
    assert "final: 0 of" in again
    assert program.main(["--table", "--out", str(out), "--quick"]) == 0
    table = capsys.readouterr().out
    assert table.strip() == again[again.index("### Statistics: running") :].strip()
    for row in ("source", "bn", "tent"):
        assert f"| {row} | N-O |" in table
    targets = json.loads((out / "targets.json").read_text(encoding="utf-8"))["targets"]
    assert targets.keys() == {f"shifts {seed}" for seed in range(3)}
    with pytest.raises(SystemExit, match="cells of other tiles or networks"):
        program.main([*call, "--set", "model.params.width=0.5"])


def test_a_line_that_was_cut_off_does_not_spoil_the_next(program, tmp_path):
    cell = program.Cell("batch", "tent", "N-O", 0, "gamma", 0)
    (tmp_path / "cells.jsonl").write_text('{"block": "runn', encoding="utf-8")
    for seed in (0, 1):
        program.append_line(tmp_path / "cells.jsonl", {**vars(cell), "seed": seed})
    assert {line["seed"] for line in program.every_line(tmp_path).values()} == {0, 1}
