"""One entry of the registry is all that a metric needs; records of earlier versions can be read."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import re

import numpy as np
import pytest
from made_up_runs import case, failed, run_context
from small_volumes import diagonal, write

from tesla_med.actions.evaluate import evaluate
from tesla_med.compare.figures import DICE
from tesla_med.records import ClassScore
from tesla_med.reports._curves import CaseCurves
from tesla_med.reports.base import make_reports
from tesla_med.reports.table import columns
from tesla_med.runs.folder import RunFolder
from tesla_med.scoring import metrics
from tesla_med.scoring.masks import columns as evaluate_columns
from tesla_med.scoring.metrics import METRICS, Metric, figure_columns
from tesla_med.scoring.score import of_source
from tesla_med.tasks.volumes import Volumes

OF_RUNS = ("dice", "dice_source", "hd95_mm", "assd_mm", "nsd", "volume_ml", "volume_ml_source")


def jaccard(pair):
    reference, prediction = pair.both
    union = (reference | prediction).sum()
    return float((reference & prediction).sum() / union) if union else None


@pytest.fixture
def register(monkeypatch):
    """Register metrics for one test."""

    def add(**changes):
        values = {
            "name": "jaccard",
            "title": "Jaccard",
            "unit": "",
            "better": "higher",
            "what": "common volume over the volume of both together, 0 to 1",
            "empty": "n/a where both are empty, 0 where one is",
            "function": jaccard,
        }
        metric = Metric(**values | changes)
        METRICS.in_order()  # what other distributions add is there already
        monkeypatch.setitem(METRICS._entries, metric.name, metric)
        return metric

    return add


def report(name, run, pairs):
    """Write one report of cases and return what it wrote."""
    (made,) = make_reports([name], run)
    for result, view in pairs:
        made.unit([result], view)
    return made.finish([result for result, _ in pairs])


def table(run, pairs):
    (path,) = report("table", run, pairs)
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def page(run, pairs):
    (path,) = report("html", run, pairs)
    text = re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<style.*?</style>", "", path.read_text(encoding="utf-8")))
    return re.sub(r"\s+", " ", text)


def scalars(run, pairs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report("tensorboard", run, pairs)
    accumulator = EventAccumulator(str(run.out / "tensorboard"))
    accumulator.Reload()
    return {tag: accumulator.Scalars(tag)[0].value for tag in accumulator.Tags()["scalars"]}


class Finished(RunFolder):
    """A finished run in memory."""

    def __init__(self, results):
        super().__init__(None)
        self.results = results

    def read(self):
        return {"settings": {"cases": [result.case for result in self.results]}}

    def records(self, names, kind):
        return self.results


def compared_rows(results):
    """Return the rows of a comparison, as the task of volumes gives them."""
    task = object.__new__(Volumes)
    return list(task.rows(Finished(results)))


def test_the_columns_are_those_of_the_registry():
    assert figure_columns() == OF_RUNS
    assert columns()[6:13] == OF_RUNS
    of_masks = ("dice", "hd95_mm", "assd_mm", "nsd", "volume_ml", "volume_ml_reference")
    assert evaluate_columns()[3:9] == of_masks
    assert DICE.columns[8:13] == ("dice", "dice_source", "hd95_mm", "assd_mm", "nsd")
    assert [METRICS.get(name).name for name in METRICS.names()] == sorted(METRICS.names())


def test_a_new_metric_appears_everywhere(tmp_path, register):
    run = run_context(tmp_path)
    before = page(run, [case(run, 1)])
    assert "Jaccard" not in before
    register(of_source=True)
    pairs = [case(run, 1, shift=2), (failed(), None)]
    (score,) = pairs[0][0].scores
    found, source = score.value("jaccard"), score.value("jaccard_source")
    assert 0 < found < 1
    assert 0 < source < 1
    assert found != source

    rows = table(run, pairs)
    assert list(rows[0])[6:13] == [*OF_RUNS[:5], "jaccard", "jaccard_source"]
    assert float(rows[0]["jaccard"]) == pytest.approx(found, rel=1e-5)
    assert float(rows[0]["jaccard_source"]) == pytest.approx(source, rel=1e-5)
    assert rows[1]["jaccard"] == ""

    text = page(run, pairs)
    assert "HD95 mm ASSD mm NSD Jaccard source → adapted" in text
    assert text.count(f"{source:.3f} → {found:.3f}") == 2  # by class and by case
    assert "Common volume over the volume of both together, 0 to 1. Empty masks: n/a where both are" in text

    points = scalars(run, pairs)
    assert points["jaccard/prostate"] == pytest.approx(found)
    assert points["jaccard_source/prostate"] == pytest.approx(source)
    assert {"jaccard/", "jaccard_source/"} <= set(CaseCurves.own())

    assert DICE.columns[8:15] == (*OF_RUNS[:5], "jaccard", "jaccard_source")
    first, last = compared_rows([result for result, _ in pairs])
    assert set(DICE.columns) - {"site", "row", "method", "protocol", "seed"} == set(first)
    assert (first["jaccard"], first["jaccard_source"], last["jaccard"]) == (found, source, None)

    undone = of_source(pairs[0][0], "rolled back").scores[0]
    assert (undone.value("jaccard"), undone.value("jaccard_source")) == (source, source)
    assert undone.value("nsd") is None


def test_a_metric_that_needs_no_reference_is_shown_without_one(tmp_path, register):
    register(
        name="slices",
        title="Slices",
        function=lambda pair: float(pair.prediction.any(axis=(0, 1)).sum()),
        needs_reference=False,
        better=None,
        digits=0,
    )
    run = run_context(tmp_path)
    pairs = [case(run, 1, referenced=False)]
    count = pairs[0][1].mask.any(axis=(0, 1)).sum()
    assert table(run, pairs)[0]["slices"] == str(count)
    assert "Slices" in page(run, pairs)
    assert "HD95 mm" not in page(run, pairs)
    assert "slices" not in DICE.columns[8:13]
    assert scalars(run, pairs)["slices/prostate"] == count


def test_a_new_metric_appears_in_evaluate(tmp_path, register):
    register()
    register(
        name="voxels_found",
        title="Voxels",
        function=lambda pair: float(pair.prediction.sum()),
        needs_reference=False,
    )
    reference = np.zeros((12, 12, 8), np.uint8)
    reference[2:8, 2:8, 2:6] = 1
    found = reference.copy()
    found[2:5] = 0
    for name, mask in (("Case00", found), ("Case01", reference)):
        write(tmp_path / f"masks/{name}.nii.gz", mask, diagonal(1, 1, 3))
        write(tmp_path / f"references/{name}.nii.gz", reference, diagonal(1, 1, 3))
    result = evaluate(tmp_path / "masks", tmp_path / "references", out=tmp_path / "out")
    with (tmp_path / "out/metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    columns = ["case", "label", "name", "dice", "hd95_mm", "assd_mm", "nsd", "jaccard", "volume_ml"]
    columns += ["volume_ml_reference", "voxels_found", "voxels_found_reference", "status", "reason"]
    assert list(rows[0]) == columns
    assert [row["jaccard"] for row in rows] == ["0.5", "1"]
    assert (rows[0]["voxels_found"], rows[0]["voxels_found_reference"]) == ("72", "144")
    (summary,) = json.loads((tmp_path / "out/summary.json").read_text())["classes"]
    assert summary["jaccard_mean"] == 0.75
    assert summary["voxels_found_reference_mean"] == 144
    title, header, shown = result.tables()[0]
    assert (title, header[2:]) == ("", ["Dice %", "HD95 mm", "ASSD mm", "NSD %", "Jaccard %"])
    assert shown[0][-1] == "50.0"


def test_what_depends_on_the_voxel_size_is_blank_where_it_is_nominal(register):
    register(physical=True)
    mask = np.ones((3, 3, 3), bool)
    pair = metrics.MaskPair(mask, mask, (1, 1, 1))
    values = metrics.evaluate_metrics(pair, METRICS.in_order(), nominal=True)
    assert [name for name, value in values.items() if value is not None] == ["dice"]
    assert metrics.evaluate_metrics(pair, METRICS.in_order())["jaccard"] == 1.0


def test_records_of_earlier_versions_are_read():
    earlier = {"label": 1, "name": "prostate", "dice": 0.5, "hd95_mm": 3.0, "volume_ml": 2.0, "voxels": 4}
    score = ClassScore.model_validate(earlier)
    assert (score.value("dice"), score.value("hd95_mm"), score.value("nsd")) == (0.5, 3.0, None)
    assert ClassScore.model_validate_json(score.model_dump_json()) == score


def test_a_metric_of_another_distribution_is_loaded(monkeypatch, caplog):
    made = metrics.Metrics()
    entry = METRICS.get("dice")

    class Entry:
        name, value = "one", "package:one"

        def load(self):
            made.add(entry)

    class Broken(Entry):
        def load(self):
            raise ImportError("no such module")

    found = {"tesla_med.metrics": [Broken(), Entry()]}
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found[group])
    assert made.in_order() == [entry]
    assert made.names() == ["dice"]
    assert "metric 'one' of package:one cannot be loaded: no such module" in caplog.text
