"""The first bytes decide whether a NIfTI file is compressed, whatever its name says; a mismatch is noted."""

import gzip

import numpy as np
import pytest
import small_site as small
from small_volumes import blocks, run_whole, write

CASE = 18
SHAPE = (32, 28, 6)
NOTE = "name says otherwise"


@pytest.fixture
def adapted(known_weights, tmp_path):
    """Adapt to the one image below nii/; return its record and its mask."""

    def call():
        overrides = ("site.files.image=[Case*.nii.gz, Case*.nii]",)
        result = run_whole(tmp_path / "nii", known_weights(), tmp_path / "out", overrides=overrides)
        (case,) = result.results
        return case, small.labels(result.out, "Case00")

    return call


def test_an_uncompressed_file_with_a_compressed_name(adapted, tmp_path):
    path = write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE))
    path.write_bytes(gzip.decompress(path.read_bytes()))
    case, mask = adapted()
    assert np.array_equal(mask > 0, blocks(SHAPE) > 0)
    assert any(NOTE in note for note in case.notes)


def test_a_compressed_file_with_an_uncompressed_name(adapted, tmp_path):
    path = write(tmp_path / "nii/Case00.nii.gz", blocks(SHAPE))
    path.rename(path.with_suffix(""))
    case, mask = adapted()
    assert np.array_equal(mask > 0, blocks(SHAPE) > 0)
    assert any(NOTE in note for note in case.notes)


@pytest.mark.parametrize("name", ["Case00.nii.gz", "Case00.nii"])
def test_nothing_is_noted_where_name_and_content_agree(adapted, tmp_path, name):
    write(tmp_path / "nii" / name, blocks(SHAPE))
    case, _ = adapted()
    assert case.notes == ()
