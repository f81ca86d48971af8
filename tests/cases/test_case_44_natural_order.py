"""Every command takes cases in natural order of their names, folder by folder: P1, P2, P10; --help and
run.json say so.
"""

import json

import pytest
import small_site as small
import tile_site
from lines import run, write_site

CASE = 44
NAMES = ["P1", "P2", "P3", "P4", "P10"]
SITE = """\
institution: Nowhere
files: {image: 'P*.nii.gz', masks: [{pattern: '*_segmentation.nii.gz', write: 1}]}
"""


@pytest.fixture(params=["files", "folders"])
def names(tmp_path, monkeypatch, request):
    """Make five cases, flat or a folder each, and return their names in order."""
    (tmp_path / "site_configs/prostate").mkdir(parents=True)
    (tmp_path / "site_configs/prostate/X.yaml").write_text(SITE)
    image = small.make_volumes(tmp_path / "made", 1)[0]
    flat = request.param == "files"
    for name in NAMES:
        folder = tmp_path / "nii" if flat else tmp_path / "nii" / name
        folder.mkdir(parents=True, exist_ok=True)
        for end in ("", "_segmentation"):
            (folder / f"{name}{end}.nii.gz").write_bytes(
                image.with_name(f"{image.name[:-7]}{end}.nii.gz").read_bytes()
            )
    monkeypatch.chdir(tmp_path)
    return NAMES if flat else [f"{name}/{name}" for name in NAMES]


def test_runs_and_rollback(tmp_path, names, small_weights, capsys):
    words = ["--site", "X", "--volumes", "nii", "--weights", str(small_weights), "--device", "cpu"]
    texts = (*small.SMALL, *small.FEW, "methods.tesla.weak_views=1", "protocols.N-O.tesla.updates_per_case=1")
    words += [part for text in (*texts, *small.BARE) for part in ("--set", text)]
    assert run(["adapt", *words, "--out", "out", "--method", "bn", "--reset", "site"]) == 0
    record = small.record(tmp_path / "out")
    assert [item["case"] for item in record["cases"]] == names
    assert "P1, P2, P10" in record["order"]
    capsys.readouterr()
    assert run(["rollback", "out", "--to-case", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == names[:4]


def test_check_and_evaluate(names, capsys):
    assert run(["sites", "check", "X", "--volumes", "nii", "--json"]) == 0
    assert [item["case"] for item in json.loads(capsys.readouterr().out)["cases"]] == names
    assert run(["evaluate", "--predictions", "nii", "--references", "nii", "--json"]) == 0
    assert [item["case"] for item in json.loads(capsys.readouterr().out)["cases"]] == names


def test_tiles(tmp_path, capsys):
    tile_site.make_tiles(tmp_path / "tiles", 12, size=16)
    site = write_site(tmp_path, "kather")
    assert run(["sites", "check", site, "--volumes", tmp_path / "tiles", "--json"]) == 0
    found = [item["case"] for item in json.loads(capsys.readouterr().out)["cases"]]
    folders = ("LYM", "NORM", "STR", "TUM")
    assert found == [f"{folder}/{index}.png" for folder in folders for index in range(12)]


@pytest.mark.parametrize("command", ["adapt", "predict", "rollback"])
def test_the_help_says_so(command, capsys):
    assert run([command, "--help"]) == 0
    assert "P1, P2, P10" in " ".join(capsys.readouterr().out.split())
