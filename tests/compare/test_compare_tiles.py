"""Comparisons of runs on tiles: cells, tidy rows, tables of errors, tests over tiles, the paper's table."""

import csv
import json

import numpy as np
import pytest
import tile_site

from tesla_med.cli.app import run as run_cli
from tesla_med.compare.cells import cells_of, task_of_table
from tesla_med.compare.figures import TILE_COLUMNS
from tesla_med.compare.grid import compare_methods
from tesla_med.compare.statistics import mcnemar
from tesla_med.config.tables import Row, load_table, make_table, table_files
from tesla_med.errors import ConfigError, OutputError
from tesla_med.tta import METHODS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
SITE, OTHER = "kather16", "kather19"
FOLDERS = {SITE: ("01_TUMOR", "02_STROMA", "04_LYMPHO", "06_MUCOSA"), OTHER: tuple(tile_site.FOLDERS)}
SETTINGS = (*tile_site.SMALL, "methods.bn.batch_slices=8", "methods.tent.batch_slices=8")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return tile_site.train_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    for seed, (site, shift) in enumerate(((SITE, 0.8), (OTHER, 0.3))):
        tile_site.make_tiles(folder / site, 4, seed=3 + seed, shift=shift, size=32)
        for plain, name in zip(tile_site.FOLDERS, FOLDERS[site], strict=True):
            (folder / site / plain).rename(folder / site / name)
    return folder


@pytest.fixture(scope="module")
def finished(weights, tiles, tmp_path_factory):
    out = tmp_path_factory.mktemp("comparison") / "out"
    table = make_table("kather", (SITE, OTHER), ("source", "bn", "tesla"), ("N-O",), 2)
    options = {"weights": weights, "out": out, "device": "cpu", "overrides": SETTINGS}
    return out, table, compare_methods(table, tiles, **options), options


def is_of_tiles(name):
    return task_of_table(load_table(name)).item == "tile"


def read(path):
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.slow
def test_every_seed_has_an_order_of_its_own(finished):
    _, table, result, _ = finished
    cells = cells_of(table)
    assert len(cells) == 2 * (1 + 2 + 2)  # sites; source once, although bn draws nothing itself
    assert (result.done, result.skipped, result.problems) == (len(cells), 0, ())


def test_accuracy_by_class(finished):
    out, _, result, _ = finished
    summary = result.summary
    rows = [row for row in read(out / "comparison.csv") if (row["row"], row["protocol"]) == ("tesla", "N-O")]
    names = ("tumour", "stroma", "lymphocytes", "mucosa")
    assert summary.classes == names
    means = []
    for name in names:
        right = [
            [float(row["right"]) for row in rows if (row["label"], row["seed"]) == (name, seed)]
            for seed in "01"
        ]
        figure = summary.by_class["tesla", "N-O", name]
        assert figure.mean == pytest.approx(np.mean(right))
        assert figure.std == pytest.approx(np.std([np.mean(part) for part in right], ddof=1))
        assert figure.cases == 8  # of both sites, although their names are the same
        means.append(figure.mean)
    assert summary.by_class["tesla", "N-O", "average"].mean == pytest.approx(np.mean(means))
    text = (out / "classes.md").read_text(encoding="utf-8")
    assert "| row | protocol | tumour | stroma | lymphocytes | mucosa | average |" in text
    assert "Accuracy by class, %" in (out / "comparison.html").read_text(encoding="utf-8")
    assert r"\begin{tabular}" in (out / "classes.tex").read_text(encoding="utf-8")


def test_rows_are_tiles(finished):
    out, _, result, _ = finished
    rows = read(out / "comparison.csv")
    assert tuple(rows[0]) == TILE_COLUMNS
    assert len(rows) == 2 * 16 * (1 + 2 + 2)
    predictions = read(out / f"cells/{SITE}/tesla-N-O/seed-1/predictions.csv")
    mine = [row for row in rows if (row["row"], row["site"], row["seed"]) == ("tesla", SITE, "1")]
    assert [row["case"] for row in mine] == [row["tile"] for row in predictions]
    for row in mine:
        assert float(row["right"]) == (row["label"] == row["prediction"])
        assert float(row["right_source"]) == (row["label"] == row["source_prediction"])
    metrics = [
        json.loads((out / f"cells/{SITE}/tesla-N-O/seed-{seed}/report/metrics.json").read_text("utf-8"))
        for seed in (0, 1)
    ]
    figure = result.summary.figures["tesla", "N-O", SITE]
    assert figure.mean == pytest.approx(np.mean([item["adapted"]["accuracy"] for item in metrics]))
    assert result.summary.calibration["tesla", "N-O", SITE]["ece"] == metrics[0]["adapted"]["ece"]
    source = [row for row in rows if row["row"] == "source" and row["site"] == SITE]
    assert all(row["right"] == row["right_source"] for row in source)


