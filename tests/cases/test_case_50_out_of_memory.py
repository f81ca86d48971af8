"""Where memory runs out a case is repeated with ever fewer slices at once; only if that fails does it
fail, alone.

Half the slices, down to one, then one with results brought to the CPU one by one; the state is put
back before each try.
"""

import contextlib
import threading
from pathlib import Path

import numpy as np
import pytest
import small_site as small
import torch
from small_volumes import diagonal, noise, write

CASE = 50
resource = pytest.importorskip("resource")
SIDE, SLICES, MIB = 640, 8, 350  # of the 700 or so that the network needs for them at once
WHOLE = ("preprocessing.size=null",)


@contextlib.contextmanager
def at_most(mib):
    """Let this process have so much more memory than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def elsewhere():
    """Call a function in a thread of its own: in one in which memory ran out oneDNN makes no kernel again."""

    def call(function):
        kept = []
        thread = threading.Thread(target=lambda: kept.append(function()))
        thread.start()
        thread.join()
        return kept.pop()

    with torch.backends.mkldnn.flags(enabled=torch.backends.mkldnn.is_available()):
        yield call


@pytest.fixture
def volumes(tmp_path):
    """Make a large volume between two small ones."""
    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs to know how much memory the process has")
    for number, shape in enumerate([(32, 32, 4), (SIDE, SIDE, SLICES), (32, 32, 4)]):
        write(tmp_path / f"nii/Case{number:02d}.nii.gz", noise(shape, number), diagonal(1, 1, 3))
    return tmp_path / "nii"


def test_a_case_for_which_memory_does_not_suffice_fails_alone(volumes, small_weights, tmp_path, elsewhere):
    options = {"method": "source", "overrides": WHOLE}

    def short_of_memory():
        with at_most(MIB):
            return small.run(volumes, small_weights, tmp_path / "out", **options)

    result = elsewhere(short_of_memory)
    first, large, last = result.results
    assert {first.status, last.status} <= {"ok", "empty"}
    assert large.status == "failed" or "memory ran out; done with" in large.reason
    if large.status == "failed":
        assert "Case01" in large.reason or "out of memory; tried 8 slices at once" in large.reason
        assert not result.complete
        assert not list(result.out.rglob("*Case01*mask*"))
    (volumes / "Case01.nii.gz").unlink()
    plain = small.run(volumes, small_weights, tmp_path / "plain", **options)
    for case in plain.results:
        assert np.array_equal(*(small.labels(item.out, case.case) for item in (result, plain)))


def test_cases_after_it_are_not_lost_to_onednn(small_weights, tmp_path, elsewhere):
    """So little memory that oneDNN finds none for its kernels; from then on it makes none in that thread."""

    def kernel(channels):
        images = torch.rand(1, channels, 20, 20)
        torch.nn.functional.conv2d(images, torch.rand(8 + channels % 5, channels, 3, 3))

    def use_up_memory():
        with at_most(4):
            for channels in range(1, 300):
                with contextlib.suppress(RuntimeError, MemoryError):
                    kernel(channels)
        with contextlib.suppress(RuntimeError):
            kernel(311)
            return None
        for number in range(3):
            write(tmp_path / f"nii/Case{number:02d}.nii.gz", noise((76, 92, 3), number), diagonal(1, 1, 3))
        return small.run(tmp_path / "nii", small_weights, tmp_path / "out", method="source", overrides=WHOLE)

    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs to know how much memory the process has")
    result = elsewhere(use_up_memory)
    if result is None:
        pytest.skip("oneDNN recovers from a lack of memory here")
    assert {item.status for item in result.results} <= {"ok", "empty"}
