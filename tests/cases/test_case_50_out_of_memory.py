"""Where memory runs out a case is repeated with ever fewer slices at once; only if that fails does it
fail, alone.

Half the slices, down to one, then one with results brought to the CPU one by one; the state is put
back before each try.
"""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import small_site as small
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
def volumes(tmp_path):
    """Make a large volume between two small ones."""
    if not Path("/proc/self/statm").is_file():
        pytest.skip("needs to know how much memory the process has")
    for number, shape in enumerate([(32, 32, 4), (SIDE, SIDE, SLICES), (32, 32, 4)]):
        write(tmp_path / f"nii/Case{number:02d}.nii.gz", noise(shape, number), diagonal(1, 1, 3))
    return tmp_path / "nii"


def test_a_case_for_which_memory_does_not_suffice_fails_alone(volumes, small_weights, tmp_path):
    options = {"method": "source", "overrides": WHOLE}
    with at_most(MIB):
        result = small.run(volumes, small_weights, tmp_path / "out", **options)
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
