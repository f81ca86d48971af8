"""Where both masks are empty Dice is n/a, counted and left out of means; on request it is 1, never 0."""

import csv
import json

import numpy as np
import pytest
from lines import run
from small_volumes import blocks, diagonal, run_whole, write

CASE = 55
SHAPE = (16, 16, 8)
NOTHING = np.zeros(SHAPE, np.uint8)


@pytest.fixture
def folders(tmp_path):
    """One case where both are empty, one that agrees."""
    for folder in ("masks", "references"):
        write(tmp_path / folder / "Case00.nii.gz", NOTHING, diagonal(1, 1, 3))
        write(tmp_path / folder / "Case01.nii.gz", (blocks(SHAPE) > 0).astype(np.uint8), diagonal(1, 1, 3))
    return tmp_path


def scored(folder, *more):
    """Run evaluate with labels.json, so that the class is known where it is absent."""
    labels = [{"value": 0, "name": "background"}, {"value": 1, "name": "prostate"}]
    (folder / "masks/labels.json").write_text(json.dumps({"labels": labels}))
    places = (
        "--predictions",
        folder / "masks",
        "--references",
        folder / "references",
        "--out",
        folder / "out",
    )
    assert run(["evaluate", *map(str, places), *more]) == 0
    with (folder / "out/metrics.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    return rows, json.loads((folder / "out/summary.json").read_text())


def test_the_figures_of_a_run_do_not_exist(known_weights, tmp_path):
    write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE))
    write(tmp_path / "nii/Case00_segmentation.nii.gz", NOTHING)
    result = run_whole(tmp_path / "nii", known_weights(empty=True), tmp_path / "out")
    (score,) = result.results[0].scores
    assert (score.dice, score.dice_source, score.hd95_mm, score.assd_mm) == (None,) * 4
    assert score.value("nsd") is None
    assert result.mean_dice is None
    with (result.out / "report/metrics.csv").open(newline="") as stream:
        (row,) = csv.DictReader(stream)
    assert [row[name] for name in ("dice", "dice_source", "hd95_mm", "assd_mm")] == [""] * 4


def test_evaluate_shows_it_as_not_applicable_and_counts_it(folders, capsys):
    rows, summary = scored(folders)
    assert [row["dice"] for row in rows] == ["", "1"]
    assert (summary["empty"], summary["classes"][0]["not_applicable"]) == ("skip", 1)
    assert (summary["classes"][0]["dice_mean"], summary["classes"][0]["cases"]) == (1.0, 2)
    line = next(line for line in capsys.readouterr().out.splitlines() if "Case00" in line)
    assert "n/a" in line


def test_evaluate_counts_it_as_one_on_request(folders):
    rows, summary = scored(folders, "--empty", "one")
    assert [row["dice"] for row in rows] == ["1", "1"]
    assert (summary["empty"], summary["classes"][0]["not_applicable"]) == ("one", 1)


def test_another_rule_is_refused(folders, capsys):
    places = ("--predictions", folders / "masks", "--references", folders / "references")
    assert run(["evaluate", *map(str, places), "--empty", "zero"]) == 2
    assert "skip, one" in capsys.readouterr().err