def test_the_test_is_mcnemars(finished):
    out, _, result, _ = finished
    right = {}
    for row in read(out / "comparison.csv"):
        right.setdefault((row["row"], row["site"], row["case"]), []).append(float(row["right"]))
    means = []
    for site in (SITE, OTHER):
        differences = [
            np.mean(values) - np.mean(right[("source", *key[1:])])
            for key, values in right.items()
            if key[:2] == ("bn", site)
        ]
        item = result.summary.paired.baseline["bn", "N-O"].sites[site]
        assert item.cases == len(differences) == 16
        assert item.p == mcnemar(np.array(differences))
        means.append(np.mean(differences))
    assert result.summary.paired.baseline["bn", "N-O"].average.difference == pytest.approx(np.mean(means))


def test_lost_tiles_are_those_that_only_the_source_had_right(finished):
    out, _, result, _ = finished
    rows = [row for row in read(out / "comparison.csv") if row["row"] == "tesla"]
    lost = [
        np.mean(
            [row["right"] == "0.0" and row["right_source"] == "1.0" for row in rows if row["site"] == site]
        )
        for site in (SITE, OTHER)
    ]
    assert result.summary.harm["tesla", "N-O", "average"].below[1] == pytest.approx(np.mean(lost))
    content = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    mine = next(item for item in content["rows"] if item["row"] == "tesla")
    assert mine["harm"][SITE] == {"share_lost": pytest.approx(lost[0])}
    assert "share_lost" in read(out / "summary.csv")[0]
    assert not (out / "harm.md").exists()


def test_the_written_tables_say_error(finished):
    out, _, result, _ = finished
    text = (out / "table.md").read_text(encoding="utf-8")
    header = (
        f"| row | protocol | {SITE}, error % | {OTHER}, error % | average, error % | 95 % interval | change |"
    )
    assert header in text
    tests = (out / "tests.md").read_text(encoding="utf-8")
    assert "McNemar" in tests
    assert "Dice" not in text + tests
    figure = result.summary.figures["source", "N-O", SITE]
    line = next(line for line in text.splitlines() if line.startswith("| source |"))
    assert line.split(" | ")[2].strip("*") == f"{100 - 100 * figure.mean:.1f}"
    change = result.summary.paired.baseline["bn", "N-O"].average.difference
    line = next(line for line in text.splitlines() if line.startswith("| bn |"))
    assert line.split(" | ")[6] == f"{0 - 100 * change:+.1f}"  # less error is better
    assert "ms per tile" in text
    page = (out / "comparison.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64") == 4
    content = json.loads((out / "comparison.json").read_text(encoding="utf-8"))
    assert content["metric"] == "accuracy"
    assert content["rows"][0]["accuracy"][SITE]["mean"] == figure.mean
    assert r"error \%" in (out / "table.tex").read_text(encoding="utf-8")
    assert {path.name for path in result.files} >= {"error.png", "harm.png", "calibration.png"}


def test_done_cells_are_not_run_again(finished, tiles, monkeypatch):
    _, table, before, options = finished
    monkeypatch.setattr("tesla_med.compare.grid.run_plan", lambda *_, **__: pytest.fail("was run again"))
    again = compare_methods(table, tiles, resume=True, **options)
    assert (again.done, again.skipped) == (0, before.done)
    assert again.summary == before.summary
    changed = {**options, "overrides": (*SETTINGS, "methods.tesla.learning_rate=0.1")}
    with pytest.raises(OutputError, match=r"other settings \(configuration\)"):
        compare_methods(table, tiles, resume=True, **changed)


@pytest.mark.slow
def test_state_that_is_never_reset_goes_from_site_to_site(weights, tiles, tmp_path):
    found = {}
    for reset, sites in (("never", (SITE, OTHER)), ("never", (OTHER,)), ("site", (SITE, OTHER))):
        table = make_table("kather", sites, ("tesla",), ("N-O",), 1)
        out = tmp_path / f"{reset}{len(sites)}"
        options = {"weights": weights, "out": out, "device": "cpu", "overrides": SETTINGS, "reset": reset}
        assert compare_methods(table, tiles, **options).done == len(sites)
        found[reset, len(sites)] = [
            (out / f"cells/{site}/tesla-N-O/seed-0/predictions.csv").read_text("utf-8") for site in sites
        ]
    assert found["never", 2][0] == found["site", 2][0]
    assert found["never", 1][0] == found["site", 2][1]
    assert found["never", 2][1] != found["site", 2][1]  # what the first site taught is still there


