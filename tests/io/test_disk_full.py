"""A mask that does not fit on the disk leaves no file, and the file before it stays."""

import errno
import re

import numpy as np
import pytest
from full_disk import LIMIT, limited
from small_volumes import noise, write

from tesla_med.errors import OutputError
from tesla_med.io.files import write_bytes
from tesla_med.io.space import disk_is_full
from tesla_med.io.volumes import read_volume, write_mask

pytest.importorskip("resource")


def test_a_mask_that_does_not_fit(tmp_path):
    write(tmp_path / "Case00.nii.gz", noise((64, 64, 64)))
    volume = read_volume(tmp_path / "Case00.nii.gz")
    mask = np.random.default_rng(0).integers(0, 3, volume.shape)
    target = tmp_path / "out/Case00_mask.nii.gz"
    with limited(), pytest.raises(OutputError) as error:
        write_mask(target, mask, volume)
    assert re.search(r"[KM]iB needed, \d+\.\d MiB free.*free some space", str(error.value))
    assert str(target) in str(error.value)
    assert list(target.parent.iterdir()) == []
    write_mask(target, mask, volume)
    assert target.stat().st_size > LIMIT


def test_a_mask_that_was_there_stays(tmp_path):
    write(tmp_path / "Case00.nii.gz", noise((64, 64, 64)))
    volume = read_volume(tmp_path / "Case00.nii.gz")
    target = tmp_path / "Case00_mask.nii.gz"
    write_mask(target, np.zeros(volume.shape, np.uint8), volume)
    before = target.read_bytes()
    with limited(), pytest.raises(OutputError):
        write_mask(target, np.random.default_rng(0).integers(0, 3, volume.shape), volume)
    assert target.read_bytes() == before


def test_a_full_disk_is_told_of_in_the_same_way(tmp_path, monkeypatch):
    write(tmp_path / "Case00.nii.gz", noise((16, 16, 4)))
    volume = read_volume(tmp_path / "Case00.nii.gz")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tesla_med.io.files._flush", full)
    with pytest.raises(OutputError, match=r"No space left on device \(\d+ bytes needed, \d+"):
        write_mask(tmp_path / "out/Case00_mask.nii.gz", np.zeros(volume.shape, np.uint8), volume)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(("count", "text"), [(0, "0 bytes"), (900, "900 bytes"), (2500, "2.4 KiB")])
def test_small_files_are_told_in_small_units(tmp_path, monkeypatch, count, text):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tesla_med.io.files._flush", full)
    with pytest.raises(OutputError, match=rf"\({text} needed, ") as caught:
        write_bytes(tmp_path / "a", bytes(count))
    assert disk_is_full(caught.value)
    assert not disk_is_full(OutputError("something else"))
