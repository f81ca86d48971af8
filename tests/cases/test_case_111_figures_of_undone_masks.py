"""After a rollback whatever described undone masks is made again or removed, pictures and events too."""

import json

import pytest
import small_site as small

import tesla_med

CASE = 111
pytestmark = pytest.mark.usefixtures("one_thread")
PAGES = ("reports=[table, calibration, quality, html]",)


def predicted(out):
    return json.loads((out / "report/predicted_dice.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.slow
def test_no_figure_of_an_undone_mask_remains(tmp_path, small_weights):
    small.make_volumes(tmp_path / "nii", 3)
    out = tmp_path / "guarded"
    guarded = ("guard.enabled=true", "quality.intercept=0.9", "quality.slope=0.01")
    small.run(tmp_path / "nii", small_weights, out, reports=PAGES, overrides=guarded, reset="case")
    named = {item["case"] for item in predicted(out)}
    undone = set(tesla_med.rollback(out, "source").undone)
    assert undone & named
    assert {item["case"] for item in predicted(out)} == named - undone
    assert (out / "report/predicted_dice.png").exists() == bool(named - undone)