def test_what_is_refused(weights, tiles, tmp_path):
    table = make_table("kather", (SITE,), ("source",), ("N-O",), 1)
    options = {"weights": weights, "out": tmp_path / "out", "device": "cpu", "overrides": SETTINGS}
    with pytest.raises(ConfigError, match=r"--guard.*not for tiles"):
        compare_methods(table, tiles, guard=True, **options)
    mixed = table.model_copy(update={"rows": (Row(label="a", method="bn", pipeline="prostate"),)})
    with pytest.raises(ConfigError, match=r"one task.*kather \(classification\), prostate \(segmentation\)"):
        cells_of(mixed)
    with pytest.raises(ConfigError, match=r"figures of a comparison: not for tiles; they show volumes"):
        cells_of(table.model_copy(update={"figures": ("projection",)}))
    volumes_only = make_table("kather", (SITE,), ("source", "opttta"), ("N-O",), 1)
    result = compare_methods(volumes_only, tiles, **options)
    assert (result.done, [name for name, _ in result.problems]) == (1, [f"{SITE}/opttta-N-O/seed-0"])


def test_a_tile_that_cannot_be_read_is_counted(weights, tiles, tmp_path, capsys):
    folder = tmp_path / SITE / FOLDERS[SITE][0]
    tile_site.make_tiles(tmp_path / SITE, 2, seed=4, size=32)
    for plain, name in zip(tile_site.FOLDERS, FOLDERS[SITE], strict=True):
        (tmp_path / SITE / plain).rename(tmp_path / SITE / name)
    (folder / "0.png").write_bytes(b"broken")
    line = [
        *("compare", "--pipeline", "kather", "--sites", SITE, "--volumes", str(tmp_path)),
        *("--methods", "source,bn", "--seeds", "1", "--weights", str(weights), "--device", "cpu"),
        *("--out", str(tmp_path / "out"), *(f"--set={text}" for text in SETTINGS)),
    ]
    assert run_cli(line) == 1
    assert "2 cells run" in capsys.readouterr().out
    broken = [row for row in read(tmp_path / "out/comparison.csv") if row["case"].endswith("MOR/0.png")]
    assert [row["status"] for row in broken] == ["failed", "failed"]
    assert [row["right"] for row in broken] == ["", ""]


def test_rows_of_the_papers_table():
    table = load_table("kather")
    named = {row.method for row in table.rows}
    published = {"source", "bn", "tent", "shot", "adacontrast", "ttt_pp", "ttac", "tesla", "tesla_s"}
    assert named <= published
    assert {"source", "bn", "tent", "shot", "adacontrast", "tesla"} <= named
    assert named <= set(METHODS.names())
    assert (table.protocols, table.seeds) == (("N-O", "N-M", "Y-O", "Y-M"), 10)
    cells = cells_of(table)
    for row in table.rows:
        method = METHODS.get(row.method)
        mine = [cell for cell in cells if cell.row == row]
        shown = method.protocols if method.adapts else method.protocols[:1]
        assert len(mine) == len(shown) * (10 if method.adapts else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in sorted(table_files()) if is_of_tiles(name)])
def test_every_table_of_tiles_runs_on_generated_tiles(name, weights, tiles, tmp_path):
    whole = load_table(name)
    rows = whole.rows if not name.startswith("sensitivity") else (whole.rows[0], whole.rows[-1])
    changes = {"seeds": 1, "protocols": ("N-O", "Y-O"), "rows": rows, "baseline": rows[0].label}
    few = (*SETTINGS, "methods.shot.batch_slices=8", "methods.adacontrast.batch_slices=8", "protocols={}")
    result = compare_methods(
        whole.model_copy(update=changes),
        tiles,
        weights=weights,
        out=tmp_path / "out",
        device="cpu",
        overrides=few,
    )
    assert result.problems == ()
    assert {key[0] for key in result.summary.rows} == {row.label for row in rows}
    assert set(result.summary.rows) == {key[:2] for key in result.summary.figures}
    text = (tmp_path / "out/table.md").read_text(encoding="utf-8")
    assert all(f"| {row.label} |" in text for row in rows)
