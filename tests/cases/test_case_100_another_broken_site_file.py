"""A site file that cannot be used stops no run of another site: it is left out with a warning and listed as
broken; what YAML reads as something else than a text is refused with a hint to quote it.
"""

import json
import logging

import pytest
import small_site as small
from lines import run

CASE = 100
SITE = """\
institution: Nowhere
files: {image: 'Case*.nii.gz', masks: [{pattern: '*_segmentation.nii.gz', write: 1}]}
"""
BROKEN = {"id": "institution: Other\nid: 01\n", "syntax": "institution: [Other\n"}


@pytest.fixture(params=BROKEN)
def folder(tmp_path, monkeypatch, request):
    sites = tmp_path / "site_configs/prostate"
    sites.mkdir(parents=True)
    (sites / "X.yaml").write_text(SITE)
    (sites / "Z9.yaml").write_text(BROKEN[request.param])
    small.make_volumes(tmp_path / "nii", 1)
    small.make_volumes(tmp_path / "nii/Z9", 2, seed=7)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    logging.getLogger("tesla_med").handlers.clear()


def test_check_and_list(folder, capsys):
    assert run(["sites", "check", "X", "--volumes", "nii", "--json"]) == 0
    shown = capsys.readouterr()
    assert [case["case"] for case in json.loads(shown.out)["cases"]] == ["Case00"]  # none of Z9's
    assert shown.err.count("Z9.yaml") == 1
    assert run(["sites", "list", "--json"]) == 0
    broken = json.loads(capsys.readouterr().out)["broken"]
    assert [item["file"].rpartition("/")[2] for item in broken] == ["Z9.yaml"]


def test_adapt_and_predict(folder, known_weights, capsys):
    words = ["--site", "X", "--volumes", "nii", "--weights", str(known_weights()), "--device", "cpu"]
    words += ["--set", "model.params.width=4"]
    assert run(["predict", *words, "--set", "reports=[table]"]) == 0
    assert run(["adapt", *words, "--method", "source", "--dry-run"]) == 0
    assert "another site is left out" in capsys.readouterr().err


def test_the_site_itself(folder, capsys):
    assert run(["sites", "show", "Z9"]) == 2
    assert "Z9.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("id: 01\ninstitution: x", "quotes"),
        ("institution: NO", "quotes"),
        ("institution: 2024-01-01", "quotes"),
        ("institution: x\non: 1", "quotes"),
        ("institution: x\ntiles: {NO: 1}", "quotes"),
        ("institution: x\ntiles: {A: 1e3}", "write 1000"),
    ],
)
def test_what_yaml_reads_otherwise(tmp_path, monkeypatch, capsys, text, hint):
    path = tmp_path / "site_configs/prostate/01.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    assert run(["sites", "show", "prostate/01"]) == 2
    assert hint in capsys.readouterr().err
