"""The first bytes decide whether a NIfTI file is compressed, whatever its name says; a mismatch is noted."""

import gzip

import numpy as np
import small_site as small

from tesla_med.io.volumes import read_volume

CASE = 18


def test_an_uncompressed_file_with_a_compressed_name(tmp_path):
    path = small.make_volumes(tmp_path, 1)[0]
    want = read_volume(path)
    path.write_bytes(gzip.decompress(path.read_bytes()))
    volume = read_volume(path)
    assert np.array_equal(volume.array, want.array)
    assert len(volume.notes) > len(want.notes)


def test_a_compressed_file_with_an_uncompressed_name(tmp_path):
    path = small.make_volumes(tmp_path, 1)[0]
    want = read_volume(path)
    other = tmp_path / "image.nii"
    other.write_bytes(path.read_bytes())
    volume = read_volume(other)
    assert np.array_equal(volume.array, want.array)
    assert len(volume.notes) > len(want.notes)
