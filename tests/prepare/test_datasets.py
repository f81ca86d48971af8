"""Reading ahead, batches over a whole site, and how a case is loaded."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import small_site as small
import torch

from tesla_med.config.files import load_pipeline
from tesla_med.config.models import Region
from tesla_med.errors import DataError, GeometryError
from tesla_med.prepare.stream import SiteImages, named_error, read_ahead
from tesla_med.tasks.volumes import Volumes
from tesla_med.types import Failure, Ref, Unit


def case(number):
    return Ref(f"Case{number}", (f"Case{number}",), Path(f"/data/Case{number}.nii.gz"))


def loader(counts, log=None):
    """Load case i with ``counts[i]`` slices, each filled with 100 i + its number; None is blank."""

    def load(item):
        number = int(item.name.removeprefix("Case"))
        if log is not None:
            log.append(number)
        count = counts[number]
        if isinstance(count, BaseException):
            raise count
        images = None
        if count is not None:
            values = 100.0 * number + torch.arange(float(count))
            images = values.view(-1, 1, 1, 1).repeat(1, 1, 2, 3)
        return Unit(item, images, None)

    return load


def values(batches):
    return [batch[:, 0, 0, 0].tolist() for batch in batches]


def slices_of(counts, **options):
    return SiteImages([case(number) for number in range(len(counts))], loader(counts), **options)


@pytest.mark.parametrize("counts", [[3, 2, 4], [1, 1, 1, 1, 1], [9], [2, None, 5], [4, DataError("bad"), 3]])
@pytest.mark.parametrize("size", [1, 2, 4, 100])
def test_batches_cross_cases_in_order(counts, size):
    slices = slices_of(counts)
    expected = [
        100.0 * number + index
        for number, count in enumerate(counts)
        if isinstance(count, int)
        for index in range(count)
    ]
    for _ in range(2):  # the second pass comes from the cache
        batches = values(slices.batches(size))
        assert [value for batch in batches for value in batch] == expected
        assert [len(batch) for batch in batches[:-1]] == [size] * (len(batches) - 1)
        assert 1 <= len(batches[-1]) <= size


def test_nothing_to_batch():
    assert list(SiteImages([], loader([])).batches(4)) == []
    assert list(slices_of([None, DataError("bad")]).batches(4)) == []


def test_cache_limit():
    counts, log = [4, 4, 4], []
    size = 4 * 2 * 3 * 4
    for limit, later in (
        (0, [0, 1, 2]),
        (size, [1, 2]),
        (2 * size, [2]),
        (3 * size, []),
        (2 * size - 1, [1, 2]),
    ):
        slices = SiteImages([case(number) for number in range(3)], loader(counts, log), limit=limit)
        first = values(slices)
        assert log == [0, 1, 2]
        log.clear()
        assert values(slices) == first
        assert sorted(log) == later
        log.clear()


def test_a_pass_that_is_not_finished_does_no_harm():
    slices = slices_of([3, 3, 3])
    next(iter(slices.batches(2)))
    assert [len(batch) for batch in slices.batches(4)] == [4, 4, 1]


def test_failures_are_kept_and_not_tried_again():
    log = []
    error = DataError("bad")
    slices = SiteImages([case(0), case(1)], loader([error, 2], log), limit=0)
    assert values(slices) == values(slices) == [[100.0, 101.0]]
    assert log == [0, 1, 1]
    assert slices.failures["Case0"].error is error


@pytest.mark.parametrize("error", [DataError("bad"), MemoryError("big"), ValueError("bug"), KeyError("k")])
def test_read_ahead_goes_on(error):
    found = list(read_ahead([case(0), case(1), case(2)], loader([1, error, 1])))
    assert [item.ref.name for item in found] == ["Case0", "Case1", "Case2"]
    assert [isinstance(item, Failure) for item in found] == [False, True, False]
    assert found[1].error is error


def test_an_interrupt_is_no_failure():
    with pytest.raises(KeyboardInterrupt):
        list(read_ahead([case(0), case(1)], loader([1, KeyboardInterrupt()])))


def test_read_ahead_is_one_ahead_and_leaves_no_thread():
    log = []
    before = threading.active_count()
    reading = read_ahead([case(number) for number in range(6)], loader([1] * 6, log))
    next(reading)
    next(reading)
    reading.close()
    assert len(log) <= 3
    assert threading.active_count() == before
    assert list(read_ahead([], loader([]))) == []


def test_an_error_names_the_file():
    own = GeometryError("says it all")
    assert named_error("/data/Case1.nii.gz", own) is own
    assert str(named_error("/data/Case1.nii.gz", RuntimeError())) == (
        "/data/Case1.nii.gz: unexpected RuntimeError: no details; --verbose shows where it happened"
    )
    assert "not enough memory" in str(named_error("/data/Case1.nii.gz", MemoryError("4 GiB")))


def loaded(folder, site):
    task = Volumes(site, load_pipeline("prostate", small.SMALL))
    return [task.load(ref) for ref in task.refs(task.find(folder, ()), 0, 1)]


def test_a_case_is_loaded(tmp_path):
    small.make_volumes(tmp_path, 2)
    small.copy_image(tmp_path / "Case01.nii.gz", tmp_path / "Case01.nii.gz", lambda image: image * 0)
    first, blank = loaded(tmp_path, small.site())
    assert first.images.shape == (small.SLICES, 1, 32, 32)
    assert len(first.sha256) == 64
    assert first.content.prepared.labels is None
    assert blank.images is None
    assert blank.content.volume.blank


def test_region_mask_is_read_on_its_own(tmp_path):
    small.make_volumes(tmp_path, 1)
    region = Region(kind="mask", size_mm=60, pattern="*_segmentation.nii.gz", slices="mask")
    (unit,) = loaded(tmp_path, small.site(region=region))
    mask = small.nib.load(tmp_path / "Case00_segmentation.nii.gz").get_fdata()
    assert len(unit.content.prepared.slice_index) == int(np.any(mask, axis=(0, 1)).sum())
    path = tmp_path / "Case00_segmentation.nii.gz"
    small.copy_image(path, path, lambda array: array * 0, dtype=np.uint8)
    with pytest.raises(DataError, match="empty"):
        loaded(tmp_path, small.site(region=region))
