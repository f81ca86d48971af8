"""Folders that version 866c00e wrote (see ``made_at_866c00e/make.py``): read, resumed and rolled back."""

from __future__ import annotations

import csv
import json
import shutil
import tarfile
from pathlib import Path

import pytest
import small_site as small
import tile_site

import tesla_med
from tesla_med.records import CaseResult
from tesla_med.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_thread")
ARCHIVE = Path(__file__).parent / "made_at_866c00e" / "runs.tar.xz"
NARROW = (
    "model.params.width=1",
    *("methods.tesla.relative_rate=false", "methods.tesla_s.relative_rate=false"),  # which came later
)
TILES = (*tile_site.SMALL, "model.params.width=0.05", "train.steps=60")  # as the folder was made


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def earlier(unpacked, tmp_path, monkeypatch):
    """Return a copy of the folders, which the paths in their records are relative to."""
    shutil.copytree(unpacked, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return Path()


def resumed(folder: Path, **options):
    weights = folder / "weights.safetensors"
    volumes, overrides = folder / "volumes", NARROW
    return small.run(volumes, weights, folder / options["reset"], overrides=overrides, resume=True, **options)


def table(folder: Path) -> list[dict[str, str]]:
    """Return the rows of ``predictions.csv``."""
    with (folder / "predictions.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("reset", ["case", "site"])
def test_volumes_are_read(earlier, reset):
    folder = RunFolder(earlier / reset)
    records = folder.records(["Case00", "Case01"], CaseResult)
    assert [item.case for item in records] == ["Case00", "Case01"]
    assert {item.used for item in records} == {"adapted"}
    assert all(0 <= item.mean_dice <= 1 and item.scores[0].value("nsd") is None for item in records)
    assert folder.read()["method"]["name"] == "tesla"
    scored = tesla_med.evaluate(folder.out, earlier / "volumes")
    known = {item.case: item.scores[0].dice for item in records}
    assert {item.case: item.scores[0].dice for item in scored.cases if item.scores} == pytest.approx(known)


@pytest.mark.parametrize("reset", ["case", "site"])
def test_volumes_are_taken_up_where_they_were_left(earlier, reset):
    before = small.masks(earlier / reset)
    assert {"masks/Case00_mask.nii.gz", "masks/Case01_mask.nii.gz"} <= set(before)
    times = {name: (earlier / reset / name).stat().st_mtime_ns for name in before if "Case" in name}
    result = resumed(earlier, reset=reset)
    assert [item.case for item in result.results] == ["Case00", "Case01", "Case02"]
    assert result.results[2].used == "adapted"
    after = small.masks(earlier / reset)
    assert {name: after[name] for name in before} == before
    assert {name: (earlier / reset / name).stat().st_mtime_ns for name in times} == times
    assert (earlier / reset / "report" / "metrics.csv").read_text().count("\n") == 4
    again = small.run(
        earlier / "volumes",
        earlier / "weights.safetensors",
        earlier / "again",
        overrides=NARROW,
        reset=reset,
    )
    assert set(small.masks(earlier / "again")) == set(after)
    assert again.mean_dice == pytest.approx(result.mean_dice, abs=0.05), "the state went on where it was"


@pytest.mark.parametrize("to_case", [0, 1])
def test_a_stream_of_volumes_is_rolled_back(earlier, to_case):
    resumed(earlier, reset="site")
    back = tesla_med.rollback(earlier / "site", to_case=to_case)
    assert list(back.undone) == ["Case00", "Case01", "Case02"][to_case:]
    cases = json.loads((earlier / "site" / "run.json").read_text())["cases"]
    assert [item["used"] for item in cases] == ["adapted"] * to_case + ["source"] * (3 - to_case)
    for name in back.undone:
        assert (small.labels(Path("site"), name) == small.labels(Path("site"), name, "source_masks")).all()


@pytest.mark.slow
def test_tiles_are_read_and_scored_and_a_finished_run_is_done_again_alike(earlier):
    before = table(earlier / "stream")
    scored = tesla_med.evaluate(earlier / "stream")
    assert scored.adapted.accuracy == pytest.approx(
        json.loads((earlier / "stream/report/metrics.json").read_text())["adapted"]["accuracy"]
    )
    site, weights = tile_site.site(), earlier / "tiles.safetensors"
    result = tesla_med.adapt_site(
        site,
        earlier / "tiles",
        weights=weights,
        out=earlier / "stream",
        device="cpu",
        overrides=TILES,
        resume=True,
    )
    after = table(earlier / "stream")
    same = ("tile", "label", "source_prediction")
    assert [[row[name] for name in same] for row in after] == [[row[name] for name in same] for row in before]
    agreed = sum(a["prediction"] == b["prediction"] for a, b in zip(after, before, strict=True))
    assert agreed >= 16, "processors round differently, but it is the same adaptation"
    assert len(result.results) == 24


def test_tiles_without_records_are_not_rolled_back(earlier):
    with pytest.raises(tesla_med.TeslaMedError, match="holds no records of its tiles; run it again"):
        tesla_med.rollback(earlier / "stream", to_case=0)
    assert (earlier / "stream" / "predictions.csv").is_file()
