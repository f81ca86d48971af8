"""A reference with corners within 0.1 mm of the image's is used; one further off is refused with the
distance.
"""

import nibabel as nib
import numpy as np
import pytest
import small_site as small

CASE = 33
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def weights(one_thread, tmp_path_factory):
    return small.train_weights(tmp_path_factory.mktemp("small"))


@pytest.mark.parametrize(("shift", "status"), [(1e-6, "scored"), (0.05, "scored"), (0.3, "unscored")])
def test_a_reference_beside_the_grid(weights, tmp_path, shift, status):
    image = small.make_volumes(tmp_path / "nii", 1)[0]
    path = image.with_name("Case00_segmentation.nii.gz")
    label = nib.load(path)
    affine = label.affine.copy()
    affine[0, 3] += shift
    nib.save(nib.Nifti1Image(np.array(label.dataobj), affine), path)
    result = small.run(tmp_path / "nii", weights, tmp_path / "out", method="source").results[0]
    if status == "unscored":
        assert result.status == "unscored"
        assert "0.3" in result.reason
        assert "mm" in result.reason
        assert (tmp_path / "out/masks/Case00_mask.nii.gz").is_file()
    else:
        assert result.status in ("ok", "empty")
        assert result.mean_dice is not None
