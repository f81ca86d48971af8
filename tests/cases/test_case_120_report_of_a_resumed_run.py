"""The report of a resumed run equals that of an uninterrupted one, pictures of earlier cases included."""

import re

import pytest
import small_site as small
from events import values
from lines import adapt, write_site
from moments import ctrl_c

CASE = 120
pytestmark = pytest.mark.usefixtures("one_thread")
DRAWN = {"reports": "[html, tensorboard]"}
LINE = (
    "--method",
    "source",
    "--set",
    "report.max_cases_with_overlays=3",
    "--set",
    "report.overlays_per_case=1",
)


def page(out):
    """Return the page without what depends on the clock."""
    return re.sub(r"\d+\.\d s\b", "", (out / "report/report.html").read_text(encoding="utf-8"))


def pictures(out):
    return {
        (tag, step): value.image.encoded_image_string
        for tag, step, value in values(out)
        if value.image.encoded_image_string
    }


def test_pictures_are_drawn_again(tmp_path, known_weights, monkeypatch):
    small.make_volumes(tmp_path / "nii", 2)
    write_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    weights = known_weights()
    assert adapt(weights, *LINE, out="whole", **DRAWN) == 0
    with ctrl_c("/masks/Case01"):
        assert adapt(weights, *LINE, **DRAWN) == 130
    assert adapt(weights, *LINE, "--resume", **DRAWN) == 0
    assert page(tmp_path / "whole").count("data:image/jpeg") >= 2
    assert page(tmp_path / "out") == page(tmp_path / "whole")
    names = {name for name, _ in pictures(tmp_path / "whole")}
    assert names == {"overlay/Case00", "overlay/Case01", "all_cases/dice"}
    assert pictures(tmp_path / "out") == pictures(tmp_path / "whole")
