"""The comparison with one budget and one rule of choice: grids, budgets, the choice, a whole small run."""

from __future__ import annotations

import programs
import pytest
import small_site
import yaml

from tesla_med.config.files import load_pipeline
from tesla_med.demo.recipes import RECIPES
from tesla_med.tta.base import METHODS, check_params

LEARN = ("tent", "pl", "shot", "cotta", "adacontrast", "ttt_pp", "ttac", "tesla", "tesla_s", "vesta")


@pytest.fixture(scope="module")
def program():
    return programs.load("equal_budget")


def test_every_method_is_a_row_and_every_rate_has_a_grid_of_six(program):
    assert set(program.ROWS) == {name for name in METHODS.names() if "+" not in name}
    for row in program.ROWS:
        found = program.grid(row, 0.1)
        assert len(found) == (1 if row in program.FIXED else 6), row
        assert len({str(item) for item in found}) == len(found)


@pytest.mark.parametrize("task", ["prostate", "spinal_cord"])
def test_all_that_learn_see_as_many_slices_and_predict_alike(program, task):
    pipeline = load_pipeline(task)
    for block in program.BLOCKS:
        for row in LEARN:
            for protocol in program.protocols_of(row, block):
                cell = program.Cell(block, "trained", row, protocol, 0, "D", 1)
                params = check_params(row, program.params_of(cell, pipeline))
                updates = params.updates_per_case and params.updates_per_case * getattr(params, "restarts", 1)
                seen = (params.batch_slices, params.draw, updates, params.epochs)
                if block == "restart":
                    assert seen == (8, "replacement", 24, 1), row
                else:
                    assert seen == (16, "ordered", None, 5 if protocol[-1] == "M" else 1), row
                assert params.predict_statistics == "volume", row


def test_a_search_sees_about_as_many(program):
    cell = program.Cell("restart", "trained", "opttta", "N-O", 0, "D", 1)
    params = check_params("opttta", program.params_of(cell, load_pipeline("prostate")))
    assert 0.9 * 192 < 21 * params.first_steps * params.batch_slices <= 192


def line(program, setting, site, mean, row="tent"):
    cell = program.Cell("restart", "trained", row, "N-O", setting, site, 1)
    return cell.key, {**vars(cell), "mean": mean}


def test_a_site_is_not_asked_about_its_own_setting(program):
    means = {"D": [0.1, 0.2, 0.9, 0.3, 0.3, 0.3], "E": [0.8, 0.2, 0.1, 0.3, 0.3, 0.3]}
    cells = dict(line(program, k, site, mean) for site, row in means.items() for k, mean in enumerate(row))
    found = program.chosen(cells, ["D", "E"])
    assert found["restart", "trained", "tent", "N-O", "D"] == 0  # the best on E
    assert found["restart", "trained", "tent", "N-O", "E"] == 2
    missing = {key: item for key, item in cells.items() if not (item["site"] == "E" and item["setting"] == 5)}
    assert ("restart", "trained", "tent", "N-O", "D") not in program.chosen(missing, ["D", "E"])
    finals = program.final_cells(cells, ["D", "E"], 3)
    assert [(cell.site, cell.setting, cell.seed) for cell in finals if cell.site == "D"] == [
        ("D", 0, seed) for seed in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two generated sites, and a source model with its statistics."""
    folder = tmp_path_factory.mktemp("equal")
    sites = []
    for name in ("easy", "hard"):
        small_site.make_volumes(folder / "data/prostate" / name, 2, seed=3, name=name)
        about = {"pipeline": "prostate", "institution": name, **RECIPES["prostate"].describe(name)}
        path = folder / "prostate" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump(about), encoding="utf-8")
        sites.append(str(path))
    return folder, sites, small_site.weights_with_statistics(folder)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_whole_run_is_taken_up_and_printed(program, place, tmp_path, capsys, monkeypatch):
    folder, sites, weights = place
    monkeypatch.setitem(program.RESTART, "updates_per_case", 2)
    rows = ["source", "bn", "tent", "ttac", "tesla"]
    common = [
        "--sites",
        *sites,
        "--data",
        str(folder / "data"),
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
    ]
    call = [*common, "--weights", str(weights), "--rows", *rows, "--blocks", "restart", "--limit", "1"]
    call += ["--set", *small_site.SMALL, "methods.tesla.weak_views=1"]
    statistics = str(weights.with_name(weights.stem + ".statistics.safetensors"))
    assert program.main([*call, "--statistics", statistics, "--scalings", "chosen", "--part", "1/2"]) == 0
    assert program.main([*call, "--statistics", statistics, "--scalings", "chosen", "--part", "2/2"]) == 0
    assert program.main([*call, "--statistics", statistics, "--scalings", "chosen", "--part", "1/2"]) == 0
    printed = capsys.readouterr().out
    assert "grid: 0 cells" in printed  # the third call has only finals to do
    lines = program.every_line(tmp_path / "out")
    grid = [item for item in lines.values() if item["seed"] == 1 and item["row"] == "tesla"]
    assert len(grid) == 6 * len(sites)
    assert all(0 <= item["mean"] <= 1 for item in lines.values())
    source = [item for item in lines.values() if item["row"] == "source"]
    assert all(one["dice"] == one["dice_source"] for item in source for one in item["volumes"])
    assert program.main([*common, "--table"]) == 0
    text = capsys.readouterr().out
    assert "### restart, chosen scaling" in text
    for row in rows:
        assert f"| {row} |" in text
    assert "uniform" in text or "source |" in text
    assert (tmp_path / "out" / "restart-chosen.csv").is_file()


@pytest.mark.usefixtures("one_thread")
def test_cells_repeat_and_a_case_leaves_nothing(program, place, tmp_path):
    folder, sites, weights = place
    monkey = pytest.MonkeyPatch()
    monkey.setitem(program.RESTART, "updates_per_case", 1)
    parsed = ["--sites", sites[0], "--data", str(folder / "data"), "--out", str(tmp_path), "--device", "cpu"]
    options = program.parse([*parsed, "--weights", str(weights), "--set", *small_site.SMALL])
    lab = program.make_lab(options, options.sites)
    cell = program.Cell("restart", "trained", "tent", "N-O", 4, sites[0], 1)
    both, again = lab.run(cell), lab.run(cell)
    assert [item["dice"] for item in both["volumes"]] == [item["dice"] for item in again["volumes"]]
    lab.readers[sites[0]].refs.reverse()
    turned = lab.run(cell)
    assert {item["case"]: item["dice"] for item in turned["volumes"]} == {
        item["case"]: item["dice"] for item in both["volumes"]
    }
    monkey.undo()
