"""A watched folder: every case is done once, as ``adapt`` would, whatever happens meanwhile."""

from __future__ import annotations

import json
import shutil

import pytest
import small_site as small
import yaml

from tesla_med.cli.app import run

QUICK = ["--once", "--settle", "0", "--poll", "0.01"]


def sets(*texts):
    return [word for text in texts for word in ("--set", text)]


@pytest.fixture(scope="module")
def made(one_thread, tmp_path_factory):
    """Five images without references, weights, and what ``adapt`` makes of them."""
    folder = tmp_path_factory.mktemp("watch")
    weights = small.train_weights(folder)
    small.make_volumes(folder / "nii", 5)
    for path in (folder / "nii").glob("*_segmentation.nii.gz"):
        path.unlink()
    small.run(folder / "nii", weights, folder / "adapted", overrides=("report.max_cases_with_overlays=0",))
    return folder, weights


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """An empty folder to be watched, beside the configuration of site X."""
    folder, weights = made
    content = small.site().model_dump(mode="json", exclude={"id", "pipeline"}, exclude_defaults=True)
    target = tmp_path / "site_configs" / "prostate" / "X.yaml"
    target.parent.mkdir(parents=True)
    target.write_text(yaml.safe_dump(content), encoding="utf-8")
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path)

    def watch(*more, quick=QUICK):
        texts = (*small.SMALL, *small.FEW, *small.BARE, "report.max_cases_with_overlays=0")
        words = ["watch", "in", "--site", "X", "--weights", str(weights), "--device", "cpu", "--out", "out"]
        return run([*words, *quick, *sets(*texts), *more])

    watch.images = sorted((folder / "nii").glob("Case*.nii.gz"))
    watch.adapted = folder / "adapted"
    return watch


def masks(out):
    """Return the masks and source masks of all cases by the names that one run on all would give them."""
    found = {}
    for part in ("masks", "source_masks"):
        for path in (out / "cases").rglob(f"{part}/*_mask.nii.gz"):
            found[f"{part}/{path.name}"] = path.read_bytes()
    return found


def expected(adapted):
    return {name: data for name, data in small.masks(adapted).items() if name.endswith(".nii.gz")}


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*_mask.nii.gz")}


def test_every_case_once_as_adapt_does(place, tmp_path, capsys):
    for path in place.images[:3]:
        shutil.copy(path, tmp_path / "in")
    assert place() == 0, capsys.readouterr()
    before = times(tmp_path / "out")
    assert len(before) == 6
    for path in place.images[3:]:
        shutil.copy(path, tmp_path / "in")
    assert place("--json") == 0
    told = (
        json.loads(capsys.readouterr().out.partition("{")[1] + capsys.readouterr().out or "{}") if 0 else None
    )
    assert told is None
    assert masks(tmp_path / "out") == expected(place.adapted)
    assert {path: when for path, when in times(tmp_path / "out").items() if path in before} == before
