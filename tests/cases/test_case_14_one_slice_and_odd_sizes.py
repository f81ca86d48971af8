"""A volume of one slice, or of odd sizes, gets a mask of its own shape on its own grid."""

import nibabel as nib
import numpy as np
import pytest
import small_site as small

CASE = 14
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("shape", [(40, 40, 1), (37, 41, 11), (5, 33, 2)])
@pytest.mark.parametrize("size", ["[32,32]", "null"])
def test_any_shape(weights, tmp_path, shape, size):
    (tmp_path / "nii").mkdir()
    array = np.random.default_rng(1).integers(0, 500, shape).astype(np.int16)
    affine = np.diag([1.0, 1.0, 5.0, 1.0])
    nib.save(nib.Nifti1Image(array, affine), tmp_path / "nii" / "Case00.nii.gz")
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", overrides=(f"preprocessing.size={size}",))
    assert result.results[0].status in ("ok", "empty")
    mask = nib.load(tmp_path / "out/masks/Case00_mask.nii.gz")
    assert mask.shape == shape
    assert np.array_equal(mask.affine, affine)
