from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tile_site
from sklearn.metrics import log_loss

from tesla_med.cli.app import run as run_cli
from tesla_med.errors import DataError
from tesla_med.scoring.tables import evaluate_tiles, is_tile_table

CLASSES = ("tumour", "stroma", "lymphocytes")
HEAD = ["tile", "label", "prediction", "source_prediction", "entropy", *(f"p_{name}" for name in CLASSES)]
ROWS = [
    ["TUM/a.png", "tumour", "tumour", "stroma", "0.7", "0.7", "0.2", "0.1"],
    ["TUM/b.png", "tumour", "stroma", "stroma", "0.8", "0.3", "0.6", "0.1"],
    ["STR/c.png", "stroma", "stroma", "stroma", "0.5", "0.1", "0.8", "0.1"],
    ["STR/d.png", "stroma", "stroma", "tumour", "0.4", "0.0", "0.9", "0.1"],
]


def table(path: Path, rows=ROWS, head=HEAD) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as handle:
        csv.writer(handle).writerows([head, *rows])
    return path


def changed(row: int, column: str, text: str):
    rows = [list(item) for item in ROWS]
    rows[row][HEAD.index(column)] = text
    return rows


def test_figures_by_hand(tmp_path):
    result = evaluate_tiles(table(tmp_path / "predictions.csv"), out=tmp_path / "scores")
    assert result.coverage == "scored 4 of 4 tiles"
    adapted, source = result.adapted, result.source
    assert adapted.accuracy == 0.75
    assert adapted.error == 0.25
    assert adapted.accuracy_by_class == (0.5, 1.0, None)
    assert adapted.mean_class_accuracy == 0.75
    assert adapted.confusion == ((1, 1, 0), (0, 2, 0), (0, 0, 0))
    probs = np.array([row[-3:] for row in ROWS], float)
    truth = np.eye(3)[[0, 0, 1, 1]]
    assert adapted.brier == pytest.approx(((probs - truth) ** 2).sum(1).mean(), abs=1e-6)
    assert adapted.nll == pytest.approx(log_loss([0, 0, 1, 1], probs, labels=[0, 1, 2]), abs=1e-5)
    # one tile a bin: |confidence - right| of each
    assert adapted.ece == pytest.approx((0.3 + 0.6 + 0.2 + 0.1) / 4, abs=1e-6)
    assert source.accuracy == 0.25
    assert source.confusion == ((0, 2, 0), (1, 1, 0), (0, 0, 0))
    assert source.brier is None
    written = json.loads((tmp_path / "scores" / "summary.json").read_text())
    assert written["adapted"]["accuracy"] == 0.75
    with (tmp_path / "scores" / "metrics.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert [row["class"] for row in rows] == list(CLASSES)
    assert [row["right"] for row in rows] == ["1", "2", "0"]
    assert rows[2]["accuracy"] == ""


@pytest.mark.slow
def test_agrees_with_the_run(tmp_path):
    weights = tile_site.train_weights(tmp_path / "trained")
    tile_site.make_tiles(tmp_path / "tiles", 4, seed=3, shift=0.5)
    result = tile_site.adapt_tiles(
        tile_site.site(),
        tmp_path / "tiles",
        weights=weights,
        out=tmp_path / "run",
        method="bn",
        device="cpu",
        overrides=("reports=[table]",),
    )
    figures = json.loads((result.out / "report" / "metrics.json").read_text())
    by_folder = evaluate_tiles(result.out, tmp_path / "tiles")
    assert by_folder == evaluate_tiles(result.out / "predictions.csv")
    for name in ("accuracy", "error", "mean_class_accuracy"):
        assert getattr(by_folder.adapted, name) == pytest.approx(figures["adapted"][name])
        assert getattr(by_folder.source, name) == pytest.approx(figures["source"][name])
    for name in ("ece", "brier", "nll"):
        assert getattr(by_folder.adapted, name) == pytest.approx(figures["adapted"][name], abs=1e-4)
    assert [list(row) for row in by_folder.adapted.confusion] == figures["adapted"]["confusion"]


def test_labels_from_a_folder_or_a_table(tmp_path):
    rows = [[Path(row[0]).name, "", *row[2:]] for row in ROWS]
    path = table(tmp_path / "predictions.csv", rows)
    for row in ROWS[:3]:
        folder = tmp_path / "labelled" / row[1]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / Path(row[0]).name).write_bytes(b"")
    (tmp_path / "labelled" / "tumour" / "extra.png").write_bytes(b"")
    found = evaluate_tiles(path, tmp_path / "labelled")
    assert found.scored == 3
    assert found.only_predictions == ("d.png",)
    assert found.only_references == ("tumour/extra.png",)
    labels = table(tmp_path / "labels.csv", [[row[0], row[1]] for row in ROWS], ["tile", "label"])
    assert evaluate_tiles(path, labels).adapted.accuracy == 0.75
    with pytest.raises(DataError, match=r"strict.*1 without a label \(d.png\).*1 not in it"):
        evaluate_tiles(path, tmp_path / "labelled", strict=True)
    with pytest.raises(DataError, match="no tile has both"):
        evaluate_tiles(path)
    (tmp_path / "other" / "spleen").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no sub-folder of a class; expected tumour.*found spleen"):
        evaluate_tiles(path, tmp_path / "other")
    unknown = table(tmp_path / "unknown.csv", [["a.png", "spleen"]], ["tile", "label"])
    with pytest.raises(DataError, match=r"unknown.csv, line 2.*'spleen' is not a class"):
        evaluate_tiles(path, unknown)


