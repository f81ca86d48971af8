"""Whole comparisons on generated sites: what is run, kept, refused and written."""

import csv
import json
import shutil

import numpy as np
import pytest
import small_site as small

from tesla_med.cli.app import run as run_cli
from tesla_med.compare.cells import cells_of, task_of_table
from tesla_med.compare.grid import compare_methods
from tesla_med.config.files import site_files
from tesla_med.config.tables import load_table, make_table, table_files
from tesla_med.errors import ConfigError, DataError, OutputError

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = (*small.SMALL, *small.FEW)
SITES = ("D", "E")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    """Trained weights with source statistics beside them."""
    return small.weights_with_statistics(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("volumes")
    small.make_volumes(folder / "UCL", 2, seed=3)
    small.make_volumes(folder / "BIDMC", 1, seed=4, name="hard")
    return folder


@pytest.fixture(scope="module")
def finished(weights, volumes, tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison") / "out"
    table = make_table("prostate", SITES, ("source", "bn", "tesla"), ("N-O", "N-M"), 2)
    return (
        out,
        table,
        compare_methods(table, volumes, weights=weights, out=out, device="cpu", overrides=SETTINGS),
    )


def test_every_cell_once(finished):
    out, table, result = finished
    cells = cells_of(table)
    assert len(cells) == 2 * (1 + 2 + 2 * 2)  # sites; source once, bn with one seed
    assert (result.done, result.skipped, result.problems) == (len(cells), 0, ())
    assert all((out / "cells" / cell.name / "run.json").is_file() for cell in cells)


def test_the_tidy_table_holds_every_case(finished):
    out, _, result = finished
    with (out / "comparison.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 3 * (1 + 2 + 2 * 2)
    mine = [row for row in rows if (row["row"], row["protocol"], row["seed"]) == ("tesla", "N-O", "1")]
    assert [(row["site"], row["case"]) for row in mine] == [("D", "Case00"), ("D", "Case01"), ("E", "Case00")]
    run = json.loads((out / "cells/D/tesla-N-O/seed-1/run.json").read_text(encoding="utf-8"))
    assert run["seed"] == 1
    assert run["settings"]["pipeline"]["guard"]["enabled"] is False
    metrics = (out / "cells/D/tesla-N-O/seed-1/report/metrics.csv").read_text(encoding="utf-8")
    shown = next(csv.DictReader(metrics.splitlines()))
    assert float(mine[0]["dice"]) == pytest.approx(float(shown["dice"]), abs=1e-4)
    seeds = [float(row["dice"]) for row in rows if (row["row"], row["protocol"]) == ("tesla", "N-O")]
    figure = result.summary.figures["tesla", "N-O", "average"]
    assert 0 < figure.mean <= 1
    assert figure.seeds == 2
    assert min(seeds) <= figure.mean <= max(seeds)


def test_the_written_tables(finished):
    out, _, result = finished
    text = (out / "table.md").read_text(encoding="utf-8")
    assert text.count("\n| tesla |") == 2
    assert "| row | protocol | D | E | average |" in text
    tex = (out / "table.tex").read_text(encoding="utf-8")
    assert r"\toprule" in tex
    assert r"\pm" in tex
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64") == 4
    assert "not a medical device" in page.lower()
    content = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    assert content["rows"][0]["row"] == "source"
    assert content["rows"][0]["against_baseline"] is None
    assert {path.name for path in result.files} >= {
        "dice.png",
        "harm.png",
        "calibration.png",
        "reliability.png",
    }


def test_the_statistics_are_written(finished):
    out, _, result = finished
    summary = result.summary
    content = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    assert content["tests"] == {
        "test": "Wilcoxon signed-rank",
        "correction": "Holm",
        "families": dict(summary.paired.families),
    }
    mine = next(item for item in content["rows"] if (item["row"], item["protocol"]) == ("tesla", "N-O"))
    before = next(item for item in content["rows"] if item["row"] == "source")
    change = mine["against_baseline"]["average"]["difference"]
    assert change == pytest.approx(mine["dice"]["average"]["mean"] - before["dice"]["average"]["mean"])
    assert mine["against_baseline"]["row"] == "source"
    assert mine["against_best_other"]["row"] in ("source", "bn")
    assert set(mine["against_best_other"]["sites"]["D"]) >= {"p", "p_holm", "low", "high", "difference"}
    assert mine["harm"]["average"]["runs"] == 6  # three volumes under two seeds
    assert mine["harm"]["D"]["worst_change"] == summary.harm["tesla", "N-O", "D"].worst
    with (out / "summary.csv").open(encoding="utf-8") as stream:
        rows = {(row["row"], row["protocol"], row["site"]): row for row in csv.DictReader(stream)}
    assert set(rows) == {(*key, site) for key in summary.rows for site in (*SITES, "average")}
    line = rows["tesla", "N-O", "average"]
    assert float(line["baseline_change"]) == change
    assert float(line["share_below_1_point"]) == mine["harm"]["average"]["share_below_1_point"]
    assert float(line["ms_per_slice"]) == pytest.approx(1000 * mine["cost"]["seconds_per_slice"])
    assert float(line["passes_per_slice"]) == mine["cost"]["passes_per_slice"]
    assert rows["tesla", "N-O", "D"]["ms_per_slice"] == ""
    assert rows["source", "N-O", "average"]["baseline_change"] == ""
    tests = (out / "tests.md").read_text(encoding="utf-8")
    assert tests.count("\n| tesla | N-O |") == 2
    assert "the best other" in tests
    assert "Holm" in tests
    harm = (out / "harm.md").read_text(encoding="utf-8")
    assert "> 1 point below, %" in harm
    assert r"$>$ 2 points below, \%" in (out / "harm.tex").read_text(encoding="utf-8")
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert all(f'<table id="{name}">' in page for name in ("table", "tests", "harm"))
    assert {path.name for path in result.files} >= {"summary.csv", "tests.md", "tests.tex", "harm.md"}


def test_passes_are_those_of_the_recipe(finished):
    """The source takes one pass per slice; a method takes that, its own prediction and its updates."""
    out, _, result = finished
    costs = result.summary.costs
    assert costs["source", "N-O"].passes_per_slice == 1
    assert costs["bn", "N-O"].passes_per_slice == 3  # the statistics of the volume take a pass too
    assert costs["tesla", "N-M"].passes_per_slice > costs["bn", "N-M"].passes_per_slice
    cells = json.loads((out / "cells.json").read_text(encoding="utf-8"))
    assert (
        cells["D/source-N-O/seed-0"]["passes"] == cells["D/source-N-O/seed-0"]["slices"] == 2 * small.SLICES
    )


def test_one_region_for_all_rows(finished):
    _, _, result = finished
    found = result.summary.calibration
    assert {key[:2] for key in found} == set(result.summary.rows)
    assert found["source", "N-O", "D"] != found["tesla", "N-O", "D"]
    assert all(0 <= item["ece"] <= 1 for item in found.values())


def test_done_cells_are_not_run_again(finished, weights, volumes, monkeypatch):
    out, table, before = finished
    monkeypatch.setattr("tesla_med.compare.grid.run_plan", lambda *_, **__: pytest.fail("was run again"))
    options = {"weights": weights, "out": out, "device": "cpu", "overrides": SETTINGS}
    again = compare_methods(table, volumes, resume=True, **options)
    assert (again.done, again.skipped) == (0, before.done)
    assert again.summary == before.summary
    with pytest.raises(OutputError, match="--resume adds"):
        compare_methods(table, volumes, **options)
    changed = {**options, "overrides": (*SETTINGS, "methods.tesla.learning_rate=0.1")}
    with pytest.raises(OutputError, match=r"other settings \(configuration\)"):
        compare_methods(table, volumes, resume=True, **changed)


@pytest.mark.slow
def test_state_that_is_never_reset_goes_from_site_to_site(weights, volumes, tmp_path):
    masks = {}
    for reset, sites in (("never", ("E", "D")), ("never", ("D",)), ("site", ("E", "D"))):
        table = make_table("prostate", sites, ("tesla",), ("N-O",), 1)
        out = tmp_path / f"{reset}{len(sites)}"
        options = {"weights": weights, "out": out, "device": "cpu", "overrides": SETTINGS, "reset": reset}
        assert compare_methods(table, volumes, **options).done == len(sites)
        masks[reset, len(sites)] = {
            site: small.files_below(out / f"cells/{site}/tesla-N-O/seed-0/probs") for site in sites
        }
    assert masks["never", 2]["E"] == masks["site", 2]["E"]
    assert masks["never", 1]["D"] == masks["site", 2]["D"]
    assert masks["never", 2]["D"] != masks["site", 2]["D"]  # what E taught is still there
    entry = json.loads((out.parent / "never2/cells.json").read_text(encoding="utf-8"))
    entry["D/tesla-N-O/seed-0"]["complete"] = False
    (out.parent / "never2/cells.json").write_text(json.dumps(entry), encoding="utf-8")
    table = make_table("prostate", ("E", "D"), ("tesla",), ("N-O",), 1)
    again = compare_methods(
        table, volumes, resume=True, **{**options, "out": out.parent / "never2", "reset": "never"}
    )
    assert again.done == 2  # the whole chain, or the state of E would be lost
    assert small.files_below(out.parent / "never2/cells/D/tesla-N-O/seed-0/probs") == masks["never", 2]["D"]


def test_cells_are_added_and_a_cut_off_one_is_done_again(weights, volumes, tmp_path):
    options = {"weights": weights, "out": tmp_path / "out", "device": "cpu", "overrides": SETTINGS}
    one = make_table("prostate", ("D",), ("source",), ("N-O",), 1)
    compare_methods(one, volumes, **options)
    entry = json.loads((tmp_path / "out/cells.json").read_text(encoding="utf-8"))
    entry["D/source-N-O/seed-0"]["complete"] = False
    (tmp_path / "out/cells.json").write_text(json.dumps(entry), encoding="utf-8")
    two = make_table("prostate", ("D",), ("source", "bn"), ("N-O",), 1)
    result = compare_methods(two, volumes, resume=True, **options)
    assert (result.done, result.skipped) == (2, 0)


@pytest.mark.slow
def test_rows_of_a_table_are_run_apart_and_shown_together(weights, volumes, tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "title: Two calls\npipeline: prostate\nsites: [D]\nseeds: 2\nrows:\n"
        "  - {label: source, method: source}\n  - {label: ours, method: tesla}\n"
        "  - {label: slow, method: tesla}\n  - {label: bn, method: bn}\n",
        encoding="utf-8",
    )

    def call(*more):
        arguments = ["compare", "--table", str(path), "--volumes", str(volumes), "--weights", str(weights)]
        arguments += ["--device", "cpu", "--out", str(tmp_path / "out"), *more]
        for text in SETTINGS:
            arguments += ["--set", text]
        return run_cli(arguments)

    def table():
        with (tmp_path / "out/comparison.csv").open(encoding="utf-8") as stream:
            return [(row["row"], row["seed"]) for row in csv.DictReader(stream) if row["case"] == "Case00"]

    assert call("--methods", "bn,ours") == 0
    assert table() == [("ours", "0"), ("ours", "1"), ("bn", "0")]
    assert call("--methods", "source,slow", "--seeds", "1", "--resume") == 0
    assert "2 cells run, 0 already done" in capsys.readouterr().out
    assert table() == [("source", "0"), ("ours", "0"), ("ours", "1"), ("slow", "0"), ("bn", "0")]
    assert call("--methods", "slow", "--first-seed", "7", "--seeds", "1", "--resume", "--reset", "site") == 0
    assert call("--methods", "bn", "--resume", "--set", "methods.tesla.learning_rate=0.1") == 0
    capsys.readouterr()
    assert ("slow", "7") in table()  # made with other settings, and shown
    assert call("--methods", "nobody", "--resume") == 2
    assert "unknown row of the table 'nobody'" in capsys.readouterr().err


def test_without_any_weights_nothing_is_begun(volumes, tmp_path):
    table = make_table("prostate", SITES, ("source", "bn"), ("N-O",), 1)
    with pytest.raises(
        ConfigError, match="no weights: give --weights, or 'weights' in the configuration of D, E"
    ):
        compare_methods(table, volumes, out=tmp_path / "out", device="cpu", overrides=SETTINGS)
    assert not (tmp_path / "out").exists()


def test_volumes_that_are_not_there_end_it(weights, tmp_path):
    table = make_table("prostate", ("D",), ("source",), ("N-O",), 1)
    with pytest.raises(DataError, match="no such file or folder"):
        compare_methods(table, tmp_path / "nowhere", weights=weights, out=tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_parts_of_a_grid_are_run_apart():
    whole = cells_of(make_table("prostate", SITES, ("source", "bn", "tesla"), ("N-O", "N-M"), 2))
    parts = [
        cells_of(make_table("prostate", SITES, ("source", "bn", "tesla"), ("N-O", "N-M"), 1, first_seed=seed))
        for seed in (0, 1)
    ]
    assert {cell.seed for cell in parts[1]} == {1}
    learned = [cell.name for part in parts for cell in part if cell.row.method == "tesla"]
    assert sorted(learned) == sorted(cell.name for cell in whole if cell.row.method == "tesla")


def test_calibration_is_that_of_the_first_seed(weights, volumes, tmp_path, capsys):
    arguments = [
        *("compare", "--pipeline", "prostate", "--sites", "D", "--volumes", str(volumes), "--methods", "bn"),
        *("--seeds", "1", "--first-seed", "4", "--weights", str(weights), "--device", "cpu"),
        *("--out", str(tmp_path / "out")),
    ]
    for text in SETTINGS:
        arguments += ["--set", text]
    assert run_cli(arguments) == 0
    with (tmp_path / "out/comparison.csv").open(encoding="utf-8") as stream:
        assert {row["seed"] for row in csv.DictReader(stream)} == {"4"}
    figures = json.loads((tmp_path / "out/comparison.json").read_text(encoding="utf-8"))
    assert figures["rows"][0]["region_calibration"]["D"]["ece"] > 0


def test_sites_of_files_have_the_names_of_the_files(weights, volumes, tmp_path):
    path = tmp_path / "sites" / "clinic.yaml"
    path.parent.mkdir()
    shutil.copy(site_files("prostate")["D"], path)
    table = make_table("prostate", (str(path), "D"), ("source",), ("N-O",), 1)
    options = {"weights": weights, "out": tmp_path / "out", "device": "cpu", "overrides": SETTINGS}
    result = compare_methods(table, volumes, **options)
    assert result.summary.sites == ("clinic", "D")
    assert result.summary.figures["source", "N-O", "clinic"] == result.summary.figures["source", "N-O", "D"]
    assert (tmp_path / "out/cells/clinic/source-N-O/seed-0/run.json").is_file()
    twice = make_table("prostate", (str(path), "clinic"), ("source",), ("N-O",), 1)
    with pytest.raises(ConfigError, match="share the name 'clinic'"):
        compare_methods(twice, volumes, **options)


def test_a_cell_that_cannot_run_is_told_and_the_others_go_on(weights, volumes, tmp_path):
    table = make_table("prostate", ("D", "F"), ("source",), ("N-O",), 1)
    small.make_volumes(tmp_path / "nii/UCL", 1)
    result = compare_methods(
        table, tmp_path / "nii/UCL", weights=weights, out=tmp_path / "out", device="cpu", overrides=SETTINGS
    )
    assert result.done + len(result.problems) == 2
    missing = make_table("prostate", ("D",), ("source",), ("N-O",), 1)
    with pytest.raises(ConfigError, match="none of the methods"):
        cells_of(missing.model_copy(update={"protocols": ("Y-O",)}))


def test_rows_with_settings_of_their_own(weights, volumes, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "title: Two rates\npipeline: prostate\nsites: [D]\nseeds: 1\nbaseline: still\nrows:\n"
        "  - {label: still, method: tesla, set: [methods.tesla.learning_rate=0]}\n"
        "  - {label: 'fast & loose', method: tesla, set: [methods.tesla.learning_rate=0.05]}\n",
        encoding="utf-8",
    )
    table = load_table(path)
    result = compare_methods(
        table, volumes, weights=weights, out=tmp_path / "out", device="cpu", overrides=SETTINGS
    )
    still, fast = (result.summary.figures[row.label, "N-O", "D"].mean for row in table.rows)
    assert still != fast
    item = result.summary.paired.baseline["fast & loose", "N-O"]
    assert item.average.difference == pytest.approx(fast - still)
    assert r"fast \& loose" in (tmp_path / "out/table.tex").read_text(encoding="utf-8")
    assert "fast &amp; loose" in (tmp_path / "out/comparison.html").read_text(encoding="utf-8")


def test_the_command(weights, volumes, tmp_path, capsys):
    arguments = [
        *("compare", "--pipeline", "prostate", "--sites", "D", "--volumes", str(volumes), "--methods"),
        *("source,bn", "--protocols", "N-O", "--seeds", "1", "--weights", str(weights), "--device", "cpu"),
        *("--out", str(tmp_path / "out")),
    ]
    for text in SETTINGS:
        arguments += ["--set", text]
    assert run_cli(arguments) == 0
    shown = capsys.readouterr().out
    assert "2 cells run, 0 already done" in shown
    assert run_cli(arguments) == 2
    assert "--resume adds" in capsys.readouterr().err
    assert run_cli(["compare", "--volumes", str(volumes)]) == 2
    assert "--table" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(table_files()))
def test_every_table_can_be_read_and_names_cells(name):
    table = load_table(name)
    cells = cells_of(table)
    assert {cell.row.label for cell in cells} == {row.label for row in table.rows}
    assert table.baseline in {row.label for row in table.rows}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(table_files()))
def test_every_table_runs_on_generated_images(name, weights, volumes, tmp_path):
    whole = load_table(name)
    if task_of_table(whole).item == "tile":
        pytest.skip("of tiles: tests/test_compare_tiles.py runs it")
    own = whole.pipeline.startswith("prostate")  # of another organ: the same rows on generated prostates
    ends = whole.rows[0], whole.rows[-1]
    rows = ends if name.startswith("sensitivity") or not own else whole.rows
    first = rows[0].label
    baseline = whole.baseline if whole.baseline in {row.label for row in rows} else first
    table = whole.model_copy(update={"sites": ("E",), "seeds": 1, "rows": rows, "baseline": baseline})
    if not own:
        table = table.model_copy(update={"pipeline": "prostate"})
    result = compare_methods(
        table, volumes, weights=weights, out=tmp_path / "out", device="cpu", overrides=SETTINGS
    )
    assert result.problems == ()
    assert {key[0] for key in result.summary.rows} == {row.label for row in rows}
    assert set(result.summary.rows) == {key[:2] for key in result.summary.figures}
    text = (tmp_path / "out/table.md").read_text(encoding="utf-8")
    assert all(f"| {row.label} |" in text for row in table.rows)


def test_average_needs_every_site(finished):
    _, _, result = finished
    values = [result.summary.figures["bn", "N-O", site].mean for site in SITES]
    assert result.summary.figures["bn", "N-O", "average"].mean == pytest.approx(np.mean(values))


def test_parameters_of_one_method_leave_the_cells_of_others_alone(weights, volumes, tmp_path):
    out = tmp_path / "out"

    def call(methods, *more, resume=False):
        table = make_table("prostate", ("E",), methods, ("N-O",), 1)
        settings = (*SETTINGS, *more)
        return compare_methods(
            table, volumes, weights=weights, out=out, device="cpu", overrides=settings, resume=resume
        )

    call(("source", "bn"))
    both = call(("source", "bn", "tent"), "methods.tent.learning_rate=0.01", resume=True)
    assert (both.done, both.skipped) == (1, 2)
    with pytest.raises(OutputError, match=r"cell E/tent-N-O/seed-0 was made with other settings"):
        call(("source", "bn", "tent"), "methods.tent.learning_rate=0.02", resume=True)


@pytest.mark.parametrize("change", ["reference", "image", "more"])
def test_rows_of_one_table_rest_on_the_same_images_and_references(change, weights, volumes, tmp_path):
    own = tmp_path / "nii"
    shutil.copytree(volumes, own)

    def call(methods):
        table = make_table("prostate", ("E",), methods, ("N-O",), 1)
        about = {"weights": weights, "out": tmp_path / "out", "device": "cpu", "overrides": SETTINGS}
        return compare_methods(table, own, resume=len(methods) > 1, **about)

    call(("source",))
    image, reference = (own / "BIDMC" / f"Case00{part}.nii.gz" for part in ("", "_segmentation"))
    if change == "more":
        for path in (image, reference):
            shutil.copy(path, path.with_name(path.name.replace("00", "77")))
    else:
        path = image if change == "image" else reference
        small.copy_image(path, path, lambda values: values[::-1])
    with pytest.raises(OutputError, match=r"other settings \(images or references of site E\)"):
        call(("source", "bn"))
