"""A link that leads nowhere and a pointer file of git-lfs or git-annex are a failed case or missing reference
named with the remedy, and the exit code is 1.
"""

import json

import pytest
import small_site as small
import tile_site
from lines import run, sets

CASE = 106
ANNEX = "../.git/annex/objects/X1/Zz/MD5E-s123--abc.nii.gz/MD5E-s123--abc.nii.gz"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
KINDS = {
    "link": (lambda path: path.symlink_to("/nowhere/scan.nii.gz"), "which is not there"),
    "annex link": (lambda path: path.symlink_to(ANNEX), "git annex get"),
    "annex pointer": (
        lambda path: path.write_text("/annex/objects/MD5E-s123--abc.nii.gz\n"),
        "git annex get",
    ),
    "lfs": (lambda path: path.write_text(LFS), "git lfs pull"),
}
SITE = """\
institution: Nowhere
files: {image: 'Case*.nii.gz', masks: [{pattern: '*_segmentation.nii.gz', write: 1}]}
"""


@pytest.fixture(params=KINDS)
def absent(request):
    """Put a name without content in place of a file; return the remedy."""
    make, remedy = KINDS[request.param]

    def replace(path):
        path.unlink(missing_ok=True)
        make(path)
        return remedy

    return replace


@pytest.fixture
def words(tmp_path, monkeypatch, known_weights):
    """Make two cases and return the options of a run on them."""
    (tmp_path / "site_configs/prostate").mkdir(parents=True)
    (tmp_path / "site_configs/prostate/X.yaml").write_text(SITE)
    small.make_volumes(tmp_path / "nii", 2)
    monkeypatch.chdir(tmp_path)
    common = ["--site", "X", "--volumes", "nii", "--weights", str(known_weights())]
    return [*common, "--out", "out", "--device", "cpu", *sets("reports=[table]", "model.params.width=4")]


@pytest.mark.parametrize("name", ["Case01.nii.gz", "Case01_segmentation.nii.gz"])
def test_a_run_names_it(tmp_path, words, absent, name, capsys):
    remedy = absent(tmp_path / "nii" / name)
    assert run(["predict", *words]) == 1
    assert remedy in capsys.readouterr().err
    record = small.record(tmp_path / "out")
    assert [item["case"] for item in record["cases"]] == ["Case00", "Case01"]
    assert [item["status"] for item in record["cases"]][1] == ("unscored" if "seg" in name else "failed")
    assert run(["sites", "check", "X", "--volumes", "nii", "--json"]) == 1
    problems = [item["problems"] for item in json.loads(capsys.readouterr().out)["cases"]]
    assert problems[0] == []
    assert remedy in problems[1][0]


def test_evaluate_names_it(tmp_path, words, absent, capsys):
    remedy = absent(tmp_path / "nii/Case01_segmentation.nii.gz")
    assert run(["evaluate", "--predictions", "nii", "--references", "nii"]) == 1
    shown = capsys.readouterr().err
    assert "Case01" in shown
    assert remedy in shown


def test_tiles_and_weights(tmp_path, absent, capsys):
    tile_site.make_tiles(tmp_path / "tiles", 1)
    remedy = absent(tmp_path / "tiles/TUM/0.png")
    absent(tmp_path / "w.safetensors")
    (tmp_path / "T.yaml").write_text("institution: Nowhere\ntiles: {TUM: 0, STR: 1}\n")
    site = ["--site", str(tmp_path / "T.yaml"), "--volumes", str(tmp_path / "tiles")]
    (tmp_path / "kather").mkdir()
    (tmp_path / "T.yaml").rename(tmp_path / "kather/T.yaml")
    site[1] = str(tmp_path / "kather/T.yaml")
    assert run(["sites", "check", site[1], *site[2:]]) == 1
    assert run(["predict", *site, "--weights", str(tmp_path / "w.safetensors"), "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert "TUM/0.png" in shown.out
    assert remedy in shown.err


def test_a_folder_of_dicom_slices(tmp_path, words, absent, capsys):
    folder = tmp_path / "dicom/P1"
    folder.mkdir(parents=True)
    remedy = absent(folder / "IM1.dcm")
    assert run(["sites", "check", "X", "--volumes", "dicom"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert remedy.split()[0] in shown