def test_names_that_are_not_unique_do_not_meet(tmp_path):
    rows = [["x/a.png", "", *ROWS[0][2:]], ["y/a.png", "", *ROWS[1][2:]], ["b.png", "", *ROWS[2][2:]]]
    labels = table(
        tmp_path / "labels.csv", [["TUM/a.png", "tumour"], ["STR/b.png", "stroma"]], ["tile", "label"]
    )
    found = evaluate_tiles(table(tmp_path / "predictions.csv", rows), labels)
    assert found.only_predictions == ("x/a.png", "y/a.png")
    assert found.only_references == ("TUM/a.png",)


def test_tiles_that_could_not_be_read(tmp_path):
    rows = [*ROWS, ["TUM/e.png", "tumour", "", "", "", "", "", ""]]
    result = evaluate_tiles(table(tmp_path / "predictions.csv", rows))
    assert result.unread == ("TUM/e.png",)
    assert (result.tiles, result.scored) == (5, 4)


@pytest.mark.parametrize(
    ("rows", "head", "text"),
    [
        ([row[:1] + row[2:] for row in ROWS], ["id", *HEAD[2:]], "column tile missing; expected tile, pred"),
        ([row[:5] for row in ROWS], HEAD[:5], "columns of probabilities missing"),
        ([[row[0], *row[2:]] for row in ROWS], ["tile", *HEAD[2:]], "column label missing"),
        (changed(1, "p_stroma", "0.9"), HEAD, r"line 3, tile 'TUM/b.png': probabilities sum to 1.3"),
        (changed(1, "p_stroma", "-0.6"), HEAD, r"must lie in \[0, 1\]"),
        (changed(1, "p_stroma", "nan"), HEAD, r"must lie in \[0, 1\]"),
        (changed(1, "p_stroma", "much"), HEAD, "must be numbers"),
        (changed(1, "p_stroma", ""), HEAD, "must be numbers"),
        (
            changed(2, "label", "spleen"),
            HEAD,
            "line 4.*label 'spleen' is not a class; expected one of tumour",
        ),
        (changed(2, "prediction", "spleen"), HEAD, "prediction 'spleen' is not a class"),
        (changed(2, "source_prediction", "spleen"), HEAD, "source_prediction 'spleen' is not a class"),
        (changed(1, "tile", "TUM/a.png"), HEAD, "tile 'TUM/a.png' occurs more than once"),
        ([*ROWS, ["TUM/e.png", "tumour"]], HEAD, "line 6: expected 8 cells"),
        ([], HEAD, "no row below"),
    ],
)
def test_what_is_refused(tmp_path, rows, head, text):
    with pytest.raises(DataError, match=text) as caught:
        evaluate_tiles(table(tmp_path / "predictions.csv", rows, head))
    assert "predictions.csv" in str(caught.value)


def test_files_that_are_no_table(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        evaluate_tiles(tmp_path / "none.csv")
    (tmp_path / "odd.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not a CSV file"):
        evaluate_tiles(tmp_path / "odd.csv")


def test_the_command(tmp_path, capsys):
    path = table(tmp_path / "run" / "predictions.csv")
    assert is_tile_table(path)
    assert is_tile_table(path.parent)
    assert not is_tile_table(tmp_path)
    assert run_cli(["evaluate", "--predictions", str(path.parent)]) == 0
    shown = capsys.readouterr().out
    assert "scored 4 of 4 tiles" in shown
    assert "25.0" in shown
    assert "75.0" in shown
    assert run_cli(["evaluate", "--predictions", str(path), "--json", "--out", str(tmp_path / "s")]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["adapted"]["accuracy"] == 0.75
    assert (tmp_path / "s" / "summary.json").is_file()
    table(path, [*ROWS, ["TUM/e.png", "tumour", *[""] * 6]])
    assert run_cli(["evaluate", "--predictions", str(path)]) == 1
    assert "1 without a prediction: TUM/e.png" in capsys.readouterr().err
    assert run_cli(["evaluate", "--predictions", str(path), "--strict"]) == 2
    shutil.rmtree(path.parent)
    path.parent.mkdir()
    assert run_cli(["evaluate", "--predictions", str(path.parent)]) == 2
    assert "--references is needed" in capsys.readouterr().err
