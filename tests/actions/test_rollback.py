"""Going back: masks, records, weights and reports agree afterwards, and nothing else changes."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import small_site as small

from tesla_med.actions.rollback import rollback
from tesla_med.errors import OutputError
from tesla_med.io.files import sha256
from tesla_med.records import CaseResult
from tesla_med.reports.slices import read_slices
from tesla_med.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")
NAMES = ("Case00", "Case01", "Case02")
PAGES = ("reports=[table, calibration, quality, html]",)


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def runs(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    nii = folder / "nii"
    small.make_volumes(nii, 3)
    for name, options in {
        "site": {"reset": "site"},
        "case": {"reset": "case"},
        "passes": {"protocol": "N-M", "reset": "site"},
    }.items():
        small.run(
            nii, weights, folder / name, reports=PAGES, save_probs=True, save_uncertainty=True, **options
        )
    return folder


@pytest.fixture
def place(runs, tmp_path):
    def copy(name):
        return Path(shutil.copytree(runs / name, tmp_path / name))

    return copy


def rows(out):
    with (out / "report/metrics.csv").open(newline="") as stream:
        return {row["case"]: row for row in csv.DictReader(stream)}


def is_source(out, name):
    return np.array_equal(small.labels(out, name), small.labels(out, name, "source_masks"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2, 3, "source"])
@pytest.mark.parametrize("reset", ["site", "case"])
def test_later_cases_get_the_source_masks(place, reset, number):
    out = place(reset)
    before, masks = rows(out), small.masks(out)
    kept = 0 if number == "source" else number
    result = rollback(out, number)
    assert result.kept == NAMES[:kept]
    assert result.undone == NAMES[kept:]
    after = rows(out)
    for index, name in enumerate(NAMES):
        key = f"masks/{name}_mask.nii.gz"
        shown = read_slices(out / f"report/slices/{name}.js")
        assert shown["used"] == ("adapted" if index < kept else "source")
        assert ("entropy" in shown["layers"]) == (index < kept)
        same = [item["adapted"] == item["source"] for item in shown["slices"]]
        assert all(same) or index < kept
        if index < kept:
            assert small.masks(out)[key] == masks[key]
            assert after[name] == before[name]
            assert (out / f"probs/{name}_prob.nii.gz").is_file()
            continue
        assert small.masks(out)[key] == masks["source_" + key]
        assert not (out / f"probs/{name}_prob.nii.gz").exists()
        assert not (out / f"uncertainty/{name}_entropy.nii.gz").exists()
        row = after[name]
        status = "ok" if small.labels(out, name).any() else "empty"
        assert (row["used"], row["share"], row["status"]) == ("source", "0", status)
        assert row["dice"] == row["dice_source"] == before[name]["dice_source"]
        assert row["volume_ml"] == row["volume_ml_source"]
        assert row["hd95_mm"] == ""
        assert "rolled back to" in row["reason"]
    record = small.record(out)
    assert record["rolled_back"]["to_case"] == kept
    assert [item["used"] for item in record["cases"]] == ["adapted"] * kept + ["source"] * (3 - kept)
    assert "rolled back" in (out / "report/report.html").read_text() or kept == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_the_weights_are_those_after_the_last_case_kept(place, number):
    out = place("site")
    links = {name: sha256(out / f"checkpoints/after/{name}.safetensors") for name in NAMES}
    result = rollback(out, number)
    current = out / "checkpoints/adapted.safetensors"
    if number == 0:
        assert result.weights is None
        assert not current.exists()
        assert not current.with_suffix(".json").exists()
    else:
        assert result.weights == current
        assert sha256(current) == links[NAMES[number - 1]]
        extra = json.loads(current.with_suffix(".json").read_text())["extra"]
        assert extra["cases_seen"] == list(NAMES[:number])
    left = sorted(path.stem for path in (out / "checkpoints/after").glob("*.safetensors"))
    assert left == list(NAMES[:number])


def test_one_pair_a_case(place):
    out = place("case")
    assert rollback(out, 1).weights is None
    left = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert left == ["Case00.json", "Case00.safetensors"]


def test_calibration_follows(place):
    out = place("case")
    rollback(out, "source")
    content = json.loads((out / "report/calibration.json").read_text())
    assert content["region"]["adapted"]["all"]["ece"] == content["region"]["source"]["all"]["ece"]


def test_passes_over_a_site_go_back_to_the_source_only(place):
    out = place("passes")
    before = small.files_below(out)
    with pytest.raises(OutputError, match=r"together.*--to-case source"):
        rollback(out, 2)
    assert small.files_below(out) == before
    assert rollback(out, "source").undone == NAMES
    assert all(is_source(out, name) for name in NAMES)
    assert not (out / "checkpoints/adapted.safetensors").exists()


def test_failed_cases_are_not_as_the_run_made_them(place):
    out = place("case")
    folder = RunFolder(out)
    _, digest = folder.kept("Case01", CaseResult)
    folder.discard("Case01")
    failed = CaseResult(case="Case01", site="X", status="failed", used=None, reason="cut off")
    folder.keep("Case01", [failed], digest)
    result = rollback(out, cases=["Case00"])
    assert (result.undone, result.kept, result.back) == (("Case00",), ("Case02",), ("Case00",))
    row = rows(out)["Case01"]
    assert (row["used"], row["trusted"], row["status"]) == ("", "", "failed")


def test_twice_is_once(place):
    out = place("site")
    rollback(out, 1)
    before = small.masks(out)
    assert rollback(out, 1).undone == ()
    assert small.masks(out) == before
    assert rollback(out, 0).undone == NAMES[:1]


@pytest.mark.parametrize("wrong", [4, -1, "Case00", "1.5", ""])
def test_no_such_case(place, wrong):
    out = place("site")
    before = small.files_below(out)
    with pytest.raises(OutputError, match="0 to 3 or 'source'"):
        rollback(out, wrong)
    assert small.files_below(out) == before


@pytest.mark.parametrize("content", [None, "{}", "nothing", '{"settings": {"cases": []}}'])
def test_not_a_run(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(OutputError, match="not a run"):
        rollback(tmp_path, "source")


def test_a_run_that_was_rolled_back_is_not_resumed(place, weights, runs):
    out = place("site")
    rollback(out, 1)
    options = {"reports": PAGES, "save_probs": True, "save_uncertainty": True, "reset": "site"}
    with pytest.raises(OutputError, match=r"rolled back to case 1.*--overwrite"):
        small.run(runs / "nii", weights, out, resume=True, **options)
    small.run(runs / "nii", weights, out, overwrite=True, **options)
    assert small.masks(out) == small.masks(runs / "site")
    assert "rolled_back" not in small.record(out)
