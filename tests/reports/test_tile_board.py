"""Curves of runs on tiles."""

import csv
import json

import numpy as np
import pytest
import tile_site
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tesla_med.config.files import load_pipeline
from tesla_med.records import TileResult
from tesla_med.reports.base import RunContext
from tesla_med.reports.tensorboard import TensorboardReport

pytestmark = pytest.mark.usefixtures("one_thread")


def events(folder):
    found = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    found.Reload()
    return found


def values(found, tag):
    return [(event.step, event.value) for event in found.Scalars(tag)]


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return tile_site.train_weights(tmp_path_factory.mktemp("tiles"))


def run(weights, tmp_path, protocol="N-O", labelled=True, reports="[tensorboard,html]"):
    tile_site.make_tiles(tmp_path / "tiles", 3, seed=3, shift=0.6)
    site = tile_site.site() if labelled else tile_site.site(tiles={})
    four = ("methods.tesla.batch_slices=4", "protocols.N-M.tesla.batch_slices=4")
    texts = (*tile_site.SMALL, *four, f"reports={reports}")
    out = tmp_path / "out"
    options = {"weights": weights, "out": out, "device": "cpu", "protocol": protocol, "overrides": texts}
    return tile_site.adapt_tiles(site, tmp_path / "tiles", pipeline="kather", **options)


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_curves_of_a_run(weights, tmp_path, protocol):
    result = run(weights, tmp_path, protocol)
    found = events(result.out / "tensorboard")
    tags = found.Tags()
    losses = [tag for tag in tags["scalars"] if tag.startswith("loss")]
    assert losses
    assert [step for step, _ in values(found, losses[0])] == [0, 1, 2]
    assert not any(tag.startswith("policy/") for tag in tags["scalars"])
    running = values(found, "running/accuracy_adapted")
    assert [step for step, _ in running] == [4, 8, 12]
    assert running[-1][1] == pytest.approx(result.mean)
    assert values(found, "running/error_source")[-1][1] == pytest.approx(1 - result.mean_source)
    with (result.out / "predictions.csv").open() as handle:
        entropy = [float(row["entropy"]) for row in csv.DictReader(handle)]
    shown = [value for _, value in values(found, "entropy/adapted")]
    assert np.mean(shown) == pytest.approx(np.mean(entropy), abs=1e-5)
    figures = json.loads((result.out / "report" / "metrics.json").read_text())
    for name in ("source", "adapted"):
        for key in ("accuracy", "ece", "brier", "nll"):
            assert values(found, f"final/{key}_{name}") == [(12, pytest.approx(figures[name][key]))]
        by_class = values(found, f"final/accuracy_{name}/tumour")[0][1]
        assert by_class == pytest.approx(figures[name]["accuracy_by_class"][0])
    assert set(tags["images"]) == {"uncertain", "confusion", "reliability", "policy/heat_map"}
    assert any(path.name.startswith("events") for path in result.files)


def test_without_labels_and_without_the_report(weights, tmp_path):
    result = run(weights, tmp_path, labelled=False)
    tags = events(result.out / "tensorboard").Tags()
    assert "entropy/adapted" in tags["scalars"]
    assert not [tag for tag in tags["scalars"] if tag.startswith(("running", "final"))]
    assert set(tags["images"]) == {"uncertain", "policy/heat_map"}
    (tmp_path / "second").mkdir()
    quiet = run(weights, tmp_path / "second", reports="[table]")
    assert not (quiet.out / "tensorboard").exists()


def test_running_figures_by_hand(tmp_path):
    pipeline = load_pipeline("kather")
    run_context = RunContext(
        tmp_path, tile_site.site(), pipeline, "tesla", "N-O", 0, "site", kind=TileResult, folder=tmp_path
    )
    report = TensorboardReport()
    report.start(run_context)
    sure, even = np.eye(4, dtype=np.float32), np.full(4, 0.25, np.float32)
    names = [item.name for item in pipeline.classes]

    def tile(number, place, label):
        text = "" if label < 0 else names[label]
        right = None if label < 0 else place == label, None if label < 0 else label == 0
        return TileResult(f"{number}.png", "ok", "adapted", "", text, sure[place], even, *right)

    batches = ([0, 1, 2, 0], [-1, 1])
    for number, labels in enumerate(batches):
        report.unit([tile(f"{number}-{place}", place, label) for place, label in enumerate(labels)], None)
    report.close()
    found = events(tmp_path / "tensorboard")
    assert values(found, "running/accuracy_adapted") == [(4, 0.75), (6, pytest.approx(0.8))]
    assert values(found, "running/accuracy_source") == [(4, 0.5), (6, pytest.approx(0.4))]
    assert values(found, "entropy/source") == [(4, pytest.approx(1)), (6, pytest.approx(1))]
    assert values(found, "entropy/adapted") == [(4, pytest.approx(0)), (6, pytest.approx(0))]
