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

from tesla_med.errors import OutputError
from tesla_med.tasks import volumes as volumes_module

CASE = 73
STATUS = "killing needs POSIX signals, so it is not tested on Windows"
TESTS = Path(__file__).resolve().parent.parent
KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
torch.set_num_threads(1)
import small_site as small
original = Path.replace
def replace(path, target):
    if target.parent.name == "masks" and target.name.startswith("Case02"):
        path.write_bytes(path.read_bytes()[:100])
        os.kill(os.getpid(), signal.SIGKILL)
    return original(path, target)
Path.replace = replace
small.run({volumes!r}, {weights!r}, {out!r})
"""


@pytest.fixture(scope="module")
def killed(small_weights, tmp_path_factory):
    """Five cases, killed while the third mask was half written, and beside it an uninterrupted run."""
    if not hasattr(signal, "SIGKILL"):
        pytest.skip("this system has no SIGKILL")
    folder = tmp_path_factory.mktemp("killed")
    small.make_volumes(folder / "nii", 5)
    small.run(folder / "nii", small_weights, folder / "whole")
    places = {"volumes": str(folder / "nii"), "weights": str(small_weights), "out": str(folder / "out")}
    script = KILLED.format(tests=str(TESTS), **places)
    done = subprocess.run([sys.executable, "-c", script], check=False)  # noqa: S603
    assert done.returncode == -signal.SIGKILL
    return folder


@pytest.fixture
def out(killed, tmp_path):
    return Path(shutil.copytree(killed / "out", tmp_path / "out"))


@pytest.fixture
def written(monkeypatch):
    """Names of the masks that a run writes."""
    names, original = [], volumes_module.encode_mask

    def write(path, mask, volume):
        if "source_masks" not in path.parts:
            names.append(path.name)
        return original(path, mask, volume)

    monkeypatch.setattr(volumes_module, "encode_mask", write)
    return names


@pytest.mark.slow
def test_only_whole_masks_and_the_same_end(killed, out, small_weights, written):
    whole = small.masks(killed / "whole")
    before = {name: data for name, data in small.masks(out).items() if ".tmp-" not in name}
    assert sorted(name for name in before if name.startswith("masks/C")) == [
        "masks/Case00_mask.nii.gz",
        "masks/Case01_mask.nii.gz",
    ]
    assert before.items() <= whole.items()
    assert list(out.rglob(".tmp-*"))
    assert not small.record(out)["complete"]
    small.run(killed / "nii", small_weights, out, resume=True)
    assert written == [f"Case0{index}_mask.nii.gz" for index in (2, 3, 4)]
    assert small.masks(out) == whole
    assert (out / "report/metrics.csv").read_bytes() == (killed / "whole/report/metrics.csv").read_bytes()
    assert not list(out.rglob(".tmp-*"))
    assert small.record(out)["complete"]


@pytest.mark.slow
def test_a_mask_that_cannot_be_read_is_made_again(killed, out, small_weights, written):
    small.truncate(out / "masks/Case00_mask.nii.gz")
    small.run(killed / "nii", small_weights, out, resume=True)
    assert written == [f"Case0{index}_mask.nii.gz" for index in (0, 2, 3, 4)]
    assert small.masks(out) == small.masks(killed / "whole")


@pytest.mark.slow
def test_other_weights_or_settings_are_refused_by_name(killed, out, small_weights, tmp_path, written):
    before = small.files_below(out)
    with pytest.raises(OutputError, match=r"settings differ \(seed: 0 then, 1 now\)"):
        small.run(killed / "nii", small_weights, out, resume=True, seed=1)
    trained = killed / "whole/checkpoints/Case00.safetensors"
    with pytest.raises(OutputError, match=r"weights_sha256"):
        small.run(killed / "nii", trained, out, resume=True)
    assert small.files_below(out) == before
    assert written == []
