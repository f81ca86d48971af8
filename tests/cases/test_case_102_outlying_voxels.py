"""Where a few voxels set the intensity range, check, run and report say so, with both ranges and a remedy."""

import json

import numpy as np
import pytest
import small_site as small
from lines import run, sets, write_site
from small_volumes import noise, write

CASE = 102
SETTINGS = sets(*(*small.SMALL, *small.FEW))


@pytest.fixture
def site(tmp_path):
    return str(write_site(tmp_path))


@pytest.fixture
def told(known_weights, site, tmp_path, capsys):
    """Adapt to a volume; return what check, record and report say of its intensity range."""

    def call(image, *words):
        write(tmp_path / "nii/Case00.nii.gz", image)
        where = ["--volumes", str(tmp_path / "nii")]
        assert run(["sites", "check", site, *where]) == 0
        checked = "".join(capsys.readouterr())
        out = ["--weights", str(known_weights()), "--out", str(tmp_path / "out"), "--device", "cpu"]
        assert run(["adapt", "--site", site, *where, "--method", "source", *out, *SETTINGS, *words]) == 0
        notes = json.loads((tmp_path / "out/run.json").read_text())["cases"][0]["notes"]
        page = (tmp_path / "out/report/report.html").read_text(encoding="utf-8")
        return checked, " ".join(notes), page

    return call


def outlying():
    image = noise((32, 32, 4))
    image[0, 0, 0], image[5, 5, 1] = -32767, 32516
    return image


def test_both_ranges_and_the_remedy(told):
    for text in told(outlying()):
        for words in ("-32767", "32516", "99.8 %", "between 0 and 200", "scaling=percentile"):
            assert words in text


def test_one_remark_a_channel_and_none_without_cause(told):
    assert all("outlying" not in text for text in told(noise((32, 32, 4))))


def test_none_where_percentiles_are_taken(told):
    _, notes, page = told(outlying(), "--set", "preprocessing.intensity.scaling=percentile")
    assert "outlying" not in notes
    assert "outlying" not in page


def test_a_bright_structure_is_not_outlying(told):
    image = noise((32, 32, 4))
    image[10:14, 10:14] = np.int16(1000)  # 1.6 % of the voxels
    assert all("outlying" not in text for text in told(image))
