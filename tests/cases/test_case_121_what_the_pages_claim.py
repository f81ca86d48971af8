"""What the pages claim of commands and functions is so: standard output, exits, the ways to name a site."""

import json

import pytest
import small_site as small
from lines import run, sets, write_site

import tesla_med

CASE = 121
SETTINGS = (*small.SMALL, *small.FEW, *small.BARE)


@pytest.fixture
def site(tmp_path):
    small.make_volumes(tmp_path / "nii", 2)
    return str(write_site(tmp_path))


def test_the_function_prints_nothing_on_standard_output_and_does_not_exit(
    site, small_weights, tmp_path, capsys
):
    (tmp_path / "nii/Case00.nii.gz").write_bytes(b"no image")
    out = tmp_path / "out"
    given = {"weights": small_weights, "out": out, "device": "cpu", "overrides": SETTINGS}
    result = tesla_med.adapt_site(site, tmp_path / "nii", **given)
    assert [item.status == "failed" for item in result.results] == [True, False]
    assert capsys.readouterr().out == ""


def test_a_mask_can_be_put_back_by_the_command_that_is_named(site, small_weights, tmp_path):
    words = ["--site", site, "--volumes", str(tmp_path / "nii"), "--weights", str(small_weights)]
    settings = sets(*SETTINGS)
    out = str(tmp_path / "out")
    assert run(["adapt", *words, "--out", out, "--reset", "case", "--device", "cpu", *settings]) == 0
    assert run(["rollback", out, "--case", "Case01"]) == 0
    used = {
        case["case"]: case["used"] for case in json.loads((tmp_path / "out/run.json").read_text())["cases"]
    }
    assert used == {"Case00": "adapted", "Case01": "source"}


def test_compare_takes_the_path_of_a_site(site, small_weights, tmp_path):
    words = ["--pipeline", "prostate", "--sites", site, "--volumes", str(tmp_path / "nii")]
    settings = sets(*SETTINGS)
    given = ["--weights", str(small_weights), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert run(["compare", *words, "--methods", "source", "--seeds", "1", *given, *settings]) == 0
    assert (tmp_path / "out/comparison.csv").read_text().count("Case0") == 2
