"""A run starts no other process, and importing the package has no side effects: scripts need no main
guard.
"""

import multiprocessing
import subprocess
import sys

import pytest
import small_site as small
from lines import adapt, work_there, write_site

CASE = 71
STATUS = "the start method of Windows is tested, Windows itself is not"
SCRIPT = """
import multiprocessing
multiprocessing.set_start_method("spawn")
import tesla_med
result = tesla_med.adapt_site("prostate/X", "nii", out="out", method="source", device="cpu", **{given!r})
print("cases done:", len(result.results))
"""
IMPORTED = """
import sys, threading
before = set(sys.modules)
import tesla_med
heavy = {"torch", "monai", "nibabel", "SimpleITK", "multiprocessing"} & (set(sys.modules) - before)
print(sorted(heavy), threading.active_count())
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once(small_weights, tmp_path):
    small.make_volumes(tmp_path / "nii", 2)
    write_site(tmp_path)
    given = {"weights": str(small_weights), "overrides": [*small.SMALL, *small.BARE]}
    (tmp_path / "script.py").write_text(SCRIPT.format(given=given))
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "cases done: 2\n"), done.stderr


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_a_run_starts_no_process(small_weights, tmp_path, monkeypatch, protocol):
    def refuse(process):
        raise AssertionError(f"{process} was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    work_there(tmp_path, monkeypatch, 2)
    assert adapt(small_weights, "--protocol", protocol) == 0


def test_importing_the_package_loads_nothing_heavy_and_starts_no_thread(tmp_path):
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "[] 1\n"
    assert not list(tmp_path.iterdir())
