"""A leading ``~`` stands for the home folder in every path: options, arguments, YAML files and functions."""

import pytest
import small_site as small
from lines import run, sets

import tesla_med

CASE = 104
SITE = """\
institution: Nowhere
weights: ~/weights/source.safetensors
files: {image: 'Case*.nii.gz', masks: [{pattern: '*_segmentation.nii.gz', write: 1}]}
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Make a home folder with a site, and work elsewhere."""
    folder = tmp_path / "home"
    (folder / "site_configs/prostate").mkdir(parents=True)
    (folder / "site_configs/prostate/X.yaml").write_text(SITE)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    return folder


def test_predict_and_evaluate(home, tmp_path, known_weights):
    small.make_volumes(home / "nii", 1)
    (home / "weights").mkdir()
    known_weights().rename(home / "weights/source.safetensors")
    words = ["--volumes=~/nii", "--out=~/runs/x", "--device", "cpu"]
    words += sets("reports=[table]", "model.params.width=4")
    assert (
        run(
            [
                "predict",
                "--site",
                "~/site_configs/prostate/X.yaml",
                "--weights=~/weights/source.safetensors",
                *words,
            ]
        )
        == 0
    )
    assert (home / "runs/x/run.json").is_file()
    assert run(["evaluate", "--predictions=~/runs/x", "--references=~/nii", "--out=~/scores"]) == 0
    assert (home / "scores/metrics.csv").is_file()
    assert list((tmp_path / "work").iterdir()) == []


def test_weights_in_a_site_file_and_a_search_path(home, monkeypatch, known_weights):
    small.make_volumes(home / "nii", 1)
    (home / "weights").mkdir()
    known_weights().rename(home / "weights/source.safetensors")
    monkeypatch.setenv("TESLA_MED_CONFIG_PATH", "~")
    words = ["--volumes", "~/nii", "--method", "source", "--device", "cpu", "--dry-run"]
    words += sets("model.params.width=4")
    assert run(["adapt", "--site", "prostate/X", *words]) == 0


def test_python_takes_the_same_paths(home, known_weights):
    small.make_volumes(home / "nii", 1)
    known_weights().rename(home / "known.safetensors")
    given = {"out": "~/out", "device": "cpu", "overrides": ["model.params.width=4"]}
    result = tesla_med.predict("~/nii", "~/known.safetensors", pipeline="prostate", **given)
    assert result.out == home / "out"


def test_a_folder_that_is_called_so(home, tmp_path):
    small.make_volumes(tmp_path / "work/~/nii", 1)
    assert run(["evaluate", "--predictions", "./~/nii", "--references", "./~/nii"]) == 0
    assert run(["evaluate", "--predictions", "~/nii", "--references", "~/nii"]) == 2


def test_a_home_that_is_not_known(home, capsys):
    assert run(["evaluate", "--predictions", "~nobody-of-this-name/x", "--references", "~"]) == 2
    assert "home folder" in capsys.readouterr().err
