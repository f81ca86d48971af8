"""A run starts no other process, and importing the package has no side effects: scripts need no main
guard.
"""

import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import small_site as small

CASE = 71
STATUS = "the start method of Windows is tested, Windows itself is not"
TESTS = Path(__file__).resolve().parent.parent
SCRIPT = """
import multiprocessing
multiprocessing.set_start_method("spawn")
import sys
sys.path.insert(0, {tests!r})
import small_site
result = small_site.run({volumes!r}, {weights!r}, {out!r}, method="source")
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
    places = {"volumes": str(tmp_path / "nii"), "weights": str(small_weights), "out": str(tmp_path / "out")}
    (tmp_path / "script.py").write_text(SCRIPT.format(tests=str(TESTS), **places))
    done = subprocess.run(  # noqa: S603
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "cases done: 2\n"), done.stderr


@pytest.mark.parametrize("protocol", ["N-O", "N-M"])
def test_a_run_starts_no_process(small_weights, tmp_path, monkeypatch, protocol):
    def refuse(process):
        raise AssertionError(f"{process} was started")

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    small.make_volumes(tmp_path / "nii", 2)
    result = small.run(tmp_path / "nii", small_weights, tmp_path / "out", protocol=protocol)
    assert not result.failed


def test_importing_the_package_loads_nothing_heavy_and_starts_no_thread(tmp_path):
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "[] 1\n"
    assert not list(tmp_path.iterdir())
