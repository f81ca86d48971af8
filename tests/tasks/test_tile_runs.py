"""Runs on tiles: what is written, that it repeats, and that it does not depend on what it must not."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import tile_site
import torch
from PIL import Image

from tesla_med.config.files import load_pipeline
from tesla_med.errors import ConfigError, OutputError
from tesla_med.io.tiles import find_tiles
from tesla_med.records import TileResult
from tesla_med.scoring.classes import class_figures
from tesla_med.tasks.base import Items
from tesla_med.tasks.tiles import Tiles
from tesla_med.training.train import train_source
from tesla_med.tta.tesla import TeSLA
from tesla_med.types import Carry

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return tile_site.train_weights(tmp_path_factory.mktemp("tiles"))


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target") / "tiles"
    tile_site.make_tiles(folder, 6, seed=3, shift=0.6)
    return folder


def run(tiles, weights, out, **options):
    texts = (*tile_site.SMALL, *options.pop("overrides", ("reports=[table]",)))
    site = options.pop("site", None) or tile_site.site()
    options = {"pipeline": "kather", "device": "cpu"} | options
    return tile_site.adapt_tiles(site, tiles, weights=weights, out=out, overrides=texts, **options)


def rows(out):
    with (out / "predictions.csv").open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize(
    ("method", "protocol"),
    [
        pytest.param("tesla", "N-O", marks=pytest.mark.slow),
        pytest.param("tesla", "N-M", marks=pytest.mark.slow),
        ("source", "N-O"),
    ],
)
def test_what_is_written(tiles, weights, tmp_path, method, protocol):
    result = run(tiles, weights, tmp_path / "out", method=method, protocol=protocol, overrides=())
    found = rows(result.out)
    assert len(found) == tile_site.read(result) == 24
    assert [row["tile"] for row in found] == sorted(row["tile"] for row in found)
    for row in found:
        probs = {key[2:]: float(value) for key, value in row.items() if key.startswith("p_")}
        assert sum(probs.values()) == pytest.approx(1, abs=1e-4)
        assert row["prediction"] == max(probs, key=probs.get)
        assert 0 <= float(row["entropy"]) <= 1
    figures = json.loads((result.out / "report/metrics.json").read_text(encoding="utf-8"))
    right = np.mean([row["label"] == row["prediction"] for row in found])
    assert figures["adapted"]["accuracy"] == pytest.approx(right) == result.mean
    source = np.mean([row["label"] == row["source_prediction"] for row in found])
    assert figures["source"]["accuracy"] == pytest.approx(source) == result.mean_source
    assert np.sum(figures["adapted"]["confusion"]) == 24
    assert 0 <= figures["adapted"]["ece"] <= 1
    names = {path.name for path in (result.out / "report").iterdir()}
    assert names == {
        *("metrics.json", "calibration.json", "confusion.png"),
        *("reliability.png", "uncertain.png", "report.html"),
    }
    page = (result.out / "report/report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64") == 3
    assert "Not a medical device" in page
    record = json.loads((result.out / "run.json").read_text(encoding="utf-8"))
    assert record["complete"]
    assert record["settings"]["method"] == method
    assert (result.out / "checkpoints/adapted.safetensors").exists() == (method != "source")


def test_training_learns_and_adapting_changes_something(tiles, weights, tmp_path):
    record = json.loads((weights.parent / "train.json").read_text(encoding="utf-8"))
    assert record["validation_accuracy"] > 0.6  # of 7 tiles; chance is 0.25
    source = run(tiles, weights, tmp_path / "a", method="source")
    adapted = run(tiles, weights, tmp_path / "b", method="tesla")
    assert source.mean == source.mean_source == adapted.mean_source
    assert [row["entropy"] for row in rows(source.out)] != [row["entropy"] for row in rows(adapted.out)]


EVERY = "reports=[table,tensorboard,html,contact_sheet]"


def stop_at(monkeypatch, steps):
    """Break off a run of TeSLA before it predicts for the second batch."""
    predict = TeSLA.predict

    def stopped(self, images):
        if self.steps > steps:
            raise KeyboardInterrupt
        return predict(self, images)

    monkeypatch.setattr(TeSLA, "predict", stopped)


@pytest.mark.slow
@pytest.mark.parametrize("keep_every", [0.0, 1e9], ids=["state after every batch", "no state yet"])
@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_an_interrupted_run_goes_on_and_a_finished_one_stays(
    tiles, weights, tmp_path, monkeypatch, keep_every, protocol
):
    monkeypatch.setattr(Tiles, "keep_every", keep_every)
    options = {"protocol": protocol, "overrides": ("reports=[table]", "methods.tesla.batch_slices=4")}
    whole = run(tiles, weights, tmp_path / "whole", **options)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run(tiles, weights, out, **options)
    assert not (out / "predictions.csv").exists()
    assert json.loads((out / "run.json").read_text(encoding="utf-8"))["complete"] is False
    with pytest.raises(OutputError, match="give --resume"):
        run(tiles, weights, out, **options)
    with pytest.raises(OutputError, match="seed"):
        run(tiles, weights, out, resume=True, seed=1, **options)
    updates = []
    adapt = TeSLA.adapt
    monkeypatch.setattr(TeSLA, "adapt", lambda self, images: updates.append(1) or adapt(self, images))
    done = run(tiles, weights, out, resume=True, **options)
    if keep_every == 0 and protocol == "N-O":
        assert len(updates) == 4  # of six batches the first two are not done again
    for name in ("predictions.csv", "report/metrics.json", "checkpoints/adapted.safetensors"):
        assert (out / name).read_bytes() == (whole.out / name).read_bytes()
    updates.clear()
    again = run(tiles, weights, out, resume=True, **options)
    assert not updates
    assert (tile_site.read(again), again.mean, again.mean_source) == (
        tile_site.read(done),
        done.mean,
        done.mean_source,
    )
    assert (out / "predictions.csv").read_bytes() == (whole.out / "predictions.csv").read_bytes()


def test_changed_tiles_are_done_again(tiles, weights, tmp_path):
    import shutil

    own = Path(shutil.copytree(tiles, tmp_path / "own"))
    out = tmp_path / "out"
    before = rows(run(own, weights, out, method="source").out)
    target = own / before[0]["tile"]
    target.write_bytes((own / before[-1]["tile"]).read_bytes())
    after = rows(run(own, weights, out, method="source", resume=True).out)
    assert after[0]["p_tumour"] != before[0]["p_tumour"]
    assert after[0]["p_tumour"] == after[-1]["p_tumour"]


@pytest.mark.slow
def test_rolling_back(tiles, weights, tmp_path):
    from tesla_med import rollback

    result = run(tiles, weights, tmp_path / "out", overrides=(EVERY,))
    out, before = result.out, rows(result.out)
    source = rows(run(tiles, weights, tmp_path / "source", method="source").out)
    with pytest.raises(OutputError, match="--to-case source"):
        rollback(out, 1)
    undone = rollback(out, "source")
    assert set(undone.undone) == {row["tile"] for row in before}
    for one, other in zip(rows(out), source, strict=True):  # batches of another size, so rounded otherwise
        for column in ("tile", "label", "prediction"):
            assert one[column] == other[column]
        assert float(one["p_tumour"]) == pytest.approx(float(other["p_tumour"]), abs=1e-4)
    figures = json.loads((out / "report/metrics.json").read_text(encoding="utf-8"))
    assert figures["adapted"] == figures["source"]
    assert not (out / "checkpoints/adapted.safetensors").exists()
    assert not (out / "report/uncertain.png").exists()
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["rolled_back"]["to_case"] == 0
    assert rollback(out, "source").undone == ()


@pytest.mark.slow
def test_a_run_repeats_and_seeds_differ(tiles, weights, tmp_path):
    first, second, other = (
        run(tiles, weights, tmp_path / name, seed=seed) for name, seed in zip("abc", (1, 1, 2), strict=True)
    )
    assert rows(first.out) == rows(second.out)
    assert rows(first.out) != rows(other.out)


def test_under_o_a_batch_is_a_case(tiles, weights, tmp_path):
    """BN takes each batch's own statistics, so a tile's answer does not depend on the batches before."""
    size = ("methods.bn.batch_slices=8", "reports=[table]")
    whole = run(tiles, weights, tmp_path / "a", method="bn", overrides=size)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    names = [row["tile"] for row in rows(whole.out)]
    last = {names[place] for place in order[16:]}
    for name in last:
        target = tmp_path / "few" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((tiles / name).read_bytes())
    alone = run(tmp_path / "few", weights, tmp_path / "b", method="bn", overrides=size)
    shown = {row["tile"]: float(row["p_tumour"]) for row in rows(whole.out)}
    assert len(rows(alone.out)) == 8
    for row in rows(alone.out):
        assert float(row["p_tumour"]) == pytest.approx(shown[row["tile"]], abs=1e-4)


@pytest.mark.slow
def test_state_goes_on_where_it_is_carried(tiles, weights, tmp_path):
    carry = Carry()
    first = run(tiles, weights, tmp_path / "a", reset="never", carry=carry)
    assert carry.state is not None
    second = run(tiles, weights, tmp_path / "b", reset="never", carry=carry)
    afresh = run(tiles, weights, tmp_path / "c", reset="never")
    assert rows(first.out) == rows(afresh.out) != rows(second.out)


@pytest.mark.parametrize("statistics", ["volume", "running"])
def test_adapted_weights_know_how_they_predict(tiles, weights, tmp_path, statistics):
    """Under M the saved network repeats the predictions, with several views and whichever statistics."""
    texts = (f"methods.tesla.predict_statistics={statistics}", "predict_batch=8", "reports=[table]")
    adapted = run(tiles, weights, tmp_path / "a", protocol="N-M", overrides=texts)
    saved = adapted.out / "checkpoints" / "adapted.safetensors"
    again = run(tiles, saved, tmp_path / "b", method="source", overrides=texts)
    for one, other in zip(rows(adapted.out), rows(again.out), strict=True):
        assert float(one["p_tumour"]) == pytest.approx(float(other["p_tumour"]), abs=1e-4)


def test_labels_do_not_reach_the_method(tiles, weights, tmp_path):
    wrong = {name: (value + 1) % 4 for name, value in tile_site.FOLDERS.items()}
    ours = rows(run(tiles, weights, tmp_path / "a").out)
    theirs = rows(run(tiles, weights, tmp_path / "b", site=tile_site.site(tiles=wrong)).out)
    assert [row["label"] for row in ours] != [row["label"] for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert {k: v for k, v in one.items() if k != "label"} == {
            k: v for k, v in other.items() if k != "label"
        }


def test_unlabelled_and_broken_tiles(tiles, weights, tmp_path):
    folder = tmp_path / "mixed"
    tile_site.make_tiles(folder, 2, seed=4)
    (folder / "TUM" / "0.png").write_bytes(b"broken")
    result = run(folder, weights, tmp_path / "out", site=tile_site.site(tiles={}), overrides=())
    assert result.mean is None
    assert [item.case for item in result.failed] == ["TUM/0.png"]
    assert tile_site.read(result) == 7
    broken = next(row for row in rows(result.out) if row["tile"] == "TUM/0.png")
    assert broken["prediction"] == ""
    assert "There are no labels" in (result.out / "report/report.html").read_text(encoding="utf-8")
    for path in folder.rglob("*.png"):
        path.write_bytes(b"broken")
    nothing = run(folder, weights, tmp_path / "none")
    assert len(nothing.failed) == 8
    assert not nothing.complete
    assert all(row["prediction"] == "" for row in rows(nothing.out))


def test_stains_are_normalised_where_the_recipe_says_so(weights, tmp_path):
    folder = tmp_path / "stained"
    from tesla_med.demo.tiles import StainSettings, make_tile_site

    make_tile_site(folder, StainSettings(), 2, seed=1)
    white = np.full((64, 64, 3), 255, np.uint8)
    Image.fromarray(white).save(next(folder.rglob("*.png")).parent / "white.png")
    outcome = {}
    for switch in ("false", "true"):
        texts = (
            "reports=[table]",
            "preprocessing.least_tissue=0",
            f"preprocessing.stain_normalisation={switch}",
        )
        result = run(
            folder,
            weights,
            tmp_path / switch,
            site=tile_site.site(tiles={}),
            method="source",
            overrides=texts,
        )
        record = json.loads((result.out / "run.json").read_text(encoding="utf-8"))
        outcome[switch] = (record["tiles_read_with_remarks"], [row["entropy"] for row in rows(result.out)])
    assert outcome["false"][0] == {}
    assert any(text.startswith("stains not normalised") for text in outcome["true"][0])
    assert outcome["false"][1] != outcome["true"][1]


def test_what_is_refused(tiles, weights, tmp_path):
    with pytest.raises(ConfigError, match="the state is not reset for single tiles"):
        run(tiles, weights, tmp_path / "a", reset="case")
    with pytest.raises(ConfigError, match="the state is not reset for single tiles"):
        run(tiles, weights, tmp_path / "a", overrides=("reset={N-O: case}",))
    run(tiles, weights, tmp_path / "b", method="source")
    with pytest.raises(OutputError, match="earlier run"):
        run(tiles, weights, tmp_path / "b", method="source")
    again = run(tiles, weights, tmp_path / "b", method="bn", overwrite=True)
    assert tile_site.read(again) == 24
    with pytest.raises(OutputError, match="earlier training"):
        train_source(
            load_pipeline("kather", tile_site.SMALL), [tile_site.site()], tiles, weights.parent, device="cpu"
        )


def test_figures_by_hand():
    pipeline = load_pipeline("kather")
    probs = np.eye(4, dtype=np.float32)[[0, 1, 1, 3]] * 0.8 + 0.05
    labels = np.array([0, 1, 2, 3])
    names = [item.name for item in pipeline.classes]
    results = [
        TileResult(str(place), "ok", "adapted", "", names[label], row, row, bool(row.argmax() == label))
        for place, (row, label) in enumerate(zip(probs, labels, strict=True))
    ]
    figures = class_figures(results, pipeline)["adapted"]
    assert figures["accuracy"] == 0.75
    assert figures["accuracy_by_class"] == [1, 1, 0, 1]
    assert figures["mean_class_accuracy"] == 0.75
    assert figures["confusion"][2] == [0, 1, 0, 0]
    brier = np.mean([3 * 0.05**2 + 0.15**2] * 3 + [2 * 0.05**2 + 0.95**2 + 0.85**2])
    assert figures["brier"] == pytest.approx(brier, rel=1e-5)


@pytest.mark.slow
def test_the_commands(tmp_path, capsys):
    from tesla_med.cli.app import run as run_cli

    tile_site.make_tiles(tmp_path / "kather19", 2, seed=5)
    texts = (*tile_site.SMALL, "reports=[table]", "train.steps=2")
    shared = ["--volumes", str(tmp_path), "--device", "cpu", *(f"--set={text}" for text in texts)]
    line = ["train", "--pipeline", "kather", "--sites", "kather19", "--out", str(tmp_path / "w"), *shared]
    assert run_cli(line) == 0
    assert "accuracy on held-out data" in capsys.readouterr().out
    weights = str(tmp_path / "w" / "source.safetensors")
    line = ["adapt", "--site", "kather19", "--weights", weights, "--out", str(tmp_path / "o"), *shared]
    assert run_cli(line) == 0
    shown = capsys.readouterr().out
    assert "8 tiles, 0 not read" in shown
    assert "accuracy: source" in shown
    before = (tmp_path / "o" / "predictions.csv").read_bytes()
    assert run_cli([*line, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "8 tiles in" in shown
    assert "1 batches of at most 8" in shown
    assert run_cli([*line, "--resume"]) == 0
    assert (tmp_path / "o" / "predictions.csv").read_bytes() == before


def test_contact_sheet_marks_tiles_whose_label_is_another_class(tmp_path):
    import io

    from tesla_med.reports.contact_sheet import contact_sheet

    tile_site.make_tiles(tmp_path, 1, size=32)
    pipeline = load_pipeline("kather")
    names = [item.name for item in pipeline.classes]
    tiles = find_tiles(tmp_path, tile_site.FOLDERS)

    def red(predicted):
        probs = np.full((4, 4), 0.1, np.float32) + 0.6 * np.eye(4, dtype=np.float32)[predicted]
        results = [
            TileResult(name, "ok", "adapted", "", names[label], row, row)
            for name, label, row in zip(tiles.names, tiles.labels, probs, strict=True)
        ]
        content = contact_sheet(results, tmp_path, pipeline)
        strip = np.asarray(Image.open(io.BytesIO(content)))[:42].astype(int)
        return int((strip[..., 0] > strip[..., 2] + 80).sum())

    right = [int(value) for value in tiles.labels]
    assert red(right) == 0
    assert red([right[1], *right[1:]]) > 20


def test_a_batch_that_diverges_leaves_no_trace(tiles, weights, tmp_path, monkeypatch):
    """The stream goes on from before the batch, and only its own tiles keep the source's classes."""
    adapt, calls = TeSLA.adapt, []

    def broken_once(self, images):
        calls.append(1)
        scalars = adapt(self, images)
        return {name: torch.tensor(float("nan")) for name in scalars} if len(calls) == 2 else scalars

    monkeypatch.setattr(TeSLA, "adapt", broken_once)
    texts = ("methods.tesla.batch_slices=8", "reports=[table]")
    result = run(tiles, weights, tmp_path / "out", overrides=texts)
    assert (result.diverged, result.units) == (1, 3)
    assert result.complete
    collapsed = [item for item in result.results if item.status == "collapsed"]
    assert len(collapsed) == 8
    assert all(np.array_equal(item.probs, item.probs_source) for item in collapsed)
    others = [item for item in result.results if item.status == "ok"]
    assert not any(np.array_equal(item.probs, item.probs_source) for item in others)
    assert (result.out / "checkpoints/adapted.safetensors").exists()


