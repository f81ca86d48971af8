"""A series is refused with its shape and the option that chooses one image of it; time is never a channel."""

import re

import nibabel as nib
import numpy as np
import pytest
import small_site as small

CASE = 7
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.fixture
def series(tmp_path):
    """A 4-D file whose third image is a case, the others noise."""
    path = small.make_volumes(tmp_path / "nii", 1)[0]
    image = nib.load(path)
    array = np.array(image.dataobj)  # the file is written over below
    noise = np.random.default_rng(0).integers(0, 100, array.shape).astype(array.dtype)
    stack = np.stack([noise, noise, array, noise, noise], axis=3)
    nib.save(nib.Nifti1Image(stack, image.affine, image.header), path)
    return path, nib.Nifti1Image(array, image.affine, image.header)


def test_a_series_is_refused_with_the_way_out(series, weights, tmp_path):
    path, _ = series
    result = small.run(path.parent, weights, tmp_path / "out")
    assert [item.status for item in result.results] == ["failed"]
    assert re.search(r"series of shape .*5\).*series_image, 0 to 4", result.results[0].reason)
    assert not list((tmp_path / "out").rglob("Case00_mask*"))


def test_one_image_can_be_chosen(series, weights, tmp_path):
    path, image = series
    chosen = small.run(path.parent, weights, tmp_path / "out", overrides=("site.files.series_image=2",))
    assert [item.status for item in chosen.results] in (["ok"], ["empty"])
    mask = nib.load(tmp_path / "out/masks/Case00_mask.nii.gz")
    assert mask.shape == image.shape
    assert np.array_equal(mask.affine, image.affine)
    alone = tmp_path / "alone"
    alone.mkdir()
    nib.save(image, alone / path.name)
    plain = small.run(alone, weights, tmp_path / "plain")
    assert np.array_equal(small.labels(chosen.out, "Case00"), small.labels(plain.out, "Case00"))


def test_a_number_beyond_the_series_is_named(series, weights, tmp_path):
    overrides = ("site.files.series_image=5",)
    (case,) = small.run(series[0].parent, weights, tmp_path / "out", overrides=overrides).results
    assert case.status == "failed"
    assert re.search(r"image 5 asked for.*0 to 4", case.reason)
