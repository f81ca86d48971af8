"""A user without a name, as in a container under any number, can do everything: what libraries need of it
when they are imported is seen to at the start.
"""

import os
import subprocess
import sys

import pytest
import small_site as small

CASE = 97
START = """
import pwd, sys

def nobody(number):
    raise KeyError(f"getpwuid(): uid not found: {number}")

pwd.getpwuid = nobody
"""
PROGRAM = "import runpy; runpy.run_module('tesla_med', run_name='__main__', alter_sys=True)"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows names every user")


def without_a_name(code, *words):
    """Run Python without a name, and without a home."""
    names = ("USER", "LOGNAME", "LNAME", "USERNAME", "HOME")
    kept = {key: value for key, value in os.environ.items() if key not in names}
    command = [sys.executable, "-c", START + code, *map(str, words)]
    return subprocess.run(command, env=kept, capture_output=True, text=True, check=False)  # noqa: S603


def test_a_name_is_given_at_the_start():
    assert "uid not found" in without_a_name("import getpass; getpass.getuser()").stderr
    done = without_a_name("import tesla_med, getpass; print(getpass.getuser())")
    assert done.stdout.startswith("uid-"), done.stderr


def test_a_name_that_is_known_stays(monkeypatch):
    monkeypatch.setenv("USER", "somebody")
    code = "import tesla_med, os; print(os.environ.get('USER'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "somebody"


@pytest.mark.slow
def test_commands(tmp_path):
    weights = small.train_weights(tmp_path)
    small.make_volumes(tmp_path / "nii", 1)
    (tmp_path / "prostate").mkdir()
    (tmp_path / "prostate/X.yaml").write_text(
        "institution: Nowhere\n"
        "files: {image: 'Case*.nii.gz', masks: [{pattern: '*_segmentation.nii.gz', write: 1}]}\n"
    )
    site, out = tmp_path / "prostate/X.yaml", tmp_path / "out"
    common = ["--volumes", tmp_path / "nii", "--device", "cpu"]
    texts = [word for text in (*small.SMALL, *small.FEW) for word in ("--set", text)]
    lines = (
        ["adapt", "--site", site, *common, "--weights", weights, "--out", out, *texts],
        ["evaluate", "--predictions", out, "--references", tmp_path / "nii"],
        [
            "train",
            "--pipeline",
            "prostate",
            "--sites",
            site,
            *common,
            "--out",
            tmp_path / "t",
            "--steps",
            1,
            *texts,
        ],
    )
    for words in lines:
        done = without_a_name(
            "import runpy; runpy.run_module('tesla_med', run_name='__main__', alter_sys=True)", *words
        )
        assert done.returncode == 0, done.stderr