@pytest.mark.slow
def test_batches_that_all_diverge_are_a_failure(tiles, weights, tmp_path):
    texts = ("methods.tesla.learning_rate=1e30", "reports=[table]", "methods.tesla.batch_slices=8")
    result = run(tiles, weights, tmp_path / "out", overrides=texts)
    assert (result.diverged, result.units) == (3, 3)
    assert not result.complete
    assert {item.used for item in result.results} == {"source"}


def left(folder, source, count):
    """Return a folder with so many of the tiles of another, of every class in turn."""
    paths = sorted(source.rglob("*.png"), key=lambda path: (path.stem, path.parent.name))
    for path in paths[:count]:
        (folder / path.parent.name).mkdir(parents=True, exist_ok=True)
        (folder / path.parent.name / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_rest_of_a_few_tiles_goes_with_the_batch_before_it():
    task = Tiles(tile_site.site(), load_pipeline("kather", tile_site.SMALL))

    def sizes(count, size):
        items = Items(Path(), tuple(map(str, range(count))), (), None)
        refs = task.refs(items, 0, size)
        assert sorted(name for ref in refs for name in ref.items) == sorted(items.names)
        return [len(ref.items) for ref in refs]

    assert sizes(33, 32) == [33]
    assert sizes(71, 32) == [32, 39]
    assert sizes(72, 32) == [32, 32, 8]
    assert sizes(5, 32) == [5]
    assert sizes(9, 4) == [4, 5]


@pytest.mark.parametrize("method", ["bn", "tent"])
def test_a_few_tiles_are_left_to_the_source_model(method, tiles, weights, tmp_path):
    """One tile has no statistics: normalised by its own, it is of any class, and certainly so."""
    few = left(tmp_path / "few", tiles, 3)
    result = run(few, weights, tmp_path / "out", method=method)
    assert {item.used for item in result.results} == {"source"}
    assert all("3 tiles are too few to adapt to" in item.reason for item in result.results)
    for item in result.results:
        assert np.array_equal(item.probs, item.probs_source)
    asked = f"methods.{method}.batch_slices=3"  # as many as were asked for are not too few
    wanted = run(few, weights, tmp_path / "wanted", method=method, overrides=("reports=[table]", asked))
    assert {item.used for item in wanted.results} == {"adapted"}


def test_means_over_all_tiles_so_far_need_no_more(tiles, weights, tmp_path):
    few = left(tmp_path / "few", tiles, 3)
    options = ("reports=[table]", "methods.tesla.batch_slices=32")
    result = run(few, weights, tmp_path / "out", method="tesla", overrides=options)
    assert {item.used for item in result.results} == {"adapted"}
