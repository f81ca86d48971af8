"""A constant image is flagged as blank, not adapted to, and gets an empty mask on its grid."""

import nibabel as nib
import numpy as np
import pytest
import small_site as small

CASE = 11
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_one_value_everywhere(weights, tmp_path, value):
    paths = small.make_volumes(tmp_path / "nii", 2)
    image = nib.load(paths[0])
    array = np.full(image.shape, value, np.float32)
    nib.save(nib.Nifti1Image(array, image.affine), paths[0])
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", save_probs=True)
    assert [item.status == "blank" for item in result.results] == [True, False]
    assert not small.labels(result.out, "Case00").any()
    assert nib.load(result.out / "masks/Case00_mask.nii.gz").shape == image.shape
    assert np.isfinite(np.asarray(nib.load(result.out / "probs/Case00_prob.nii.gz").dataobj)).all()
    assert not (result.out / "checkpoints/Case00.safetensors").exists()
