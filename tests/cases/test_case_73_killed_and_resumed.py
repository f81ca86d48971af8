"""A killed run leaves whole files only; --resume does what is missing and ends as an uninterrupted run
would.
"""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import small_site as small
from lines import run, sets, write_site

CASE = 73
STATUS = "killing needs POSIX signals, so it is not tested on Windows"
KILLED = """
import os, runpy, signal, sys
import torch
torch.set_num_threads(1)
def stop(event, arguments):
    if event == "os.rename" and "/masks/Case02" in str(arguments[1]):
        os.truncate(arguments[0], 100)
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(stop)
sys.argv[0] = "tesla-med"
runpy.run_module("tesla_med", run_name="__main__")
"""


LINE = ["adapt", "--site", "X", "--volumes", "nii", "--device", "cpu"]
SETTINGS = sets(*small.SMALL, *small.FEW, *small.BARE)


@pytest.fixture(scope="module")
def killed(small_weights, tmp_path_factory):
    """Five cases, killed while the third mask was half written, and beside it an uninterrupted run."""
    if not hasattr(signal, "SIGKILL"):
        pytest.skip("this system has no SIGKILL")
    folder = tmp_path_factory.mktemp("killed")
    small.make_volumes(folder / "nii", 5)
    write_site(folder)
    words = [*LINE, "--weights", str(small_weights), *SETTINGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run([*words, "--out", "whole"]) == 0
    command = [sys.executable, "-c", KILLED, *words, "--out", "out"]
    done = subprocess.run(command, check=False, cwd=folder)  # noqa: S603
    assert done.returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def out(killed, tmp_path, monkeypatch):
    monkeypatch.chdir(killed)
    return Path(shutil.copytree(killed / "out", tmp_path / "out"))


def resume(out, weights, *more):
    """Resume; return the exit code and the names of the masks that were written."""
    before = states(out)
    code = run([*LINE, "--weights", str(weights), *SETTINGS, "--out", str(out), "--resume", *more])
    return code, sorted(name for name, state in states(out).items() if before.get(name) != state)


def states(out):
    """Return what tells a file from one written later, for each mask."""
    found = {path.name: path.stat() for path in (out / "masks").glob("Case*")}
    return {name: (state.st_ino, state.st_mtime_ns) for name, state in found.items()}


@pytest.mark.slow
def test_only_whole_masks_and_the_same_end(killed, out, small_weights):
    whole = small.masks(killed / "whole")
    before = {name: data for name, data in small.masks(out).items() if ".tmp-" not in name}
    assert sorted(name for name in before if name.startswith("masks/C")) == [
        "masks/Case00_mask.nii.gz",
        "masks/Case01_mask.nii.gz",
    ]
    assert before.items() <= whole.items()
    assert list(out.rglob(".tmp-*"))
    assert not small.record(out)["complete"]
    assert resume(out, small_weights) == (0, [f"Case0{index}_mask.nii.gz" for index in (2, 3, 4)])
    assert small.masks(out) == whole
    assert (out / "report/metrics.csv").read_bytes() == (killed / "whole/report/metrics.csv").read_bytes()
    assert not list(out.rglob(".tmp-*"))
    assert small.record(out)["complete"]


@pytest.mark.slow
def test_a_mask_that_cannot_be_read_is_made_again(killed, out, small_weights):
    small.truncate(out / "masks/Case00_mask.nii.gz")
    assert resume(out, small_weights) == (0, [f"Case0{index}_mask.nii.gz" for index in (0, 2, 3, 4)])
    assert small.masks(out) == small.masks(killed / "whole")


@pytest.mark.slow
def test_other_weights_or_settings_are_refused_by_name(killed, out, small_weights, capsys):
    before = small.files_below(out)
    assert resume(out, small_weights, "--seed", "1") == (2, [])
    assert "settings differ (seed: 0 then, 1 now)" in " ".join(capsys.readouterr().err.split())
    assert resume(out, killed / "whole/checkpoints/Case00.safetensors") == (2, [])
    assert "weights_sha256" in capsys.readouterr().err
    assert small.files_below(out) == before
