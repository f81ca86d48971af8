"""A batch of tiles whose update diverges is taken back and counted; a run in which all diverge fails."""

import csv

import numpy as np
import pytest
import small_site as small
import tile_site
from lines import adapt, write_site

CASE = 110
pytestmark = pytest.mark.usefixtures("one_thread")


def test_values_that_are_not_finite_leave_the_source(tmp_path, tile_weights, monkeypatch, capsys):
    """Every batch falls back, which is counted, said, and a failure when it is all of them."""
    tile_site.make_tiles(tmp_path / "nii", 4, seed=3, shift=0.6)
    write_site(tmp_path, "kather")
    monkeypatch.chdir(tmp_path)
    large = "--set", "methods.tesla.learning_rate=1e30"
    assert adapt(tile_weights, *large, pipeline="kather") == 1
    said = "".join(capsys.readouterr())
    assert "not finite" in said
    assert "2 of 2 batches" in said
    with (tmp_path / "out/predictions.csv").open(encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert len(rows) == 16
    assert {row["status"] for row in rows} == {"collapsed"}
    assert all(row["prediction"] == row["source_prediction"] for row in rows)
    assert all(np.isfinite(float(row["entropy"])) for row in rows)
    assert any("2 of 2 batches" in note for note in small.record(tmp_path / "out")["notes"])
    assert not (tmp_path / "out/checkpoints").exists()
